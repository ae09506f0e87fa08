"""Skill by stretch of dates, with each model's cutoff on the time axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.report.figures import theme

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date

    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value over ``[start, end]``; ``low`` and ``high`` may be missing."""

    start: date
    end: date
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Track:
    """One model's points in one panel, and its cutoff."""

    name: str
    points: Sequence[Point]
    cutoff: date | None
    colour: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture of the stack, its own vertical scale."""

    title: str
    tracks: Sequence[Track]


_PANEL, _TOP = 150, 22


def _year(day: date) -> float:
    return day.year + (day.timetuple().tm_yday - 1) / 365.25


def draw(panels: Sequence[Panel], width: int, identity: str, label: str) -> str:
    """SVG of the panels below each other on one time axis."""
    canvas = theme.Canvas(width, (_PANEL + _TOP + 14) * len(panels) + 26 + 20)
    tracks = panels[0].tracks
    left = 0.0
    for track in tracks:
        canvas.text(left, 12, track.name, color=track.colour, fontweight="bold")
        left += 8 * len(track.name) + 18
    days = [
        day
        for panel in panels
        for track in panel.tracks
        for point in track.points
        for day in (point.start, point.end)
    ]
    first, last = _year(min(days)), _year(max(days))
    for index, panel in enumerate(panels):
        top = 20 + index * (_PANEL + _TOP + 14)
        canvas.text(0, top + 14, panel.title, color=theme.MUTED)
        axes = canvas.axes(44, top + _TOP, width - 52, _PANEL)
        axes.set_xlim(first, last)
        _panel(axes, panel)
        marks = list(theme.ticks(first, last, 10 if width >= 500 else 4))
        if index == len(panels) - 1:
            axes.set_xticks(marks, theme.tick_labels(marks))
    return canvas.svg(identity, label)


def _panel(axes: Axes, panel: Panel) -> None:
    values = [0.0]
    for track in panel.tracks:
        for point in track.points:
            values += [value for value in (point.value, point.low, point.high) if value is not None]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.01
    axes.set_ylim(low - margin, high + margin)
    marks = theme.ticks(low - margin, high + margin, 4)
    axes.set_yticks(marks, theme.tick_labels(marks))
    theme.grid(axes, marks)
    axes.axhline(0, color=theme.MUTED, linewidth=0.9, zorder=1)
    num_tracks = len(panel.tracks)
    for index, track in enumerate(panel.tracks):
        if track.cutoff is not None:
            axes.axvline(
                _year(track.cutoff), color=track.colour, linewidth=1.2, linestyle=(0, (4, 3)),
                zorder=1,
            )  # fmt: skip
        for point in track.points:
            start, end = _year(point.start), _year(point.end)
            middle = start + (end - start) * (index + 1) / (num_tracks + 1)
            if point.low is not None and point.high is not None:
                axes.plot(
                    [middle, middle], [point.low, point.high], color=track.colour, linewidth=2,
                    alpha=0.5, solid_capstyle="round", zorder=2,
                )  # fmt: skip
            axes.plot([middle], [point.value], marker="o", markersize=5.5, color=track.colour)
        if num_tracks == 1 and len(track.points) > 1:
            middles = [(_year(p.start) + _year(p.end)) / 2 for p in track.points]
            heights = np.array([p.value for p in track.points])
            axes.plot(middles, heights, color=track.colour, linewidth=1, alpha=0.5)
