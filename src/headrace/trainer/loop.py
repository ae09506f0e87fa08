"""The training loop: steps, logged rows, evaluations, saves, stops.

Owns the order of things within a step. The invariant: what a row of ``metrics.jsonl``, a
checkpoint and a callback say of step N is the state after N updates, and a checkpoint is written
only after every row up to N. Of several ranks all do the same things in the same order, by what the
main rank's callbacks and any rank's signals ask for. Builds nothing, reads no configuration.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.trainer.failures import MemoryWatch, memory_told, step_with_retry
from headrace.trainer.metrics import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    from headrace.data.loader import StepBatch
    from headrace.data.protocol import Loader
    from headrace.engine import Engine, StepResult
    from headrace.trainer.callbacks import Callbacks
    from headrace.trainer.display import Display
    from headrace.trainer.evaluate import Evaluator
    from headrace.trainer.metrics import MetricsLog
    from headrace.trainer.resume import Progress
    from headrace.trainer.saving import Saver
    from headrace.trainer.schedule import Schedule
    from headrace.trainer.signals import StopRequest


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """When things happen, in optimizer steps.

    Attributes:
        num_steps: of the whole run.
        max_grad_norm: limit of the gradient's norm, ``None`` for none.
        logging_steps: between logged rows.
        eval_steps: between evaluations; 0 for none by steps.
        eval_at_epochs: evaluate at the end of every epoch.
        save_steps: between checkpoints; 0 for none by steps.
        save_at_epochs: save at the end of every epoch.
        async_save: go on while a checkpoint is being written.
    """

    num_steps: int
    max_grad_norm: float | None
    logging_steps: int
    eval_steps: int = 0
    eval_at_epochs: bool = False
    save_steps: int = 0
    save_at_epochs: bool = False
    async_save: bool = True

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates at all; if so, also at its end."""
        return bool(self.eval_steps) or self.eval_at_epochs


