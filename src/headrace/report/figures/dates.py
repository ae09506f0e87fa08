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
    """Documents by month and source.

    Attributes:
        kept: source → month (``YYYY-MM``) → documents in the corpus.
        excluded: month → documents that were offered and lie after the cutoff.
        cutoff: the corpus's cutoff.
    """

    kept: Mapping[str, Mapping[str, int]]
    excluded: Mapping[str, int]
    cutoff: date | None


def _month_index(month: str) -> int:
    year, number = month.split("-")[:2]
    return int(year) * 12 + int(number) - 1


def _bins(histogram: DateHistogram, width: int) -> tuple[int, int, int]:
    months = [_month_index(month) for source in histogram.kept.values() for month in source]
    months += [_month_index(month) for month in histogram.excluded]
    if histogram.cutoff is not None:
        months.append(histogram.cutoff.year * 12 + histogram.cutoff.month - 1)
    first, last = min(months), max(months)
    # Bars end where the cutoff's month ends: none mixes what a model may and may not know.
    cutoff = histogram.cutoff
    anchor = 0 if cutoff is None else cutoff.year * 12 + cutoff.month
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
    """SVG of the stacked histogram with the cutoff named on it."""
    start, step, num_bins = _bins(histogram, width)
    edges = np.arange(num_bins + 1) * step + start
    canvas = theme.Canvas(width, 250 if width >= 500 else 230)
    axes = canvas.axes(34, 46, width - 42, canvas.height - 76)
    base = np.zeros(num_bins)
    sources = sorted(histogram.kept, key=lambda name: -sum(histogram.kept[name].values()))
    gap = 0.12 * step if (width - 42) / num_bins > 5 else 0.0
    for index, source in enumerate(sources):
        heights = _heights(histogram.kept[source], start, step, num_bins)
        axes.bar(
            edges[:-1] + step / 2,
            heights,
            width=step - gap,
            bottom=base,
            color=theme.ACCENT if len(sources) == 1 else theme.series_colour(index),
            linewidth=0,
        )
        base += heights
    after = _heights(histogram.excluded, start, step, num_bins)
    if after.any():
        axes.bar(
            (edges[:-1] + step / 2)[after > 0],
            after[after > 0],
            width=step - gap,
            bottom=base[after > 0],
            facecolor="none",
            edgecolor=theme.FUTURE,
            linewidth=1,
        )
    top = float((base + after).max()) or 1.0
    axes.set_ylim(0, top * 1.08)
    axes.set_xlim(edges[0] - step * 0.5, edges[-1] + step * 0.5)
    marks = [mark for mark in theme.ticks(0, top, 4) if mark == round(mark)]
    axes.set_yticks(marks, [count(mark) for mark in marks])
    theme.grid(axes, [mark for mark in marks if mark > 0])
    theme.baseline(axes, colour=theme.MUTED)
    _label_years(axes, edges, width)
    if histogram.cutoff is not None:
        _mark_cutoff(canvas, axes, histogram.cutoff, width)
    canvas.text(0, 12, f"documents per {bin_name(step)}", color=theme.MUTED)
    if len(sources) > 1:
        _name_sources(canvas, sources, width)
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


def _mark_cutoff(canvas: theme.Canvas, axes: Axes, cutoff: date, width: int) -> None:
    place = cutoff.year * 12 + cutoff.month - 1 + cutoff.day / 31
    axes.axvline(place, color=theme.FUTURE, linewidth=1.5, ymax=1.06, clip_on=False, zorder=5)
    low, high = axes.get_xlim()
    share = (place - low) / (high - low)
    left = 34 + share * (width - 42)
    near_right = share > 0.6
    canvas.text(
        left + (-7 if near_right else 7),
        32,
        f"cutoff {cutoff.isoformat()}",
        ha="right" if near_right else "left",
        color=theme.FUTURE,
        fontweight="bold",
    )


def _name_sources(canvas: theme.Canvas, sources: Sequence[str], width: int) -> None:
    left = float(width)
    for index in reversed(range(len(sources))):
        name = sources[index]
        canvas.text(left, 12, name, ha="right", color=theme.series_colour(index), fontweight="bold")
        left -= 7.8 * len(name) + 14
