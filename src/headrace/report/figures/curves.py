"""Lines over steps or periods: the training curve, speed, and walk-forward scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.report.figures import theme
from headrace.report.text import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series.

    Attributes:
        name: written at the end of the line.
        x: abscissae, ascending.
        y: ordinates.
        low: lower interval limits, or empty.
        high: upper interval limits, or empty.
        points_x: extra points (evaluation losses), or empty.
        points_y: their ordinates.
        colour: a colour role.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    points_x: Sequence[float] = ()
    points_y: Sequence[float] = ()
    colour: str = theme.ACCENT


def draw(
    lines: Sequence[Line],
    width: int,
    identity: str,
    label: str,
    *,
    y_title: str,
    x_title: str,
    height: int = 240,
    from_zero: bool = False,
    zero: bool = False,
) -> str:
    """SVG of the lines on one scale, each named at its end (below the title when narrow).

    ``from_zero`` starts the vertical scale there; ``zero`` draws and includes that line.
    """
    narrow = width < 500
    right = 8 if narrow else min(190, 22 + int(7.2 * max(len(line.name) + 7 for line in lines)))
    top = 26 + (16 * len(lines) if narrow else 0)
    canvas = theme.Canvas(width, height + (16 * len(lines) if narrow else 0))
    axes = canvas.axes(46, top, width - 46 - right, canvas.height - top - 42)
    _scale(axes, lines, narrow=narrow, from_zero=from_zero, zero=zero)
    ends: list[tuple[float, Line]] = []
    for line in lines:
        x, y = np.asarray(line.x, float), np.asarray(line.y, float)
        if len(line.low):
            axes.fill_between(x, line.low, line.high, color=line.colour, alpha=0.14, linewidth=0)
        axes.plot(x, y, color=line.colour, linewidth=1.8, solid_joinstyle="round", zorder=3)
        if len(line.points_x):
            axes.plot(
                line.points_x, line.points_y, linestyle="none", color=line.colour, marker="o",
                markersize=5,
                markerfacecolor=theme.PAPER, markeredgecolor=line.colour, markeredgewidth=1.5,
                zorder=4,
            )  # fmt: skip
        ends.append((float(y[-1]), line))
    canvas.text(0, 12, y_title, color=theme.MUTED)
    canvas.text(46, canvas.height - 4, x_title, color=theme.MUTED)
    if narrow:
        for index, (value, line) in enumerate(ends):
            words = f"{line.name}  {number(value)}"
            canvas.text(0, 28 + 16 * index, words, color=line.colour, fontweight="bold")
    else:
        _name_ends(canvas, axes, ends, width - right + 8, top)
    return canvas.svg(identity, label)


def _scale(axes: Axes, lines: Sequence[Line], *, narrow: bool, from_zero: bool, zero: bool) -> None:
    x = np.concatenate([np.asarray(line.x, float) for line in lines])
    y = np.concatenate(
        [np.asarray([*line.y, *line.low, *line.high, *line.points_y], float) for line in lines]
    )
    y = y[np.isfinite(y)]
    low, high = (float(y.min()), float(y.max())) if y.size else (0.0, 1.0)
    if from_zero or zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if zero:
        axes.axhline(0, color=theme.MUTED, linewidth=0.9, zorder=1)
    margin = 0.07 * (high - low) or 0.5
    low_shown, high_shown = low - (0 if from_zero and low == 0 else margin), high + margin
    axes.set_ylim(low_shown, high_shown)
    span = float(x.max() - x.min()) or 1.0
    axes.set_xlim(float(x.min()) - 0.01 * span, float(x.max()) + 0.01 * span)
    marks = theme.ticks(low_shown, high_shown, 5)
    axes.set_yticks(marks, theme.tick_labels(marks))
    theme.grid(axes, marks)
    across = theme.ticks(float(x.min()), float(x.max()), 4 if narrow else 6)
    axes.set_xticks(across, theme.tick_labels(across))


def _name_ends(
    canvas: theme.Canvas,
    axes: Axes,
    ends: Sequence[tuple[float, Line]],
    left: float,
    top: float,
) -> None:
    low, high = axes.get_ylim()
    height = canvas.height - top - 42
    wanted = sorted(
        ((top + height * (high - value) / (high - low), value, line) for value, line in ends),
        key=lambda item: item[0],
    )
    previous = -1e9
    for place, value, line in wanted:
        place = max(place, previous + 15)  # noqa: PLW2901 (labels pushed apart, top to bottom)
        previous = place
        words = f"{line.name}  {number(value)}"
        canvas.text(left, place + 4, words, color=line.colour, fontweight="bold")