class TrainingLoop:
    """Runs steps from a point of progress to the end, or to a stop.

    Args:
        engine: runs a step.
        loader: gives its micro-batches; its state is where the run goes on.
        schedule: gives its learning rate.
        evaluator: evaluates the live weights.
        flops: model FLOPs of a step, from the lengths of its documents.
        peaks: FLOP/s that utilisation is a share of, by the name of that share.
        settings: when things happen.
        progress: the beginning, or what a checkpoint held.
        callbacks: told of every event.
        display: shows it.
        log: the metrics file, on the main rank.
        saver: writes checkpoints.
        saved: told of every step whose checkpoint is complete.
        stop: asks for an early end.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        loader: Loader,
        schedule: Schedule,
        evaluator: Evaluator,
        flops: Callable[[npt.NDArray[np.int64]], float],
        peaks: Mapping[str, float],
        settings: LoopSettings,
        progress: Progress,
        callbacks: Callbacks,
        display: Display,
        log: MetricsLog | None,
        saver: Saver,
        saved: Callable[[int], None],
        stop: StopRequest,
    ) -> None:
        self._engine = engine
        self._ranks = engine.ranks
        self._loader = loader
        self._schedule = schedule
        self._evaluator = evaluator
        self._flops = flops
        self._peaks = peaks
        self._settings = settings
        self._progress = progress
        self._callbacks = callbacks
        self._display = display
        self._log = log
        self._saver = saver
        self._saved = saved
        self._memory = MemoryWatch(display.say)
        self._stop = stop
        self._evaluation_due = progress.evaluation_due
        self._saved_step = progress.step
        self.step = progress.step
        self.meter = Meter(**progress.meter)
        self.last_row: dict[str, Any] = {}

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation of the last step was left to the session that goes on."""
        return self._evaluation_due

    @property
    def eval_losses(self) -> dict[str, float]:
        """Last evaluation loss of each dataset."""
        return self._evaluator.losses

    def run(self) -> None:
        """Train until the last step, a callback's wish or a stop request; save what is there."""
        callbacks, settings = self._callbacks, self._settings
        self._stands(f"after step {self.step}")
        self._sync_state()
        callbacks.fire("on_train_begin")
        if self._evaluation_due and not self._stop.agreed():
            self._emit(self._evaluate())
        while self.step < settings.num_steps and not self._should_end():
            self._one_step()
            self._finish_save(wait=not self._settings.async_save)
            shortage = self._memory.shortage()
            table = self._ranks.table([shortage is not None, self._saver.last_step])
            self._saver.learn(int(table[0][1]))
            if any(short for short, _ in table):
                self._save()
                self._finish_save(wait=True)
                if shortage is not None:
                    raise shortage
                self._ranks.meet()  # the one that is short does not come: its reason ends this one
        if self._saved_step != self.step:
            self._save()
        self._finish_save(wait=True)
        self._stop.agreed()  # so that all return the same
        callbacks.fire("on_train_end")

    def _should_end(self) -> bool:
        self._callbacks.agree(self._ranks)
        return self._stop.agreed() or self._callbacks.control.should_training_stop

    def _one_step(self) -> None:
        callbacks = self._callbacks
        self._stands(f"in step {self.step + 1}")
        callbacks.new_step()
        if self._loader.state.index == 0:
            callbacks.control.should_epoch_stop = False
            callbacks.fire("on_epoch_begin")
        callbacks.fire("on_step_begin")
        started = time.perf_counter()
        self._saver.before_step()
        batch = self._loader.next_step()
        learning_rate = self._schedule(self.step)
        result = step_with_retry(
            self._engine,
            batch.micro_batches,
            learning_rate=learning_rate,
            max_grad_norm=self._settings.max_grad_norm,
            say=self._display.say,
        )
        seconds = time.perf_counter() - started
        self.step += 1
        self._stands(f"after step {self.step}")
        num_tokens, flops = self._ranks.sums([batch.num_tokens, self._flops(batch.lengths)])
        self.meter.add(result, num_tokens=int(num_tokens), seconds=seconds, flops=flops)
        self._display.step(self.step, seconds)
        self._sync_state()
        self._ask(batch)
        callbacks.fire("on_step_end")
        if batch.state.index == 0:
            callbacks.fire("on_epoch_end")
        callbacks.agree(self._ranks)
        self._answer(result, learning_rate)

    def _ask(self, batch: StepBatch) -> None:
        """Set what the settings ask for at this step; callbacks may then change it."""
        control, settings = self._callbacks.control, self._settings
        at_end = self.step >= settings.num_steps
        at_epoch = batch.state.index == 0
        control.should_log = self.step % settings.logging_steps == 0 or at_end
        control.should_evaluate = settings.evaluates and (
            at_end
            or (settings.eval_steps > 0 and self.step % settings.eval_steps == 0)
            or (settings.eval_at_epochs and at_epoch)
        )
        control.should_save = (
            at_end
            or (settings.save_steps > 0 and self.step % settings.save_steps == 0)
            or (settings.save_at_epochs and at_epoch)
        )
        control.should_training_stop |= at_end

    def _answer(self, result: StepResult, learning_rate: float) -> None:
        control = self._callbacks.control
        row: dict[str, Any] = {}
        if control.should_log:
            row |= self.meter.row(result, learning_rate=learning_rate, peaks=self._peaks)
            if (counts := self._engine.compile_counts) is not None:
                row["compile"] = counts.row()
        # A stop leaves the evaluation to the session that goes on: a scheduler's grace period
        # may be shorter.
        self._evaluation_due = self._stop.agreed() and control.should_evaluate
        if control.should_evaluate and not self._evaluation_due:
            row |= self._evaluate()
        if row:
            self._emit(row)
            self._callbacks.agree(self._ranks)
        if self._callbacks.control.should_save:
            self._save()

    def _emit(self, row: dict[str, Any]) -> None:
        row = {"step": self.step, "epoch": self._callbacks.state.epoch, **row}
        if self._log is not None:
            self._log.append(row)
        self._display.row(row)
        self.last_row |= row
        flat = {k: v for k, v in row.items() if v is not None and k not in {"step", "epoch"}}
        for lane, waited in flat.pop("exposed_seconds", {}).items():
            flat[f"exposed_{lane}_seconds"] = waited
        for name, count in flat.pop("compile", {}).items():
            flat[f"compile_{name}"] = count
        for key, over in (("busiest_expert", max), ("num_idle_experts", sum)):
            if key in flat:  # trackers take numbers: the worst layer, and all layers together
                flat[key] = over(flat[key].values())
        for name in ("eval_loss_by_month", "eval_perplexity_by_month"):
            for month, value in flat.pop(name, {}).items():
                flat[f"{name}/{month}"] = value
        flat["epoch"] = row["epoch"]
        self._callbacks.state.log_history.append({"step": self.step, **flat})
        self._callbacks.fire("on_log", logs=flat)
        if "eval_seconds" in row:
            kinds = ("eval_", "lm_eval_", "epoch")
            evaluated = {k: v for k, v in flat.items() if k.startswith(kinds)}
            self._callbacks.fire("on_evaluate", metrics=evaluated)
        if "eval_loss" in row:
            best = self._callbacks.state.best_metric
            if best is None or row["eval_loss"] < best:
                self._callbacks.state.best_metric = row["eval_loss"]
                self._callbacks.state.best_global_step = self.step

    def _evaluate(self) -> dict[str, Any]:
        self._evaluation_due = False
        self._saver.before_step()
        with memory_told(
            f"in the evaluation after step {self.step}",
            "lower per_device_eval_batch_size, or max_length",
        ):
            return self._evaluator.run()

    def _save(self) -> None:
        self._finish_save(wait=True)
        started = time.perf_counter()
        if self._log is not None:
            self._log.sync()
        self._engine.synchronize()
        self._saver.begin(self.progress())
        self._saver.stalled_seconds += time.perf_counter() - started
        self._saved_step = self.step

    def _finish_save(self, *, wait: bool) -> None:
        """Tell of a save that is complete; its step may lie behind."""
        finished = self._saver.finish(wait=wait)
        if finished is None:
            return
        step, path = finished
        self._saved(step)
        self._display.say(f"saved {path}")
        state = self._callbacks.state
        state.global_step = step
        self._callbacks.fire("on_save")
        state.global_step = self.step

    def progress(self) -> Progress:
        """The trainer's part of a checkpoint of this moment."""
        return replace(
            self._progress,
            step=self.step,
            loader=self._loader.state,
            meter=self.meter.to_dict(),
            callbacks=self._callbacks.exported(),
            best_metric=self._callbacks.state.best_metric,
            evaluation_due=self._evaluation_due,
        )

    def _stands(self, where: str) -> None:
        self._ranks.stands(where, self._saver.how_to_go_on)

    def _sync_state(self) -> None:
        state = self._callbacks.state
        state.global_step = self.step
        state.epoch = self._loader.epoch
        state.num_input_tokens_seen = self.meter.num_tokens
