"""Device and host bytes of a step, before anything is allocated.

Counts what the engine allocates (slots, accumulators, resident state) and what a step holds at its
peak, the end of forward, when the activations of a wave, the head's chunk and a layer's temporaries
exist together. Of several ranks it counts one: its shard of state and gradients, and slots that
hold whole units, or sections of them. Pure.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.offload import IN_FLIGHT
from headrace.models.slices import plan_sections
from headrace.policy.elements import (
    chosen_experts,
    kept_by_layer,
    kept_elements_per_token,
    largest_layer,
    row_elements,
    unmultiplied_by_layer,
)
from headrace.store.ranges import Share, section_shard, unit_shard
from headrace.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine.config import EngineConfig, Leaving
    from headrace.models.spec import ModelSpec
    from headrace.store.state import StateDtype

_BF16, _FP32, _INDEX = 2, 4, 8
UNEVEN = 2.0
"""Rows of the busiest slice of experts over the even share, as far as the budget allows for."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The tokens of a step.

    Attributes:
        tokens: positions of one micro-batch.
        micro_batches: micro-batches of a step.
        sequence_length: tokens that attend to each other at most.
        rows: of one micro-batch, which can be cut between them.
    """

    tokens: int
    micro_batches: int
    sequence_length: int
    rows: int = 1

    def cut(self, rows: int) -> Workload:
        """The same tokens in micro-batches of at most ``rows`` rows."""
        rows = min(rows, self.rows)
        pieces = -(-self.rows // rows)
        return Workload(
            tokens=self.tokens // self.rows * rows,
            micro_batches=self.micro_batches * pieces,
            sequence_length=self.sequence_length,
            rows=rows,
        )

    def per_wave(self, config: EngineConfig) -> int:
        """Micro-batches of the largest wave."""
        return min(config.micro_batches_per_wave or self.micro_batches, self.micro_batches)

    def num_waves(self, config: EngineConfig) -> int:
        """Waves of a step."""
        return -(-self.micro_batches // self.per_wave(config))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes by kind.

    Attributes:
        device: on the compute device.
        host: in host memory.
    """

    device: dict[str, int]
    host: dict[str, int]

    @property
    def device_bytes(self) -> int:
        """All device bytes."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """All host bytes."""
        return sum(self.host.values())

    def explain(self, where: str) -> str:
        """The arithmetic of ``"device"`` or ``"host"`` in one line."""
        items = self.device if where == "device" else self.host
        total = sum(items.values())
        terms = " + ".join(f"{name} {format_bytes(size)}" for name, size in items.items() if size)
        return f"{terms or 'nothing'} = {format_bytes(total)}"


def step_budget(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: StateDtype,
    workload: Workload,
    *,
    cpu: bool = False,
    num_ranks: int = 1,
) -> Budget:
    """What a run with these settings needs on a CUDA device and its host.

    On the CPU (``cpu``) device and host are one memory, compute is float32, and the figure is a
    lower bound: layers that are not compiled keep more than their dearest results.

    Args:
        spec: the model.
        config: with ``device_units`` and ``recompute_layers`` chosen.
        dtype: of the state.
        workload: the tokens of a step.
        cpu: the model runs on the host.
        num_ranks: that share the state; the figures are those of one.
    """
    units = _units(spec, config, num_ranks)
    resident = units[: config.device_units or 0]
    streamed = units[len(resident) :]
    alone = num_ranks == 1
    compute = _BF16 if dtype == "bfloat16" and not cpu else _FP32
    returned = _FP32 if config.gradient_dtype == "float32" or dtype == "float32" else _BF16
    device = {
        "state on the device": sum(_state_bytes(unit, dtype) for unit in resident),
        "gradients kept on the device": returned
        * _retained_elements(units, config, workload, alone=alone),
        "weight slots": compute * _slot_elements(units, config, alone=alone),
        "gradient accumulators": _FP32 * _accumulator_elements(units, config, workload),
        "activations": _activation_bytes(spec, config, workload, compute),
        "temporaries": _temporary_bytes(spec, config, workload, compute, cpu=cpu),
    }
    host = {
        "state": sum(_state_bytes(unit, dtype) for unit in streamed),
        "returned gradients": sum(returned * unit.trained for unit in streamed),
        "offloaded activations": offloaded_bytes(spec, config, workload, compute),
    }
    return Budget(device=device, host=host)


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """What a rank holds of a unit, and what that is sent in: the whole, or its sections. Elements.

    Attributes:
        numel: of the rank's weights.
        trained: of its other planes.
        count: of the pieces.
        slot: of the largest one.
        gradient: of the largest one's.
        gradients: of all of them.
    """

    numel: int
    trained: int
    count: int
    slot: int
    gradient: int
    gradients: int


@functools.lru_cache(maxsize=16)  # a search asks for one model thousands of times
def _measured(spec: ModelSpec, num_ranks: int, num_slices: int) -> tuple[_Unit, ...]:
    share, units = Share(num_ranks=num_ranks), []
    for layout, parts in zip(spec.units, plan_sections(spec, num_slices), strict=True):
        shard = unit_shard(layout, share, parts)
        pieces = [section_shard(part.layout, share) for part in parts]
        units.append(
            _Unit(
                numel=shard.numel,
                trained=shard.num_trained,
                count=len(pieces),
                slot=max(piece.slot_size for piece in pieces),
                gradient=max(piece.gradient_size for piece in pieces),
                gradients=sum(piece.gradient_size for piece in pieces),
            )
        )
    return tuple(units)


def _units(spec: ModelSpec, config: EngineConfig, num_ranks: int) -> Sequence[_Unit]:
    whole, sliced = _measured(spec, num_ranks, 1), sliced_layers(spec, config)
    if not sliced:
        return whole
    cut = _measured(spec, num_ranks, config.expert_slices or 1)
    return [pair[index - 1 in sliced] for index, pair in enumerate(zip(whole, cut, strict=True))]


def _state_bytes(unit: _Unit, dtype: StateDtype) -> int:
    weights = _BF16 if dtype == "bfloat16" else _FP32
    return weights * unit.numel + (12 - weights) * unit.trained


@dataclass(frozen=True, kw_only=True)
class _Sliced:
    """Sizes of layers whose experts are sent in slices.

    Attributes:
        rest: elements that the largest layer keeps a token without its experts, and trains.
        row: elements that experts that run by themselves hold of a row.
        slice: elements that its largest slice trains.
    """

    rest: tuple[int, int]
    row: int
    slice: int


@functools.lru_cache(maxsize=16)  # as above
def _sliced(spec: ModelSpec, num_slices: int) -> _Sliced:
    largest = max(spec.experts, key=lambda layer: spec.units[1 + layer].size)
    sections = plan_sections(spec, num_slices)[1 + largest]
    rest, *slices = (section.layout for section in sections)
    return _Sliced(
        rest=(kept_elements_per_token(spec, rest), rest.num_trainable),
        row=row_elements(spec, largest),
        slice=max(layout.num_trainable for layout in slices),
    )


def sliced_layers(spec: ModelSpec, config: EngineConfig) -> frozenset[int]:
    """Layers whose experts are sent in slices."""
    if (config.expert_slices or 1) == 1:
        return frozenset()
    first = max(0, (config.device_units or 0) - 1)
    return frozenset(layer for layer in spec.experts if layer >= first)


@functools.lru_cache(maxsize=64)
def rest_parameters(spec: ModelSpec, sliced: frozenset[int]) -> int:
    """Parameters of matrices in these layers that are no expert's."""
    return sum(
        param.numel
        for index in sliced
        for param in spec.units[1 + index].params
        if len(param.shape) >= 2 and param.local_name not in spec.experts[index].local_names
    )


