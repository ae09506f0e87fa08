"""Everything a run needs before its first step, cheapest refusal first.

Owns the order: files, tokenizer, model, lengths, the output folder, memory, disk, then
tokenising, then weights. The invariant: when this fails, ``output_dir`` holds what it held
before (but for the lock file), and the state's memory is given back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.data.batching import LoaderSettings
from headrace.models.slices import plan_sections
from headrace.parallel.ranks import bind_device
from headrace.selftest.run import require_proof
from headrace.store.checkpoint import checkpoint_bytes, load_checkpoint
from headrace.store.identity import check_same_model
from headrace.store.loading import initialise, load_pretrained
from headrace.store.ranges import Share
from headrace.store.state import ModelState
from headrace.trainer import heap, model_checks, preflight
from headrace.trainer.adapters import describe, load_adapters
from headrace.trainer.callbacks import integrations
from headrace.trainer.datasets import open_data
from headrace.trainer.harness import check_harness
from headrace.trainer.loop import LoopSettings
from headrace.trainer.metrics import Meter
from headrace.trainer.place import place
from headrace.trainer.resume import (
    Progress,
    RunLock,
    changed_settings,
    check_data,
    choose_checkpoint,
    read_progress,
)
from headrace.trainer.schedule import Schedule
from headrace.trainer.together import (
    data_facts,
    find_alike,
    read_alike,
    refuse_for_ranks,
    refuse_unlike,
    settings_facts,
)
from headrace.trainer.utilisation import peaks
from headrace.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from headrace.data.evaluation import EvalSet
    from headrace.data.protocol import Loader
    from headrace.engine.config import EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.parallel.ranks import Ranks
    from headrace.trainer.config import TrainConfig

    Say = Callable[[str], None]

_START_ALIKE = "start every rank with the same command, file, versions and kind of device"
_READ_ALIKE = "give every rank the same files, and the same keys that choose among their documents"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What :func:`prepare` made.

    Attributes:
        config: the checked configuration.
        device: where compute runs.
        engine: the engine's settings, placement decided.
        tokenizer: or ``None``.
        spec: the model's structure.
        state: its weights and moments, filled.
        loader: training data, standing where the run goes on.
        eval_sets: datasets to evaluate on.
        eval_settings: their batches.
        settings: when things happen.
        schedule: the learning rate.
        progress: the beginning, or what the checkpoint held.
        checkpoint: what the run goes on from, or ``None``.
        peaks: FLOP/s that utilisation is a share of, by the name of that share.
    """

    config: TrainConfig
    device: torch.device
    engine: EngineConfig
    tokenizer: Any
    spec: ModelSpec
    state: ModelState
    loader: Loader
    eval_sets: list[EvalSet]
    eval_settings: LoaderSettings
    settings: LoopSettings
    schedule: Schedule
    progress: Progress
    checkpoint: Path | None
    peaks: dict[str, float]


