"""``train``: from a configuration to a trained model on the disk.

Owns one session of a run: its files, its display and how it ends. The invariant: however a
session ends, the last checkpoint is whole, ``run.json`` says what happened, and the message says
how to go on.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers.trainer_callback import TrainerState

from headrace.engine import Engine
from headrace.errors import DamagedCheckpointError, HeadraceError
from headrace.interrupts import Stopped
from headrace.models.flops import step_flops
from headrace.parallel.ranks import Ranks
from headrace.trainer.callbacks import Callbacks
from headrace.trainer.config import TrainConfig, resolve
from headrace.trainer.display import make_display
from headrace.trainer.evaluate import Evaluator
from headrace.trainer.failures import memory_told
from headrace.trainer.harness import Harness
from headrace.trainer.loop import TrainingLoop
from headrace.trainer.metrics import MetricsLog
from headrace.trainer.prepare import prepare
from headrace.trainer.record import RunRecord, hardware, model_hash, peak_rss_bytes, versions
from headrace.trainer.resume import disk_full_told, foreign_checkpoints, set_aside, writable
from headrace.trainer.saving import Saver
from headrace.trainer.signals import StopRequest
from headrace.trainer.stopping import stopping_callbacks
from headrace.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import TrainerCallback

    from headrace.trainer.display import Display
    from headrace.trainer.prepare import Prepared, Say


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended.

    Attributes:
        status: ``finished``, or ``stopped`` by a signal or a callback before the last step.
        exit_code: 0, or what a signal asks the process to return.
        output_dir: the run's folder.
        checkpoint: the last checkpoint; ``from_pretrained`` loads it.
        step: optimizer steps done over all sessions.
        num_steps: optimizer steps of the whole run.
        loss: last logged training loss, nats a token.
        eval_losses: last evaluation loss of each dataset.
        num_tokens: trained on over all sessions, padding not counted.
        num_supervised_tokens: of those, tokens with a target.
        num_parameters: of the model, a tied head counted once.
        state_bytes: master weights and moments.
        seconds: spent in steps over all sessions.
        peak_rss_bytes: largest resident memory of this process.
    """

    status: str
    exit_code: int
    output_dir: Path
    checkpoint: Path | None
    step: int
    num_steps: int
    loss: float | None
    eval_losses: dict[str, float] = field(default_factory=dict)
    num_tokens: int
    num_supervised_tokens: int
    num_parameters: int
    state_bytes: int
    seconds: float
    peak_rss_bytes: int


def train(
    config: str | Path | dict[str, Any] | TrainConfig,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[TrainerCallback] = (),
    console: Console | None = None,
) -> TrainResult:
    """Train a model as a configuration says.

    Args:
        config: a YAML file, its contents, or a checked configuration.
        overrides: ``key=value``, as on the command line.
        callbacks: instances with the signature of transformers' ``TrainerCallback``.
        console: where progress is shown; standard output by default.

    Raises:
        HeadraceError: anything of :mod:`headrace.errors`; see the class for what it means.
    """
    with StopRequest.before_the_first_step() as stop:
        ranks = Ranks.started()
        # What one of them is refused for ends all, and is said once.
        with ranks.joined(), stop.spares_errors():
            resolved, notes = resolve(config, overrides)
        shown = _Shown(console or Console(), resolved, ranks)
        for note in notes:
            shown.say(f"config: {note}")
        result = _train(resolved, callbacks, shown, ranks, stop)
        with ranks.joined():
            ranks.close(failed=False)
        return result


class _Shown:
    """Lines for people, of the main rank."""

    def __init__(self, console: Console, config: TrainConfig, ranks: Ranks) -> None:
        self.console = console
        self._speaks = config.progress != "none" and ranks.is_main

    def say(self, text: str) -> None:
        if self._speaks:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _train(
    resolved: TrainConfig,
    callbacks: Sequence[TrainerCallback],
    shown: _Shown,
    ranks: Ranks,
    stop: StopRequest,
) -> TrainResult:
    """Prepare and run, from the last checkpoint that is not damaged."""
    say = shown.say
    while True:
        with ExitStack() as stack, ranks.joined(), stop.spares_errors():
            try:
                with memory_told("while the run was prepared"):
                    prepared = prepare(resolved, stack, say, ranks)
            except DamagedCheckpointError as error:
                if ranks.is_main:
                    say(set_aside(resolved, error))
                ranks.meet()
                continue  # with the checkpoint before it
            return _Session(prepared, callbacks, stack, ranks, stop).run(shown.console, say)


