"""Values with intervals, one row each, the numbers printed beside the picture."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.report.figures import theme
from headrace.report.text import with_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value with its interval.

    Attributes:
        label: what it is; rows of a group repeat none of the group's words.
        value: the point estimate, ``None`` when there is none.
        low: lower limit of the interval, ``None`` when there is none.
        high: upper limit.
        colour: a colour role of :mod:`headrace.report.figures.theme`.
        hollow: drawn open, for references.
    """

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    colour: str = theme.ACCENT
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows under one heading, with a ``note`` on the heading's line (below it when narrow)."""

    heading: str
    rows: Sequence[Row]
    note: str = ""


_ROW, _HEADING, _SPACE = 24, 24, 10


def draw(
    groups: Sequence[Group],
    width: int,
    identity: str,
    label: str,
    unit: str,
    *,
    limits: tuple[float, float] | None = None,
) -> str:
    """SVG of all groups on one scale; ``unit`` names it, ``limits`` shares it with others."""
    narrow = width < 500
    stacked = narrow and _would_collide(groups, width)
    row_height = _ROW if not narrow else 56 if stacked else 42
    label_width = 0 if narrow else min(240, 12 + 6.8 * _longest(groups))
    value_width = 0 if narrow else 184
    height = sum(
        _heading_height(group, narrow=narrow) + row_height * len(group.rows) + _SPACE
        for group in groups
    )
    unit_lines = textwrap.wrap(unit, int(width / 6.8)) if narrow else [unit]
    canvas = theme.Canvas(width, int(height + 26 + 16 * len(unit_lines)))
    axes = canvas.axes(label_width + 8, 4, width - label_width - value_width - 16, height)
    low, high = limits or shared_limits(groups)
    axes.set_xlim(low, high)
    axes.set_ylim(height, 0)
    marks = theme.ticks(low, high, 5 if narrow else 6)
    axes.set_xticks(marks, theme.tick_labels(marks))
    top = 0.0
    for group in groups:
        if group.heading:
            canvas.text(0, 4 + top + 14, group.heading, fontweight="bold")
            if group.note:
                place = (0, 4 + top + 30) if narrow else (width, 4 + top + 14)
                canvas.text(*place, group.note, color=theme.MUTED, ha="left" if narrow else "right")
            top += _heading_height(group, narrow=narrow)
        for row in group.rows:
            middle = top + (row_height - 9 if narrow else row_height / 2)
            words = top + (14 if narrow else row_height / 2 + 4)
            canvas.text(0, 4 + words, row.label)
            if stacked:
                canvas.text(0, 4 + words + 16, _written(row), color=theme.MUTED)
            else:
                canvas.text(width, 4 + words, _written(row), ha="right", color=theme.MUTED)
            half = 9.0 if narrow else row_height / 2  # lines stop short of words on a phone
            axes.vlines(marks, middle - half, middle + half, color=theme.GRID, linewidth=0.7)
            if low < 0 < high:
                axes.vlines([0], middle - half, middle + half, color=theme.MUTED, linewidth=0.9)
            _point(axes, row, middle)
            top += row_height
        top += _SPACE
    for index, line in enumerate(reversed(unit_lines)):
        left = 0 if narrow else label_width + 8
        canvas.text(left, canvas.height - 4 - 16 * index, line, color=theme.MUTED)
    return canvas.svg(identity, label)


def _heading_height(group: Group, *, narrow: bool) -> int:
    if not group.heading:
        return 0
    return _HEADING + (16 if narrow and group.note else 0)


def _would_collide(groups: Sequence[Group], width: int) -> bool:
    lengths = [len(row.label) + len(_written(row)) for group in groups for row in group.rows]
    return 6.9 * max(lengths, default=0) + 10 > width


def _longest(groups: Sequence[Group]) -> int:
    return max((len(row.label) for group in groups for row in group.rows), default=0)


def shared_limits(groups: Sequence[Group]) -> tuple[float, float]:
    """A scale that holds every value and interval of the groups, and zero."""
    values = [0.0]
    for group in groups:
        for row in group.rows:
            values += [
                value
                for value in (row.value, row.low, row.high)
                if value is not None and np.isfinite(value)
            ]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.01
    return low - margin, high + margin


def _written(row: Row) -> str:
    return with_interval(row.value, row.low, row.high)


def _point(axes: Axes, row: Row, y: float) -> None:
    if row.value is None or not np.isfinite(row.value):
        return
    if row.low is not None and row.high is not None:
        axes.plot(
            [row.low, row.high], [y, y], color=row.colour, linewidth=2.2, alpha=0.55,
            solid_capstyle="round", zorder=3,
        )  # fmt: skip
    axes.plot(
        [row.value], [y], marker="o", markersize=7, zorder=4, color=row.colour,
        markerfacecolor=theme.PAPER if row.hollow else row.colour, markeredgewidth=1.6,
    )  # fmt: skip