def activations_of(spec: ModelSpec, config: EngineConfig) -> tuple[Leaving, ...]:
    """What each layer leaves for its backward; one whose experts are sliced recomputes."""
    sliced, first = sliced_layers(spec, config), spec.first_trained_layer
    plan = config.activation_plan(spec.num_layers, first)
    if not sliced:
        return plan
    reached = (i in sliced and i >= first for i in range(spec.num_layers))
    return tuple("recompute" if i else what for i, what in zip(reached, plan, strict=True))


def _slot_elements(units: Sequence[_Unit], config: EngineConfig, *, alone: bool) -> int:
    # Of several ranks what is on the device is gathered in a slot, too.
    num_resident = (config.device_units or 0) if alone else 0
    streamed = units[max(1, num_resident) : -1]
    num_slots = min(config.weight_slots, sum(u.count for u in streamed) + 1) if streamed else 0
    elements = num_slots * max((unit.slot for unit in streamed), default=0)
    elements += 0 if num_resident > 0 else units[0].slot
    return elements + (0 if num_resident >= len(units) else units[-1].slot)


def _accumulator_elements(units: Sequence[_Unit], config: EngineConfig, workload: Workload) -> int:
    layers, ends = units[1:-1], units[0].gradient + units[-1].gradient
    if workload.num_waves(config) > 1:
        return ends + sum(unit.gradients for unit in layers)
    count = min(config.gradient_slots, sum(unit.count for unit in layers))
    return ends + count * max(unit.gradient for unit in layers)


