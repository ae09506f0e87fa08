"""Where a run's units go: decided before anything is allocated.

On CUDA what the configuration leaves open is chosen by what fits and what is fastest
(:mod:`headrace.policy`); on the CPU nothing is placed, its device memory is the host's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace import kernels
from headrace.errors import CapacityError
from headrace.policy.budget import Workload, step_budget
from headrace.policy.search import choose, typical_rates
from headrace.store.host_memory import host_memory
from headrace.trainer.saving import spare_bytes
from headrace.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.engine.config import EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.trainer.config import TrainConfig


def place(
    config: TrainConfig, spec: ModelSpec, device: torch.device, say: Callable[[str], None]
) -> EngineConfig:
    """The engine's settings with every placement decided.

    Raises:
        CapacityError: nothing fits; nothing was allocated.
    """
    workload = Workload(
        tokens=config.per_device_train_batch_size * config.max_length,
        micro_batches=config.gradient_accumulation_steps,
        sequence_length=config.max_length,
        rows=config.per_device_train_batch_size,
    )
    if device.type != "cuda":
        _check_host(config, spec, workload)
        return config.engine
    cores = config.engine.update_threads or kernels.num_usable_cores()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    choice = choose(
        spec,
        config.engine,
        config.dtype,
        workload,
        device_bytes=free_bytes,
        host_bytes=host_memory().available - spare_bytes(config, spec.units),
        rates=typical_rates(device, cores),
    )
    units = choice.config.device_units or 0
    plan = choice.config.activation_plan(spec.num_layers)
    say(
        f"placement: {units} of {len(spec.units)} units on the device, "
        f"{plan.count('recompute')} of {spec.num_layers} layers recompute, "
        f"{plan.count('offload')} offload, "
        f"{choice.workload.num_waves(choice.config)} waves of micro-batches of "
        f"{choice.workload.rows} rows; predicted "
        f"{format_bytes(choice.budget.device_bytes)} on the device, "
        f"{format_bytes(choice.budget.host_bytes)} on the host, "
        f"{choice.time.seconds:.2f} s a step at typical rates, bound by {choice.time.binding}"
    )
    return choice.config


def _check_host(config: TrainConfig, spec: ModelSpec, workload: Workload) -> None:
    """Refuse a step that cannot fit the host, before anything long starts."""
    budget = step_budget(spec, config.engine, config.dtype, workload, cpu=True)
    spare = spare_bytes(config, spec.units)
    needed = budget.device_bytes + budget.host_bytes + spare
    memory = host_memory()
    if needed > memory.available:
        raise CapacityError(
            f"a step needs at least {format_bytes(needed)} ({budget.explain('host')}; "
            f"{budget.explain('device')}; {format_bytes(spare)} for saves), and "
            f"{format_bytes(memory.available)} is there ({memory.explain()})",
            remedy="lower per_device_train_batch_size, max_length or "
            "engine.micro_batches_per_wave, or set engine.activations: recompute or "
            "async_save: false",
        )