def prepare(config: TrainConfig, stack: ExitStack, say: Say, ranks: Ranks) -> Prepared:
    """Check, read, allocate and load, on every rank its part.

    Args:
        config: the run.
        stack: gets what must be given back when the run ends.
        say: shows a line.
        ranks: of the run; the main one alone writes.

    Raises:
        HeadraceError: whatever makes the run impossible, as early as it can be known.
    """
    refuse_for_ranks(config, ranks)
    device = preflight.choose_device(bind_device(ranks, config.device))
    if ranks.size > 1 and device.type == "cuda":
        torch.cuda.set_device(device)
    rates = {name: rate * ranks.size for name, rate in peaks(device).items()}
    preflight.check_files(config)
    if ranks.is_main:
        integrations(config.report_to)  # a tracker that is missing is told now
    tokenizer = preflight.load_tokenizer(config)
    check_harness(config, tokenizer)
    spec = model_checks.take_apart(config, preflight.load_model_config(config, tokenizer))
    if ranks.size > 1:
        refuse_unlike(ranks, settings_facts(config, spec, device), "settings", _START_ALIKE)
    with ranks.main_first():  # it is remembered
        _prove(spec, say, compiled=config.engine.compiles_on(device.type))
    model_checks.check_lengths(config, spec, tokenizer)
    model_checks.check_param_groups(config, spec)
    checkpoint = None
    if ranks.is_main:
        stack.enter_context(RunLock(config.output_dir))
        checkpoint = choose_checkpoint(config)
    told = ranks.tell(None if checkpoint is None else str(checkpoint))
    checkpoint, saved = None if told is None else Path(told), None
    if checkpoint is not None:
        find_alike(ranks, checkpoint)
        read = partial(read_progress, checkpoint, dtype=config.dtype)
        saved = read_alike(ranks, read, checkpoint)
    first_step = saved.step if saved else 0
    # Takes device memory of its own.
    ranks.connect(device, timeout_seconds=config.engine.lane_timeout_seconds)
    engine = place(config, spec, device, say, ranks)
    state = _allocate(config, spec, device, engine, stack=stack, say=say, ranks=ranks)
    if checkpoint is not None:
        read_alike(ranks, partial(check_same_model, checkpoint, spec, state), checkpoint)
    if device.type == "cpu" and state.state_bytes >= heap.LARGE_STATE_BYTES:
        heap.map_large_blocks()
    size = checkpoint_bytes(spec, state, tokenizer)
    _check_disk(config, ranks, size, num_saves=1, first_step=first_step)
    with ranks.main_first():  # the others find everything tokenised
        loader, eval_sets = open_data(
            config,
            tokenizer,
            spec.vocab_size,
            say,
            state=saved.loader if saved and not saved.converted else None,
            rank=ranks.rank,
            num_ranks=ranks.size,
        )
    stack.callback(loader.close)
    if ranks.size > 1:
        refuse_unlike(ranks, data_facts(loader, eval_sets), "data", _READ_ALIKE)
    settings = loop_settings(config, loader.steps_per_epoch)
    schedule = Schedule(config.schedule_settings(settings.num_steps))
    num_saves = _num_saves(settings, loader.steps_per_epoch, first_step)
    _check_disk(config, ranks, size, num_saves=num_saves, first_step=first_step)
    progress = _progress(config, saved, checkpoint, loader, say)
    read_alike(ranks, lambda: _load_weights(config, spec, state, checkpoint, say), checkpoint)
    if spec.carried.names:  # known only now
        size = checkpoint_bytes(spec, state, tokenizer)
        _check_disk(config, ranks, size, num_saves=num_saves, first_step=first_step)
    return Prepared(
        config=config,
        device=device,
        engine=engine,
        tokenizer=tokenizer,
        spec=spec,
        state=state,
        loader=loader,
        eval_sets=eval_sets,
        eval_settings=LoaderSettings(
            micro_batch_size=config.per_device_eval_batch_size,
            num_ranks=ranks.size,
            pad_to_multiple_of=config.pad_to_multiple_of,
            pad_token_id=loader.settings.pad_token_id,
        ),
        settings=settings,
        schedule=schedule,
        progress=progress,
        checkpoint=checkpoint,
        peaks=rates,
    )


def _check_disk(
    config: TrainConfig, ranks: Ranks, size: int, *, num_saves: int, first_step: int
) -> None:
    """Of the rank that writes: others may not even be able to."""
    if ranks.is_main:
        preflight.check_disk(
            config, checkpoint_bytes=size, num_saves=num_saves, first_step=first_step
        )


def _prove(spec: ModelSpec, say: Say, *, compiled: bool) -> None:
    """Test the class with its switches on a tiny twin, before anything long begins."""
    verdict = require_proof(spec, compiled=compiled)
    when = "tested before" if verdict.cached else f"tested in {verdict.seconds:.1f} s"
    say(
        f"model: {verdict.architecture} trains exactly: gradients within "
        f"{verdict.gradient_error:.1e} of plain autograd ({when})"
    )