def _retained_elements(
    units: Sequence[_Unit], config: EngineConfig, workload: Workload, *, alone: bool
) -> int:
    """Gradients that must leave an accumulator in which layers, or ranks, take turns."""
    num_resident = config.device_units or 0
    if not alone:
        return sum(unit.trained for unit in units[:num_resident])
    if workload.num_waves(config) > 1:
        return 0
    return sum(unit.trained for unit in units[1 : min(num_resident, len(units) - 1)])


def _activation_bytes(
    spec: ModelSpec, config: EngineConfig, workload: Workload, compute: int
) -> int:
    plan = activations_of(spec, config)
    tokens = workload.tokens * workload.per_wave(config)
    kept = sum(size for size, what in zip(kept_by_layer(spec), plan, strict=True) if what == "keep")
    inputs = (plan.count("offload") + plan.count("recompute")) * spec.hidden_size
    # On its way, and being made: so many micro-batches of a layer, not of a wave.
    leaving = workload.tokens * (IN_FLIGHT + 1) * max(_leaving(spec, config), default=0)
    # The wave's hidden state and its gradient.
    size = compute * (tokens * (kept + inputs + 2 * spec.hidden_size) + leaving)
    first = spec.first_trained_layer
    if sliced := [layer for layer in sliced_layers(spec, config) if layer >= first]:
        chosen = chosen_experts(spec)
        # Of each sliced layer what its experts returned, and whom each token chose. Of the one at
        # work their input and output's gradient, a float32 sum, and the order of the rows.
        size += tokens * len(sliced) * (compute * spec.hidden_size + (_INDEX + _FP32) * chosen)
        size += tokens * ((2 * compute + _FP32) * spec.hidden_size + 4 * _INDEX * chosen)
    return size


def offloaded_bytes(
    spec: ModelSpec, config: EngineConfig, workload: Workload, compute: int = _BF16
) -> int:
    """What a wave sends to host memory: what layers save, less their input."""
    return compute * workload.tokens * workload.per_wave(config) * sum(_leaving(spec, config))


def _leaving(spec: ModelSpec, config: EngineConfig) -> list[int]:
    """Elements a token of each layer that offloads."""
    hidden = spec.hidden_size
    plan = activations_of(spec, config)
    sizes = zip(kept_by_layer(spec), plan, strict=True)
    return [size - hidden for size, what in sizes if what == "offload"]


def _temporary_bytes(
    spec: ModelSpec, config: EngineConfig, workload: Workload, compute: int, *, cpu: bool
) -> int:
    chunk = min(config.loss_chunk_tokens, workload.tokens)
    matrix = 0 if cpu else spec.vocab_size * spec.hidden_size  # the CPU adds in place
    head = 2 * compute * chunk * spec.vocab_size + _FP32 * matrix
    head += 2 * compute * workload.tokens * spec.hidden_size
    sliced = sliced_layers(spec, config)
    outputs, num_trainable = largest_layer(spec, sliced)
    # Forward and backward of a recompute that leaves products out are one graph, in which what
    # they would have multiplied lies beside the rest: 14.5 GiB where a whole one took 13.4 (4B,
    # eight rows of 4096).
    again = not cpu and "recompute" in activations_of(spec, config)
    unmultiplied = max(unmultiplied_by_layer(spec)) if again else 0
    backward = [workload.tokens * (2 * outputs + unmultiplied) + num_trainable]
    if sliced:
        slices = config.expert_slices or 1
        found = _sliced(spec, slices)
        rows = round(workload.tokens * chosen_experts(spec) * min(1.0, UNEVEN / slices))
        backward += [
            2 * workload.tokens * found.rest[0] + found.rest[1],
            rows * found.row + found.slice,
        ]
    return max(head, compute * max(backward))