class _Session:
    """One start of a run, from the first step it does to the last."""

    def __init__(
        self,
        prepared: Prepared,
        callbacks: Sequence[TrainerCallback],
        stack: ExitStack,
        ranks: Ranks,
        stop: StopRequest,
    ) -> None:
        self._prepared = prepared
        self._ranks = ranks
        self._stop = stop
        config, loader, settings = prepared.config, prepared.loader, prepared.settings
        self._out = config.output_dir
        self._saver = Saver(
            config,
            prepared.spec,
            prepared.state,
            tokenizer=prepared.tokenizer,
            last=prepared.checkpoint,
            ranks=ranks,
        )
        trainer_state = TrainerState(
            max_steps=settings.num_steps,
            logging_steps=settings.logging_steps,
            eval_steps=settings.eval_steps,
            save_steps=settings.save_steps,
            train_batch_size=config.per_device_train_batch_size,
            num_train_epochs=-(
                -settings.num_steps // (loader.steps_per_epoch or settings.num_steps)
            ),
            best_metric=prepared.progress.best_metric,
        )
        self._callbacks = Callbacks(
            [*callbacks, *stopping_callbacks(config)],
            config=config,
            state=trainer_state,
            model=prepared.spec.model,
            tokenizer=prepared.tokenizer,
            is_main=ranks.is_main,
        )
        self._callbacks.restore(prepared.progress.callbacks)
        self._engine = stack.enter_context(
            Engine(
                prepared.spec,
                prepared.state,
                device=prepared.device,
                config=prepared.engine,
                optimizer=config.adamw(),
                dropout_seed=config.seed,
                ranks=ranks,
            )
        )
        self._record: RunRecord | None = None
        self._log: MetricsLog | None = None
        quiet = config.progress == "none" or not ranks.is_main
        stop.begin(requeue=config.requeue, quiet=quiet, ranks=ranks)
        ranks.meet()  # nothing of an earlier run is deleted for one that some rank cannot begin
        if ranks.is_main:
            self._open_files(stack)

    def _open_files(self, stack: ExitStack) -> None:
        prepared, config = self._prepared, self._prepared.config
        with writable(self._out):
            # From here on the folder is this run's.
            if config.overwrite_output_dir:
                for other in foreign_checkpoints(self._out, prepared.checkpoint):
                    shutil.rmtree(other)
            (self._out / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
            first_step = prepared.progress.step
            self._record = RunRecord(
                self._out / "run.json",
                _facts(prepared) | {"num_ranks": self._ranks.size},
                first_step=first_step,
                resumed_from=None if prepared.checkpoint is None else str(prepared.checkpoint),
            )
            self._log = MetricsLog(self._out / "metrics.jsonl", last_step=first_step)
        stack.callback(self._log.close)

    def run(self, console: Console, say: Say) -> TrainResult:
        """Train, and say how it ended."""
        prepared = self._prepared
        _say_plan(prepared, say)
        display = make_display(
            prepared.config.progress if self._ranks.is_main else "none",
            console,
            num_steps=prepared.settings.num_steps,
            title=str(prepared.config.run_name or self._out.name),
        )
        loop = TrainingLoop(
            engine=self._engine,
            loader=prepared.loader,
            schedule=prepared.schedule,
            evaluator=Evaluator(
                self._engine,
                prepared.eval_sets,
                prepared.eval_settings,
                rows_per_step=prepared.loader.settings.rows_per_step,
                harness=Harness(self._engine, prepared.tokenizer, prepared.config)
                if prepared.config.lm_eval_tasks
                else None,
            ),
            flops=partial(step_flops, prepared.spec),
            peaks=prepared.peaks,
            settings=prepared.settings,
            progress=prepared.progress,
            callbacks=self._callbacks,
            display=display,
            log=self._log,
            saver=self._saver,
            saved=self._saved,
            stop=self._stop,
        )
        try:
            with disk_full_told(self._out):
                loop.run()
        except BaseException as error:
            # A save under way is completed, unless somebody wants the process to end now.
            self._saver.close(give_up=isinstance(error, KeyboardInterrupt))
            self._failed(error, loop, display)
            raise
        finally:
            display.close()
        return self._ended(loop, say)

    def _saved(self, step: int) -> None:
        if self._record is not None:
            self._record.update(last_step=step, save_stall_seconds=self._saver.stalled_seconds)

    def _failed(self, error: BaseException, loop: TrainingLoop, display: Display) -> None:
        outcome = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        if self._saver.last is not None:
            display.say(f"{outcome} after step {loop.step}; {self._saver.how_to_go_on}")
        reason = error.message if isinstance(error, (HeadraceError, Stopped)) else repr(error)
        if self._record is None or self._log is None:
            return
        if self._saver.is_stuck:
            self._log.give_up()
            return
        try:
            self._record.end(outcome, last_step=loop.step, error=reason, **self._compiled())
        except OSError:
            return  # a full disk is often the reason; the first error is the one to show

    def _compiled(self) -> dict[str, Any]:
        """What became of the layers that were to be compiled in this session."""
        counts = self._engine.compile_counts
        if counts is None:
            return {}
        return {"compile": {**counts.row(), "eager_reasons": dict(counts.eager_calls)}}

    def _ended(self, loop: TrainingLoop, say: Say) -> TrainResult:
        prepared, meter, checkpoint = self._prepared, loop.meter, self._saver.last
        finished = loop.step >= prepared.settings.num_steps and not loop.evaluation_due
        result = TrainResult(
            status="finished" if finished else "stopped",
            exit_code=0 if finished else self._stop.exit_code,
            output_dir=self._out,
            checkpoint=checkpoint,
            step=loop.step,
            num_steps=prepared.settings.num_steps,
            loss=loop.last_row.get("loss"),
            eval_losses=loop.eval_losses,
            num_tokens=meter.num_tokens,
            num_supervised_tokens=meter.num_supervised_tokens,
            num_parameters=prepared.spec.num_parameters,
            state_bytes=prepared.state.state_bytes,
            seconds=meter.seconds,
            peak_rss_bytes=peak_rss_bytes(),
        )
        if self._record is not None:
            self._record.end(
                result.status,
                last_step=loop.step,
                model_hash=None if checkpoint is None else model_hash(checkpoint),
                checkpoint=None if checkpoint is None else checkpoint.name,
                loss=result.loss,
                eval_losses=result.eval_losses,
                num_tokens=result.num_tokens,
                num_supervised_tokens=result.num_supervised_tokens,
                num_skipped_steps=meter.num_skipped_steps,
                **self._compiled(),
            )
        say(
            f"{result.status} at step {result.step}/{result.num_steps}: "
            f"{format_count(result.num_tokens)} tokens in {format_duration(result.seconds)} of "
            f"steps, peak memory {format_bytes(result.peak_rss_bytes)} resident"
        )
        if self._stop.exit_code and not finished and checkpoint is not None:
            auto = prepared.config.resume_from_checkpoint == "auto"
            also = "" if auto else " with resume_from_checkpoint=auto"
            say(f"the same command{also} goes on from {checkpoint}")
        return result


def _say_plan(prepared: Prepared, say: Say) -> None:
    loader = prepared.loader
    rows = loader.settings.rows_per_step
    say(
        f"plan: {prepared.settings.num_steps:,} steps of {rows} rows (at most "
        f"{format_count(rows * prepared.config.max_length)} tokens)"
        + (f", {loader.steps_per_epoch:,} steps an epoch" if loader.steps_per_epoch else "")
    )
    for line in loader.describe():
        say(line)


def _facts(prepared: Prepared) -> dict[str, Any]:
    """What ``run.json`` says of the run besides its sessions."""
    config, loader, state = prepared.config, prepared.loader, prepared.state
    adapters = prepared.spec.adapters
    return {
        "name": config.run_name or config.output_dir.resolve().name,
        "status": "running",
        "model": config.model_name_or_path or "from scratch",
        "architecture": type(prepared.spec.model).__name__,
        "dtype": config.dtype,
        "num_parameters": prepared.spec.num_parameters,
        "num_trained_parameters": prepared.spec.num_trainable_parameters,
        "adapters": None
        if adapters is None
        else {
            "rank": adapters.settings.rank,
            "alpha": adapters.settings.alpha,
            "targets": [*adapters.relative_targets, *adapters.relative_parameters],
        },
        "state_bytes": state.state_bytes,
        "allocated_bytes": state.allocated_bytes,
        "num_steps": prepared.settings.num_steps,
        "steps_per_epoch": loader.steps_per_epoch,
        "rows_per_step": loader.settings.rows_per_step,
        "max_length": config.max_length,
        "datasets": loader.facts(),
        "versions": versions(),
        "hardware": hardware(prepared.device),
        "peak_flops_per_second": dict(prepared.peaks),
    }
