"""The picture to look at first: a model's statistics against shifted dates and untrained twins.

Each strip shows where the statistic would fall if the dates meant nothing (grey), where
networks that never read a text fall (open circles), and where this model falls (the line).
Strips of one statistic share their scale over models, so that cards can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.report.figures import theme
from headrace.report.text import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One statistic of one model.

    Attributes:
        title: what is measured, a few words.
        note: the sentence under the title, e.g. the p-value.
        observed: the model's value.
        null: values under shifted dates, empty if that test was not possible.
        twins: values of untrained twins, may be empty.
        limits: shared horizontal scale.
    """

    title: str
    note: str
    observed: float
    null: Sequence[float]
    twins: Sequence[float]
    limits: tuple[float, float]


# The mark of an untrained twin, in a strip and in the key.
_TWIN: dict[str, Any] = {
    "color": theme.MUTED,
    "marker": "o",
    "markersize": 5.5,
    "markerfacecolor": theme.PAPER,
    "markeredgecolor": theme.MUTED,
    "markeredgewidth": 1.2,
}


def shared_limits(
    strips: Sequence[tuple[float, Sequence[float], Sequence[float]]],
) -> tuple[float, float]:
    """A scale that holds every ``(observed, null, twins)`` and zero, with a margin."""
    values = [0.0]
    for observed, null, twins in strips:
        values += [observed, *null, *twins]
    finite = [value for value in values if np.isfinite(value)]
    low, high = min(finite), max(finite)
    margin = 0.08 * (high - low) or 0.01
    return low - margin, high + margin


def draw(strips: Sequence[Strip], width: int, identity: str, label: str) -> str:
    """SVG of the strips, side by side when wide, below each other when narrow."""
    narrow = width < 500
    columns = 1 if narrow else max(len(strips), 2)
    gap, height = 36, 168
    each = (width - gap * (columns - 1)) / columns
    rows = -(-len(strips) // columns)
    canvas = theme.Canvas(width, rows * height + (rows - 1) * 14)
    for index, strip in enumerate(strips):
        left = (index % columns) * (each + gap)
        top = (index // columns) * (height + 14)
        canvas.text(left, top + 12, strip.title, fontweight="bold", fontsize=13)
        canvas.text(left, top + 29, strip.note, color=theme.MUTED)
        _strip(canvas.axes(left, top + 46, each, 96), strip, each)
    return canvas.svg(identity, label)


def _strip(axes: Axes, strip: Strip, width: float) -> None:
    low, high = strip.limits
    axes.set_xlim(low, high)
    axes.set_ylim(-0.34, 1.25)
    inset = 0.07 * (high - low)  # a label at the very edge would be cut off
    marks = theme.fitted_ticks(low + inset, high - inset, width * 0.86)
    axes.set_xticks(marks, theme.tick_labels(marks))
    axes.plot([low, high], [0, 0], color=theme.MUTED, linewidth=0.8, zorder=2)
    if low < 0 < high:
        axes.plot([0, 0], [-0.34, 1.0], color=theme.GRID, linewidth=0.8, zorder=0)
    null = np.asarray([value for value in strip.null if np.isfinite(value)])
    if null.size:
        num_bins = int(np.clip(np.sqrt(null.size) * 1.6, 8, 28))
        edge = np.linspace(null.min(), null.max() + 1e-12, num_bins + 1)
        counts, edges = np.histogram(null, bins=edge)
        axes.stairs(
            0.8 * counts / counts.max(), edges, fill=True, color=theme.NULL, linewidth=0, zorder=1
        )
    if len(strip.twins):
        axes.plot(
            strip.twins,
            np.full(len(strip.twins), -0.18),
            linestyle="none",
            **_TWIN,
            zorder=3,
        )
    observed = strip.observed
    if not np.isfinite(observed):
        return
    axes.plot([observed, observed], [0, 1.0], color=theme.ACCENT, linewidth=2, zorder=4)
    axes.plot([observed], [1.0], marker="o", markersize=7, color=theme.ACCENT, zorder=5)
    to_left = (observed - low) / (high - low) > 0.72
    axes.annotate(
        number(observed),
        (observed, 1.0),
        xytext=(-8 if to_left else 8, 0),
        textcoords="offset points",
        ha="right" if to_left else "left",
        va="center",
        fontsize=13,
        fontweight="bold",
        color=theme.ACCENT,
    )


def key(width: int, identity: str, *, twins: bool) -> str:
    """The legend, drawn as a small example with its parts named; ``twins``: some are drawn."""
    narrow = width < 500
    canvas = theme.Canvas(width, 46 if narrow else 26)
    axes = canvas.axes(0, 0, width, canvas.height)
    axes.set_xlim(0, width)
    axes.set_ylim(canvas.height, 0)
    wide_places = ((0, 13), (130, 13), (384, 13))
    (x0, y0), (x1, y1), (x2, y2) = ((0, 13), (0, 34), (130, 13)) if narrow else wide_places
    axes.plot([x0 + 6, x0 + 6], [y0 - 7, y0 + 8], color=theme.ACCENT, linewidth=2)
    axes.plot([x0 + 6], [y0 - 6], marker="o", markersize=6, color=theme.ACCENT)
    axes.fill_between([x1, x1 + 22], y1 - 6, y1 + 6, color=theme.NULL, linewidth=0)
    texts = [(x0 + 18, y0, "this model"), (x1 + 30, y1, "dates shifted: nothing to know")]
    if twins:
        axes.plot([x2 + 7], [y2], **_TWIN)
        texts.append((x2 + 18, y2, "untrained twins"))
    for x, y, words in texts:
        canvas.text(x, y + 4, words, color=theme.MUTED)
    return canvas.svg(identity, "Legend")
