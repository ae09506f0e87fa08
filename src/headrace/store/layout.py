"""Where every parameter of a unit lies in the unit's flat buffer.

Invariant: offsets are multiples of ``ALIGNMENT`` elements, trainable parameters come before
frozen ones, and a layout depends on names and shapes only, so that every run, rank and
checkpoint of a model agrees on it. Pure: nothing here allocates.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

# 256 bytes of bfloat16. The compiler clones inputs that are aligned to less, and a clone would
# escape the check that recognises weights by their storage (docs/engine.md, kept graphs).
ALIGNMENT = 128


def align(num_elements: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter of a unit.

    Attributes:
        name: its key in the Hugging Face state dict.
        local_name: its key inside the unit's module.
        shape: as in the model.
        offset: first element in the unit's flat buffer.
        trainable: whether it has gradients and optimizer state.
        buffer: it is no parameter but a buffer that checkpoints hold (a routing bias).
        adapter: it is a matrix of a low-rank adapter, in files of its own.
        low_offset: where the low halves of its values lie in the flat buffer, for what a bfloat16
            model computes in float32 all the same (its class says so); else None.
    """

    name: str
    local_name: str
    shape: tuple[int, ...]
    offset: int
    trainable: bool
    buffer: bool = False
    adapter: bool = False
    low_offset: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def low_slice(self) -> slice:
        """The low halves of its elements in the flat buffer."""
        assert self.low_offset is not None
        return slice(self.low_offset, self.low_offset + self.numel)

    @property
    def slice(self) -> slice:
        """Its elements in the flat buffer."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """A unit: what streams as one piece.

    Attributes:
        name: ``"embed"``, ``"layers.<i>"`` or ``"head"``.
        params: in order of offset.
        num_trainable: elements ``[0, num_trainable)`` have optimizer state (alignment included).
        size: elements of the flat buffer (alignment included).
    """

    name: str
    params: tuple[ParamSpec, ...]
    num_trainable: int
    size: int

    @property
    def num_parameters(self) -> int:
        """Elements that are the model's parameters; no alignment, buffers or adapters."""
        return sum(p.numel for p in self.params if not p.buffer and not p.adapter)

    @property
    def float32_params(self) -> tuple[ParamSpec, ...]:
        """What a bfloat16 model computes in float32 all the same."""
        return tuple(param for param in self.params if param.low_offset is not None)

    @property
    def num_trainable_parameters(self) -> int:
        """Trainable elements, alignment not counted."""
        return sum(param.numel for param in self.params if param.trainable)


def plan_unit(
    name: str,
    params: Iterable[tuple[str, str, Sequence[int], bool]],
    *,
    buffers: Collection[str] = (),
    float32: Collection[str] = (),
    adapters: Collection[str] = (),
) -> UnitLayout:
    """Lay out a unit from ``(name, local_name, shape, trainable)`` tuples.

    Matrices come before vectors inside each part, so that parameters with and without weight
    decay form two ranges, and sizes that need padding come last. The low halves of what is
    computed in float32 follow behind everything else.

    Args:
        name: of the unit.
        params: parameters, and buffers that checkpoints hold.
        buffers: full names of those that are buffers.
        float32: full names of those that a bfloat16 model computes in float32.
        adapters: full names of those that belong to low-rank adapters.
    """
    ordered = sorted(
        params,
        key=lambda item: (not item[3], len(item[2]) < 2, math.prod(item[2]) % ALIGNMENT != 0),
    )
    placed: list[ParamSpec] = []
    offset = num_trainable = 0
    for full_name, local_name, shape, trainable in ordered:
        param = ParamSpec(
            name=full_name,
            local_name=local_name,
            shape=tuple(shape),
            offset=offset,
            trainable=trainable,
            buffer=full_name in buffers,
            adapter=full_name in adapters,
        )
        placed.append(param)
        offset = align(offset + param.numel)
        if trainable:
            num_trainable = offset
    for index, param in enumerate(placed):
        if param.name in float32:
            placed[index] = replace(param, low_offset=offset)
            offset = align(offset + param.numel)
    return UnitLayout(name=name, params=tuple(placed), num_trainable=num_trainable, size=offset)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A range of a unit's elements with the grid on which it is cut.

    Attributes:
        start: first element.
        stop: behind the last one.
        origin: an element, perhaps outside the range, from which cuts are counted.
        block: elements whose gradient is summed to one norm.
    """

    start: int
    stop: int
    origin: int
    block: int

    def split(self, start: int, stop: int, size: int) -> list[tuple[int, int]]:
        """Cut ``[start, stop)`` at multiples of ``size`` elements from the origin."""
        origin = self.origin
        ranges = split_range(start - origin, stop - origin, size)
        return [(origin + first, origin + last) for first, last in ranges]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A range of a unit's trainable elements that shares optimizer settings and a grid."""

    start: int
    stop: int
    group: int
    grid: Grid


def plan_segments(
    layout: UnitLayout, group_of: Callable[[ParamSpec], int], grids: Sequence[Grid]
) -> tuple[Segment, ...]:
    """Split the trainable range where the parameter group changes, and where a grid ends.

    Alignment gaps join the segment before them: they hold zeros, have zero gradients, and an
    update leaves them zero.
    """
    groups: list[tuple[int, int, int]] = []
    for param in layout.params:
        if not param.trainable:
            continue
        stop = align(param.offset + param.numel)
        group = group_of(param)
        if groups and groups[-1][2] == group:
            groups[-1] = (groups[-1][0], stop, group)
        else:
            groups.append((param.offset, stop, group))
    return tuple(
        Segment(start=max(start, grid.start), stop=min(stop, grid.stop), group=group, grid=grid)
        for start, stop, group in groups
        for grid in grids
        if max(start, grid.start) < min(stop, grid.stop)
    )


def split_range(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """Cut ``[start, stop)`` at multiples of ``chunk`` elements."""
    cuts = [start, *range((start // chunk + 1) * chunk, stop, chunk), stop]
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