def loop_settings(config: TrainConfig, steps_per_epoch: int) -> LoopSettings:
    """When things happen in a run whose epochs have ``steps_per_epoch``."""
    num_steps = config.max_steps
    if num_steps < 0:
        # As transformers: an epoch counts whole steps, and a share of one is rounded up.
        num_steps = -int(-config.num_train_epochs * steps_per_epoch // 1)
    eval_steps = save_steps = 0
    if config.evaluates == "steps":  # as transformers, every logged row without a number
        eval_steps = preflight.interval(config.eval_steps or config.logging_steps, num_steps)
    if config.save_strategy == "steps":
        save_steps = preflight.interval(config.save_steps, num_steps)
    return LoopSettings(
        num_steps=num_steps,
        max_grad_norm=config.max_grad_norm or None,
        logging_steps=preflight.interval(config.logging_steps, num_steps),
        eval_steps=eval_steps,
        eval_at_epochs=config.evaluates == "epoch",
        save_steps=save_steps,
        save_at_epochs=config.save_strategy == "epoch",
        async_save=config.async_save,
    )


def _num_saves(settings: LoopSettings, steps_per_epoch: int, first_step: int) -> int:
    """Checkpoints that the rest of the run writes, the last one included."""
    every = steps_per_epoch if settings.save_at_epochs else settings.save_steps
    if not every:
        return 1
    return -(-settings.num_steps // every) - first_step // every


def _allocate(
    config: TrainConfig,
    spec: ModelSpec,
    device: torch.device,
    engine: EngineConfig,
    *,
    stack: ExitStack,
    say: Say,
    ranks: Ranks,
) -> ModelState:
    state = ModelState(
        spec.units,
        config.dtype,
        device=device,
        device_units=engine.device_units or 0,
        share=Share(rank=ranks.rank, num_ranks=ranks.size),
        sections=plan_sections(spec, engine.expert_slices or 1, engine.device_units or 0),
    )
    stack.callback(state.close)
    say(
        f"model: {type(spec.model).__name__}, {spec.num_parameters:,} parameters"
        f"{', tied head' if spec.tied else ''}, on {device}"
    )
    if spec.adapters is not None:
        say(f"adapters: {describe(spec)}")
    elif spec.num_trainable_parameters < spec.num_parameters:
        say(f"training {spec.num_trainable_parameters:,} of them; the others stay as they are")
    say(
        f"state: {state.state_bytes / spec.num_parameters:g} bytes a parameter = "
        f"{state.state_bytes:,} bytes ({format_bytes(state.state_bytes)}), "
        + (
            f"and {state.allocated_bytes - state.state_bytes:,} bytes of alignment"
            if ranks.size == 1
            else f"shared by {ranks.size} ranks, {format_bytes(state.allocated_bytes)} on this one"
        )
    )
    return state


def _progress(
    config: TrainConfig,
    saved: Progress | None,
    checkpoint: Path | None,
    loader: Loader,
    say: Say,
) -> Progress:
    data = loader.fingerprint()
    if saved is None or checkpoint is None:
        return Progress(
            step=0,
            loader=loader.state,
            meter=Meter().to_dict(),
            data=data,
            config=config.to_dict(),
        )
    if saved.converted:
        loader.state = loader.state_after(saved.step)
        say(
            f"going on from {checkpoint}, which another trainer began, at step {saved.step}; the "
            f"data stands where that many steps of this configuration end: epoch "
            f"{loader.state.epoch}, row {loader.state.index}"
        )
        return replace(
            saved, loader=loader.state, data=data, config=config.to_dict(), converted=False
        )
    check_data(saved, data, checkpoint)
    say(f"resuming from {checkpoint}, step {saved.step}")
    for change in changed_settings(saved, config):
        say(f"changed since: {change}")
    return replace(saved, config=config.to_dict())


def _load_weights(
    config: TrainConfig, spec: ModelSpec, state: ModelState, checkpoint: Path | None, say: Say
) -> None:
    if checkpoint is not None and spec.adapters is None:
        load_checkpoint(checkpoint, spec, state)
    elif config.model_name_or_path is not None:
        folder = preflight.model_folder(config.model_name_or_path)
        report = load_pretrained(spec, state, folder, gguf_file=config.gguf_file)
        if report.ignored:
            say(
                f"weights: {len(report.ignored)} tensors of {folder} have no place in the model, "
                f"such as {report.ignored[0]}"
                + (
                    f"; they come through to every checkpoint and export unchanged "
                    f"({format_bytes(spec.carried.num_bytes)})"
                    if spec.carried.names
                    else ""
                )
            )
        if report.unused:
            _logger.warning(
                "%d of them belong to layers that are trained, such as %s: %s computes without "
                "them. config.json may be another model's, or lack a switch (attention_bias, ...)",
                len(report.unused),
                report.unused[0],
                type(spec.model).__name__,
            )
    else:
        initialise(spec, state, seed=config.seed)
    if spec.adapters is not None:
        load_adapters(config, spec, state, checkpoint)
