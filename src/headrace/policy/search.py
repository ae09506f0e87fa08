"""Choose what a run leaves open: units on the device, waves, layers that offload or recompute.

Tries every placement that fits the budgets and takes the one with the shortest predicted step.
Settings that the user gave are kept. On the CPU nothing is placed: its device memory is the host's.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import CapacityError
from headrace.models.slices import check_slices, most_slices
from headrace.policy.budget import Budget, step_budget
from headrace.policy.steptime import Rates, StepTime, predict_step
from headrace.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.engine.config import EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.policy.budget import Workload
    from headrace.store.state import StateDtype

# Of the device's memory: the rest is the CUDA context, cuBLAS workspaces and what the budget's one
# per cent of error may be.
USABLE_SHARE = 0.965
CONTEXT_BYTES = 1 * GIB
SAME_SPEED = 1.01
BINDING = 0.05
OFFLOAD_PARTS = 9  # counts of offloaded layers that are tried


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A complete configuration with what it is expected to need and take, for a cut workload."""

    config: EngineConfig
    workload: Workload
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
    num_ranks: int = 1,
) -> Choice:
    """Fill in what is None: units on the device, rows, waves, layers that offload or recompute.

    Args:
        spec: the model.
        config: the user's settings.
        dtype: of the state.
        workload: the tokens of a step.
        device_bytes: the device's memory.
        host_bytes: host memory that may be used.
        rates: the machine's speeds.
        num_ranks: that share the state; memory and speeds are those of one.

    Raises:
        CapacityError: nothing fits; the message has the arithmetic of the nearest miss.
    """
    return best(
        fitting_choices(
            spec,
            config,
            dtype,
            workload,
            room=Room(device_bytes=device_bytes, host_bytes=host_bytes),
            rates=rates,
            num_ranks=num_ranks,
        )
    )


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory that a step may take.

    Attributes:
        device_bytes: the device's memory; None when the model runs on the CPU.
        host_bytes: host memory.
    """

    device_bytes: int | None
    host_bytes: int

    @property
    def usable(self) -> int:
        """Bytes of the device that the budget may fill."""
        return int((self.device_bytes or 0) * USABLE_SHARE) - CONTEXT_BYTES

    def excess(self, budget: Budget) -> int:
        """Bytes that are missing."""
        if self.device_bytes is None:
            return max(budget.device_bytes + budget.host_bytes - self.host_bytes, 0)
        over = max(budget.device_bytes - self.usable, 0)
        return over + max(budget.host_bytes - self.host_bytes, 0)

    def __str__(self) -> str:
        host = f"{format_bytes(self.host_bytes)} of host memory"
        if self.device_bytes is None:
            return host
        return f"{format_bytes(self.usable)} of device and {host}"


def fitting_choices(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: StateDtype,
    workload: Workload,
    *,
    room: Room,
    rates: Rates,
    num_ranks: int = 1,
) -> list[Choice]:
    """Every placement that fits, with its predicted time; at least one.

    Raises:
        CapacityError: nothing fits; the message has the arithmetic of the nearest miss.
    """
    if room.device_bytes is None:  # its device memory is the host's
        slices = config.expert_slices or 1
        config = replace(
            config,
            device_units=0,
            offload_layers=config.offload_layers or 0,
            expert_slices=slices,
        )
    check_slices(spec, config.expert_slices or 1)
    cpu = room.device_bytes is None

    def needed(config: EngineConfig, cut: Workload) -> Budget:
        return step_budget(spec, config, dtype, cut, cpu=cpu, num_ranks=num_ranks)

    def timed(config: EngineConfig, cut: Workload) -> StepTime:
        return predict_step(spec, config, cut, rates, num_ranks=num_ranks)

    nearest: Budget | None = None
    for count in _slice_counts(spec, config):
        sliced = replace(config, expert_slices=count)
        fitting, missed = _fitting(spec, sliced, workload, room, needed=needed, timed=timed)
        if fitting:
            return fitting
        assert missed is not None
        if nearest is None or room.excess(missed) < room.excess(nearest):
            nearest = missed
    assert nearest is not None
    raise CapacityError(
        f"no placement fits {room}; the nearest needs on the device {nearest.explain('device')}, "
        f"and on the host {nearest.explain('host')}",
        remedy="lower per_device_train_batch_size or max_length, or set "
        "engine.micro_batches_per_wave",
    )


def _slice_counts(spec: ModelSpec, config: EngineConfig) -> list[int]:
    """Numbers of slices of experts to try: more only where nothing fits with fewer."""
    if config.expert_slices is not None:
        return [config.expert_slices]
    most = most_slices(spec)
    return [*itertools.takewhile(lambda n: n < most, (1 << p for p in itertools.count())), most]


def _fitting(
    spec: ModelSpec,
    config: EngineConfig,
    workload: Workload,
    room: Room,
    *,
    needed: Callable[[EngineConfig, Workload], Budget],
    timed: Callable[[EngineConfig, Workload], StepTime],
) -> tuple[list[Choice], Budget | None]:
    """What fits of one number of slices, and the nearest miss."""
    fitting: list[Choice] = []
    nearest: Budget | None = None
    excess = room.excess

    def with_recompute(config: EngineConfig, cut: Workload, count: int | None) -> Budget:
        return needed(replace(config, recompute_layers=count), cut)

    for cut, candidates in _candidates(spec, config, workload):
        if config.recompute_layers is None and config.activations == "keep":
            # Whatever else offloads: where every layer recomputes, nothing needs less.
            least = with_recompute(candidates[0], cut, spec.num_layers)
            if excess(least):
                if nearest is None or excess(least) < excess(nearest):
                    nearest = least
                continue
        for candidate in candidates:
            budget_of = functools.partial(with_recompute, candidate, cut)
            count = config.recompute_layers
            if count is None:
                # Recomputing more layers never needs more: the fewest that fit, by halves.
                most = 0 if config.activations == "recompute" else spec.num_layers
                count = bisect.bisect_left(
                    range(most), True, key=lambda n: not excess(budget_of(n))
                )
            budget = budget_of(count)
            if excess(budget):
                if nearest is None or excess(budget) < excess(nearest):
                    nearest = budget
                continue
            complete = replace(candidate, recompute_layers=count)
            complete, time = _ordered(complete, cut, timed)
            fitting.append(Choice(config=complete, workload=cut, budget=budget, time=time))
            if not count:
                break  # nothing is recomputed: offloading more gains nothing
    return fitting, nearest


def _ordered(
    config: EngineConfig, cut: Workload, timed: Callable[[EngineConfig, Workload], StepTime]
) -> tuple[EngineConfig, StepTime]:
    """The settings with the better order of host updates; together unless that is slower."""
    if config.update_order is not None:
        return config, timed(config, cut)
    together = replace(config, update_order="together")
    time = timed(together, cut)
    # Offloaded activations and updates share the host's memory, which no term here counts; nor
    # does one count what reading the state twice costs, so there must be much to gain.
    if time.exposed["update"] > BINDING * time.seconds and not config.offload_layers:
        first = replace(config, update_order="weights_first")
        sooner = timed(first, cut)
        if sooner.seconds * SAME_SPEED < time.seconds:
            return first, sooner
    return together, time


def best(choices: Sequence[Choice]) -> Choice:
    """The shortest predicted step; of equally fast ones the one that moves least."""
    limit = min(choice.time.seconds for choice in choices) * SAME_SPEED
    return max((c for c in choices if c.time.seconds <= limit), key=_simplicity)


def shortlist(choices: Sequence[Choice], count: int) -> list[Choice]:
    """Up to ``count`` choices that differ in kind, the best first.

    Of each kind (rows, waves, whether layers offload or recompute) only the best is worth a
    measurement: neighbours in one kind differ by less than a measurement tells.
    """
    kinds: dict[tuple[Any, ...], list[Choice]] = {}
    for choice in choices:
        config = choice.config
        kind = (
            choice.workload.rows,
            choice.workload.num_waves(config),
            bool(config.offload_layers),
            bool(config.recompute_layers),
        )
        kinds.setdefault(kind, []).append(choice)
    first = best(choices)
    rest = sorted(map(best, kinds.values()), key=lambda choice: choice.time.seconds)
    return [first, *(choice for choice in rest if choice is not first)][:count]


def _candidates(
    spec: ModelSpec, config: EngineConfig, workload: Workload
) -> Iterator[tuple[Workload, list[EngineConfig]]]:
    """Settings to try but for the layers that recompute, by rising number of offloaded layers."""
    layers = spec.num_layers
    rows_options = [config.rows_per_micro_batch]
    if config.rows_per_micro_batch is None and not spec.is_balanced:
        rows_options = [rows for rows in _halves(workload.rows) if workload.rows % rows == 0]
    offload_options = [config.offload_layers]
    if config.offload_layers is None and config.activations == "keep":
        offload_options = [*sorted({layers * p // OFFLOAD_PARTS for p in range(OFFLOAD_PARTS)})]
    units_options = [config.device_units]
    if config.device_units is None:
        units_options = [*range(len(spec.units) + 1)]
    for rows in rows_options:
        cut = workload if rows is None else workload.cut(rows)
        wave_options = [config.micro_batches_per_wave]
        if config.micro_batches_per_wave is None:
            wave_options = [*_halves(cut.micro_batches)]
        for units, per_wave in itertools.product(units_options, wave_options):
            yield (
                cut,
                [
                    replace(
                        config,
                        rows_per_micro_batch=rows if cut.rows < workload.rows else None,
                        device_units=units,
                        micro_batches_per_wave=per_wave,
                        offload_layers=offload,
                    )
                    for offload in offload_options
                ],
            )


def _simplicity(choice: Choice) -> tuple[bool, int, int, int]:
    """Of equally fast ones the least that moves: it leaves the host and the bus to others."""
    offloaded = choice.config.offload_layers or 0
    units = choice.config.device_units or 0
    return offloaded == 0, units, -offloaded, -choice.workload.micro_batches


def _halves(count: int) -> list[int]:
    """The whole, and halves of it down to one."""
    sizes = {-(-count // (1 << power)) for power in range(count.bit_length() + 1)}
    return sorted(sizes, reverse=True)


def typical_rates(device: torch.device, num_cores: int) -> Rates:
    """Speeds to choose by when none were measured: the choice depends on their ratios only.

    Matrix rates are what layers reached or data sheets suggest by compute capability; transfers
    and updates were measured on PCIe 5 and 16 Xeon cores (docs/performance.md).
    """
    capability = torch.cuda.get_device_capability(device)
    by_capability = {(9, 0): 615e12, (8, 0): 220e12, (8, 9): 120e12, (8, 6): 60e12}
    flops = by_capability.get(capability, 615e12 if capability >= (9, 0) else 60e12)
    return Rates(
        flops=flops,
        h2d_bytes=40e9,
        d2h_bytes=40e9,
        update_parameters=min(0.2e9 * num_cores, 3.3e9),
        device_update_parameters=100e9,
        device_bytes=5e12 if capability >= (9, 0) else 0.8e12,
    )
