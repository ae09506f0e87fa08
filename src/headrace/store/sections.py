"""What a weight slot holds of a unit: all of it, or one section of a layer with many experts.

A layer whose experts are sent in slices has a section with everything else, and one for each slice
of consecutive experts. Experts lie stacked in their parameters, so a slice is a contiguous range of
each of these. Invariants: sections are disjoint and cover the unit; the unit's own layout, and
with it checkpoints, do not depend on them. Pure: nothing here allocates.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.store.layout import UnitLayout, align

if TYPE_CHECKING:
    from collections.abc import Collection

    from headrace.store.layout import ParamSpec


@dataclass(frozen=True, kw_only=True)
class Span:
    """A range of a unit's elements and its place in the section.

    Attributes:
        start: first element of the unit.
        stop: behind the last one.
        at: place of the first one in the section.
    """

    start: int
    stop: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Section:
    """What of a unit is sent, and returns, as one piece.

    Attributes:
        unit: which.
        layout: of the section, offsets counted in it; a slice's parameters hold its experts alone.
        spans: which elements of the unit it holds, in order.
        experts: which experts a slice holds, else None.
    """

    unit: int
    layout: UnitLayout
    spans: tuple[Span, ...]
    experts: range | None = None

    def place(self, element: int) -> int | None:
        """Where an element of the unit lies in the section, None if it does not."""
        for span in self.spans:
            if span.start <= element < span.stop:
                return span.at + element - span.start
        return None


def whole_unit(unit: int, layout: UnitLayout) -> tuple[Section, ...]:
    """A unit in one piece."""
    return (Section(unit=unit, layout=layout, spans=(Span(start=0, stop=layout.size, at=0),)),)


def cut_unit(
    unit: int, layout: UnitLayout, stacked: Collection[str], num_experts: int, num_slices: int
) -> tuple[Section, ...]:
    """A layer in sections: what is no expert's, then slices of nearly equal numbers of experts.

    Args:
        unit: which.
        layout: of the whole layer.
        stacked: local names of the parameters that hold one part an expert.
        num_experts: in each of them.
        num_slices: at most ``num_experts``.
    """
    assert 1 <= num_slices <= num_experts
    bounds = [number * num_experts // num_slices for number in range(num_slices + 1)]
    rest = [(p, range(1), 1) for p in layout.params if p.local_name not in stacked]
    experts = [p for p in layout.params if p.local_name in stacked]
    sections = [_section(unit, layout.name, rest)]
    for first, last in itertools.pairwise(bounds):
        part = range(first, last)
        section = _section(
            unit,
            f"{layout.name}, experts {first}-{last - 1}",
            [(param, part, num_experts) for param in experts],
        )
        sections.append(replace(section, experts=part))
    return tuple(sections)


def _section(unit: int, name: str, parts: list[tuple[ParamSpec, range, int]]) -> Section:
    """Place parts of parameters one after another.

    Args:
        unit: they are of.
        name: of the section.
        parts: each a parameter, which of its equal parts, and how many it has.
    """
    spans: list[Span] = []
    params: list[ParamSpec] = []
    at = num_trainable = 0

    def add(start: int, stop: int) -> int:
        nonlocal at
        begun = at
        last = spans[-1] if spans else None
        if last is not None and last.stop == start and last.at + start - last.start == at:
            spans[-1] = replace(last, stop=stop)
        else:
            spans.append(Span(start=start, stop=stop, at=at))
        at = align(at + stop - start)
        return begun

    for param, part, count in parts:
        each = param.numel // count
        start, stop = param.offset + part.start * each, param.offset + part.stop * each
        if part.stop == count:  # with the alignment behind it
            stop = param.offset + align(param.numel)
        shape = param.shape if count == 1 else (len(part), *param.shape[1:])
        params.append(replace(param, shape=shape, offset=add(start, stop)))
        if param.trainable:
            num_trainable = at
    for index, (param, _, _) in enumerate(parts):
        if param.low_offset is not None:
            place = add(param.low_offset, param.low_offset + align(param.numel))
            params[index] = replace(params[index], low_offset=place)
    layout = UnitLayout(name=name, params=tuple(params), num_trainable=num_trainable, size=at)
    return Section(unit=unit, layout=layout, spans=tuple(spans))
