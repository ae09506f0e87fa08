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
class Segment:
    """A range of a unit's trainable elements that shares optimizer settings."""

    start: int
    stop: int
    group: int


def plan_segments(layout: UnitLayout, group_of: Callable[[ParamSpec], int]) -> tuple[Segment, ...]:
    """Split the trainable range where the parameter group changes.

    Alignment gaps join the segment before them: they hold zeros, have zero gradients, and an
    update leaves them zero.
    """
    segments: list[Segment] = []
    for param in layout.params:
        if not param.trainable:
            continue
        stop = align(param.offset + param.numel)
        group = group_of(param)
        if segments and segments[-1].group == group:
            segments[-1] = Segment(start=segments[-1].start, stop=stop, group=group)
        else:
            segments.append(Segment(start=param.offset, stop=stop, group=group))
    return tuple(segments)


def cut_segments(segments: Sequence[Segment], cuts: Collection[int]) -> tuple[Segment, ...]:
    """The same segments, and a new one at each of ``cuts`` as well."""
    parts: list[Segment] = []
    for segment in segments:
        inside = sorted(cut for cut in set(cuts) if segment.start < cut < segment.stop)
        bounds = itertools.pairwise([segment.start, *inside, segment.stop])
        parts += [replace(segment, start=start, stop=stop) for start, stop in bounds]
    return tuple(parts)


def split_range(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """Cut ``[start, stop)`` at multiples of ``chunk`` elements."""
    cuts = [start, *range((start // chunk + 1) * chunk, stop, chunk), stop]
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
