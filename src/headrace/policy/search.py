"""Choose what a run leaves open: units on the device, layers that recompute, waves.

Tries every placement that fits the budgets and takes the one with the shortest predicted step.
Settings that the user gave are kept. On the CPU nothing is placed: its device memory is the host's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace.errors import CapacityError
from headrace.policy.budget import Budget, step_budget
from headrace.policy.steptime import Rates, StepTime, predict_step
from headrace.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine.config import EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.policy.budget import Workload
    from headrace.store.state import StateDtype

# Of the device's memory: the rest is the CUDA context, cuBLAS workspaces and what the budget's one
# per cent of error may be.
USABLE_SHARE = 0.965
CONTEXT_BYTES = 1 * GIB
SAME_SPEED = 1.01


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A complete configuration with what it is expected to need and take."""

    config: EngineConfig
    budget: Budget
    time: StepTime


def choose(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: StateDtype,
    workload: Workload,
    *,
    device_bytes: int,
    host_bytes: int,
    rates: Rates,
) -> Choice:
    """Fill in ``device_units``, ``recompute_layers`` and ``micro_batches_per_wave`` if None.

    Args:
        spec: the model.
        config: the user's settings.
        dtype: of the state.
        workload: the tokens of a step.
        device_bytes: the device's memory.
        host_bytes: host memory that may be used.
        rates: the machine's speeds.

    Raises:
        CapacityError: nothing fits; the message has the arithmetic of the nearest miss.
    """
    usable = int(device_bytes * USABLE_SHARE) - CONTEXT_BYTES
    fitting: list[Choice] = []
    nearest: Budget | None = None
    recompute_options = [config.recompute_layers]
    if config.recompute_layers is None:
        every = config.activations == "recompute"
        recompute_options = [0] if every else list(range(spec.num_layers + 1))
    unit_options = [config.device_units]
    if config.device_units is None:
        unit_options = list(range(len(spec.units) + 1))
    wave_options: Sequence[int | None] = [config.micro_batches_per_wave]
    if config.micro_batches_per_wave is None:
        wave_options = _even_waves(workload.micro_batches)
    for device_units, per_wave in itertools.product(unit_options, wave_options):
        for recompute_layers in recompute_options:
            candidate = replace(
                config,
                device_units=device_units,
                recompute_layers=recompute_layers,
                micro_batches_per_wave=per_wave,
            )
            budget = step_budget(spec, candidate, dtype, workload)
            excess = max(budget.device_bytes - usable, 0) + max(budget.host_bytes - host_bytes, 0)
            if excess:
                if nearest is None or excess < _excess(nearest, usable, host_bytes):
                    nearest = budget
                continue
            time = predict_step(spec, candidate, workload, rates)
            fitting.append(Choice(config=candidate, budget=budget, time=time))
            break  # fewer recomputed layers are never slower with the same units and waves
    if fitting:
        limit = min(choice.time.seconds for choice in fitting) * SAME_SPEED
        # Of equally fast ones the most resident: it leaves the host and the bus to others.
        return max(
            (choice for choice in fitting if choice.time.seconds <= limit),
            key=lambda choice: choice.config.device_units or 0,
        )
    assert nearest is not None
    raise CapacityError(
        f"no placement fits {format_bytes(usable)} of device and {format_bytes(host_bytes)} of "
        f"host memory; the nearest needs on the device {nearest.explain('device')}, and on the "
        f"host {nearest.explain('host')}",
        remedy="lower per_device_train_batch_size or max_length, or set "
        "engine.micro_batches_per_wave",
    )


def _even_waves(micro_batches: int) -> list[int]:
    """Micro-batches of a wave that make all waves but the last alike; the whole step first."""
    sizes = {-(-micro_batches // count) for count in range(1, micro_batches + 1)}
    return sorted(sizes, reverse=True)


def _excess(budget: Budget, device_bytes: int, host_bytes: int) -> int:
    return max(budget.device_bytes - device_bytes, 0) + max(budget.host_bytes - host_bytes, 0)


def typical_rates(device: torch.device, num_cores: int) -> Rates:
    """Speeds to choose by when none were measured: the choice depends on their ratios only.

    Matrix rates are what layers reached or data sheets suggest by compute capability; transfers
    and updates were measured on PCIe 5 and 16 Xeon cores (docs/performance.md).
    """
    capability = torch.cuda.get_device_capability(device)
    by_capability = {(9, 0): 580e12, (8, 0): 220e12, (8, 9): 120e12, (8, 6): 60e12}
    flops = by_capability.get(capability, 580e12 if capability >= (9, 0) else 60e12)
    return Rates(
        flops=flops,
        h2d_bytes=40e9,
        d2h_bytes=40e9,
        update_parameters=min(0.2e9 * num_cores, 3.3e9),
        device_update_parameters=100e9,
        device_bytes=3.3e12 if capability >= (9, 0) else 0.8e12,
    )
