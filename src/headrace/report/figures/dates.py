"""The histogram of effective dates: what a model was trained on, and where its cutoff lies.

A corpus that claims "up to 2017" and holds one month must be impossible to miss, so the
horizontal scale covers everything offered, and what was kept out is drawn too, hollow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.report.figures import theme
from headrace.report.text import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import date

    from matplotlib.axes import Axes

_STEPS_IN_MONTHS = (1, 3, 6, 12, 24, 60, 120)


@dataclass(frozen=True, kw_only=True)
class DateHistogram:
    """Documents by month, in parts that are stacked.

    Attributes:
        kept: part (a source, or what a vintage adds) → month (``YYYY-MM``) → documents.
        cutoffs: name and day of each cutoff, earliest first.
    """

    kept: Mapping[str, Mapping[str, int]]
    cutoffs: Sequence[tuple[str, date]]


def _month_index(month: str) -> int:
    year, number = month.split("-")[:2]
    return int(year) * 12 + int(number) - 1


def _bins(histogram: DateHistogram, width: int) -> tuple[int, int, int]:
    months = [_month_index(month) for part in histogram.kept.values() for month in part]
    first, last = min(months), max(months)
    for _, day in histogram.cutoffs:
        # A cutoff long after the last document says nothing of it: it is named, not drawn.
        if day.year * 12 + day.month - 1 <= last + (last - first) // 4:
            last = max(last, day.year * 12 + day.month - 1)
    # Bars end where the first cutoff's month ends: none mixes what a model may and may not know.
    anchor = histogram.cutoffs[0][1].year * 12 + histogram.cutoffs[0][1].month
    for step in _STEPS_IN_MONTHS:
        start = first - (first - anchor) % step
        num_bins = (last - start) // step + 1
        if num_bins <= width / 4 or step == _STEPS_IN_MONTHS[-1]:
            break
    return start, step, num_bins


def bin_name(step: int) -> str:
    """What one bar covers, for the caption."""
    names = {1: "month", 3: "quarter", 6: "half-year", 12: "year"}
    return names.get(step, f"{step // 12} years")


def draw(histogram: DateHistogram, width: int, identity: str, label: str) -> str:
    """SVG of the stacked histogram with the cutoffs named on it."""
    start, step, num_bins = _bins(histogram, width)
    edges = np.arange(num_bins + 1) * step + start
    parts = list(histogram.kept)
    top = 20 + (18 if len(parts) > 1 else 0) + 16 * min(len(histogram.cutoffs), 3)
    canvas = theme.Canvas(width, top + 200)
    axes = canvas.axes(34, top, width - 42, 170)
    base = np.zeros(num_bins)
    gap = 0.12 * step if (width - 42) / num_bins > 5 else 0.0
    for index, part in enumerate(parts):
        heights = _heights(histogram.kept[part], start, step, num_bins)
        axes.bar(
            edges[:-1] + step / 2,
            heights,
            width=step - gap,
            bottom=base,
            color=theme.series_colour(index),
            linewidth=0,
        )
        base += heights
    most = float(base.max()) or 1.0
    axes.set_ylim(0, most * 1.04)
    axes.set_xlim(edges[0] - step * 0.5, edges[-1] + step * 0.5)
    marks = [mark for mark in theme.ticks(0, most, 4) if mark == round(mark)]
    axes.set_yticks(marks, [count(mark) for mark in marks])
    theme.grid(axes, [mark for mark in marks if mark > 0])
    theme.baseline(axes, colour=theme.MUTED)
    _label_years(axes, edges, width)
    for index, (name, day) in enumerate(histogram.cutoffs[:3]):
        words = f"cutoff {day.isoformat()}"
        if len(histogram.cutoffs) > 1:
            words = f"{name}: {words}"
        _mark_cutoff(canvas, axes, day, words, (top, top - 8 - 16 * index))
    canvas.text(0, 12, f"documents per {bin_name(step)}", color=theme.MUTED)
    if len(parts) > 1:
        _name_parts(canvas, parts)
    return canvas.svg(identity, label)


def _heights(months: Mapping[str, int], start: int, step: int, num_bins: int) -> np.ndarray:
    heights = np.zeros(num_bins)
    for month, documents in months.items():
        heights[(_month_index(month) - start) // step] += documents
    return heights


def _label_years(axes: Axes, edges: np.ndarray, width: int) -> None:
    low, high = edges[0] / 12, edges[-1] / 12
    if high - low < 2:
        months = [int(edge) for edge in edges[:-1]]
        stride = max(1, len(months) // (8 if width >= 500 else 4))
        shown = months[::stride]
        axes.set_xticks(
            [month + 0.5 for month in shown],
            [f"{month // 12}-{month % 12 + 1:02d}" for month in shown],
        )
        return
    years = [
        year for year in theme.ticks(low, high, 8 if width >= 500 else 4) if year == round(year)
    ]
    axes.set_xticks([year * 12 for year in years], [f"{year:.0f}" for year in years])


def _mark_cutoff(
    canvas: theme.Canvas, axes: Axes, day: date, words: str, places: tuple[float, float]
) -> None:
    top, baseline = places
    place = day.year * 12 + day.month - 1 + day.day / 31
    low, high = axes.get_xlim()
    beyond = place > high
    share = min((place - low) / (high - low), 1.0)
    left = 34 + share * (canvas.width - 42)
    if not beyond:
        line = axes.axvline(place, color=theme.FUTURE, linewidth=1.4, clip_on=False, zorder=5)
        line.set_ydata([0, 1 + (top - baseline + 4) / 170])
    near_right = share > 0.5
    canvas.text(
        left + (-7 if near_right else 7),
        baseline,
        words + (" (beyond)" if beyond else ""),
        ha="right" if near_right else "left",
        color=theme.FUTURE,
        fontweight="bold",
    )


def _name_parts(canvas: theme.Canvas, parts: Sequence[str]) -> None:
    left = 0.0
    for index, name in enumerate(parts):
        canvas.text(left, 30, name, color=theme.series_colour(index), fontweight="bold")
        left += 7.8 * len(name) + 16
