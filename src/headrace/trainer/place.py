"""Where a run's units go: decided before anything is allocated.

On CUDA what the configuration leaves open is chosen by what fits and what is fastest
(:mod:`headrace.policy`); on the CPU nothing is placed, its device memory is the host's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from headrace import kernels
from headrace.errors import CapacityError, ConfigError
from headrace.models.left_out import left_out
from headrace.models.slices import check_slices
from headrace.parallel.ranks import Ranks
from headrace.policy.budget import Workload, activations_of, sliced_layers, step_budget
from headrace.policy.search import Choice, Room, best, fitting_choices, typical_rates
from headrace.policy.steptime import predict_step
from headrace.store.host_memory import OVERRIDE_VARIABLE, host_memory
from headrace.trainer import tune_file
from headrace.trainer.saving import spare_bytes, unit_bytes
from headrace.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.engine.config import EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.policy.budget import Budget
    from headrace.trainer.config import TrainConfig
    from headrace.trainer.tune_file import TuneRecord


def place(
    config: TrainConfig,
    spec: ModelSpec,
    device: torch.device,
    say: Callable[[str], None],
    ranks: Ranks | None = None,
) -> EngineConfig:
    """The engine's settings with every placement decided, the same on every rank.

    Raises:
        CapacityError: nothing fits; nothing was allocated.
        ConfigError: the experts of a layer cannot be sent in so many slices.
    """
    ranks = ranks or Ranks()
    check_slices(spec, config.engine.expert_slices or 1)
    workload = workload_of(config)
    limits = room(config, spec, device, ranks)
    tuned = _tuned(config, spec, device, say) if ranks.size == 1 else None
    if ranks.size > 1 and config.tune_file is not None and config.tune_file.exists():
        say(f"tune: {config.tune_file} is passed over: it was measured on one rank")
    engine = None
    if tuned is not None:
        engine = tuned.apply(config.engine)
        if limits.excess(_budget(config, spec, engine, workload, cpu=device.type == "cpu")):
            say(f"placement: what {config.tune_file} says does not fit the memory that is free now")
            engine = None
    if device.type != "cuda":
        if engine is not None:
            say(f"placement: as {config.tune_file} says")
            return engine
        _check_host(config, spec, workload, ranks)
        return _with_threads(config, config.engine, ranks)
    rates, source = typical_rates(device, num_update_threads(config, ranks)), "typical rates"
    if tuned is not None:
        rates, source = tuned.rates, f"the rates in {config.tune_file}"
    if engine is None:
        choice = best(
            fitting_choices(
                spec,
                config.engine,
                config.dtype,
                workload,
                room=limits,
                rates=rates,
                num_ranks=ranks.size,
            )
        )
    else:
        cut = workload.cut(engine.rows_per_micro_batch or workload.rows)
        choice = Choice(
            config=engine,
            workload=cut,
            budget=_budget(config, spec, engine, workload, cpu=False),
            time=predict_step(spec, engine, cut, rates),
        )
    units = choice.config.device_units or 0
    plan = activations_of(spec, choice.config)
    slices = choice.config.expert_slices or 1
    say(
        f"placement: {units} of {len(spec.units)} units on the device, "
        f"{plan.count('recompute')} of {spec.num_layers} layers recompute"
        f"{_left_out(spec, choice.config)}, {plan.count('offload')} offload, "
        f"{f'experts in {slices} slices, ' if slices > 1 else ''}"
        f"{choice.workload.num_waves(choice.config)} waves of micro-batches of "
        f"{choice.workload.rows} rows; predicted "
        f"{format_bytes(choice.budget.device_bytes)} on the device, "
        f"{format_bytes(choice.budget.host_bytes)} on the host, "
        f"{choice.time.seconds:.2f} s a step at {source}, bound by {choice.time.binding}"
    )
    return _with_threads(config, _alike(choice.config, ranks), ranks)


def _alike(engine: EngineConfig, ranks: Ranks) -> EngineConfig:
    """What the main rank chose: machines may differ in their rates, and ranks walk one plan."""
    chosen = ranks.tell({name: getattr(engine, name) for name in tune_file.CHOSEN})
    return replace(engine, **chosen)


def _left_out(spec: ModelSpec, engine: EngineConfig) -> str:
    """The matrices that recompute leaves out, in words."""
    if engine.compile is False:
        return ""
    plan, sliced = enumerate(activations_of(spec, engine)), sliced_layers(spec, engine)
    again = [index for index, mode in plan if mode == "recompute" and index not in sliced]
    names = sorted({name.removesuffix(".weight") for i in again for name in left_out(spec, i)})
    return f" (without {', '.join(names)})" if names else ""


def _with_threads(config: TrainConfig, engine: EngineConfig, ranks: Ranks) -> EngineConfig:
    """Ranks of a machine share its cores."""
    if ranks.size == 1:
        return engine
    return replace(engine, update_threads=num_update_threads(config, ranks))


def workload_of(config: TrainConfig) -> Workload:
    """The tokens of a step of one rank."""
    return Workload(
        tokens=config.per_device_train_batch_size * config.max_length,
        micro_batches=config.gradient_accumulation_steps,
        sequence_length=config.max_length,
        rows=config.per_device_train_batch_size,
    )


def room(
    config: TrainConfig, spec: ModelSpec, device: torch.device, ranks: Ranks | None = None
) -> Room:
    """Memory that a step of any rank may take now; saves keep some for themselves.

    Ranks of a machine share its memory; the main one gathers a unit there when it saves.
    """
    ranks = ranks or Ranks()
    host_bytes = host_memory().available
    if ranks.size > 1:
        gathered = max(unit_bytes(layout, config.dtype) for layout in spec.units)
        host_bytes = (host_bytes - gathered) // ranks.local_size
    host_bytes -= spare_bytes(config, spec.units, num_ranks=ranks.size)
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    # Ranks choose alike, by the least of them; and none takes memory before all have looked.
    table = ranks.table([host_bytes, free_bytes])
    host_bytes, free_bytes = (int(min(column)) for column in zip(*table, strict=True))
    return Room(device_bytes=free_bytes if device.type == "cuda" else None, host_bytes=host_bytes)


def num_update_threads(config: TrainConfig, ranks: Ranks | None = None) -> int:
    """Host threads of the optimizer, of one rank."""
    cores = kernels.num_usable_cores() // (1 if ranks is None else ranks.local_size)
    return config.engine.update_threads or max(1, cores)


def _budget(
    config: TrainConfig, spec: ModelSpec, engine: EngineConfig, workload: Workload, *, cpu: bool
) -> Budget:
    cut = workload.cut(engine.rows_per_micro_batch or workload.rows)
    return step_budget(spec, engine, config.dtype, cut, cpu=cpu)


def _tuned(
    config: TrainConfig, spec: ModelSpec, device: torch.device, say: Callable[[str], None]
) -> TuneRecord | None:
    """The choice that was made for this run, if there is one."""
    if config.tune_file is None:
        return None
    try:
        record = tune_file.read(config.tune_file)
    except ConfigError as error:
        say(f"tune: {config.tune_file} is passed over: {error.message}")
        return None
    now = tune_file.fingerprint(config, spec, device)
    if changed := tune_file.differences(record.fingerprint, now):
        rest = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        say(f"tune: {config.tune_file} is passed over: {changed[0]}{rest}; headrace tune renews it")
        return None
    return record


def _check_host(config: TrainConfig, spec: ModelSpec, workload: Workload, ranks: Ranks) -> None:
    """Refuse a step that cannot fit the host, before anything long starts."""
    budget = step_budget(
        spec, config.engine, config.dtype, workload, cpu=True, num_ranks=ranks.size
    )
    spare = spare_bytes(config, spec.units, num_ranks=ranks.size)
    needed = ranks.local_size * (budget.device_bytes + budget.host_bytes + spare)
    memory = host_memory()
    if needed > memory.available:
        each = f"{ranks.local_size} ranks of each: " if ranks.local_size > 1 else ""
        raise CapacityError(
            f"a step needs at least {format_bytes(needed)} ({each}{budget.explain('host')}; "
            f"{budget.explain('device')}; {format_bytes(spare)} for saves), and "
            f"{format_bytes(memory.available)} is there ({memory.explain()})",
            remedy=(f"raise {OVERRIDE_VARIABLE}, " if memory.override is not None else "")
            + "lower per_device_train_batch_size, max_length or "
            "engine.micro_batches_per_wave, or set engine.activations: recompute or "
            "async_save: false",
        )
