"""What is odd about a panel or its vectors, though nothing about them is wrong.

Owns the notes. The invariant: a note changes no figure; it says, with rows and numbers, why the
figures may not be about what their reader takes them to be about. What cannot be audited at all is
an error elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.panel import name_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.audit.panel import Panel

_FEW = 0.02  # of the rows
_NEARLY_ALL = 0.9  # of the variance; tails of t(3) never hold that in so few rows, of t(2) at times


def oddities(panel: Panel) -> tuple[str, ...]:
    """Notes on a panel."""
    return (*_early_labels(panel), *_lone_instants(panel), *_few_rows(panel))


def odd_vectors(name: str, values: NDArray[np.floating], panel: Panel) -> Iterator[str]:
    """Notes on the vectors ``(n, D)`` of the embedded rows of a panel."""
    empty = ~values.any(axis=1)
    if empty.any():
        rows = np.zeros(panel.num_rows, dtype=bool)
        rows[panel.embedded_rows[empty]] = True
        yield (
            f"Vectors of {name} hold nothing but zeros in {empty.sum()} of {len(values)} rows "
            f"({name_rows(rows)}): rows without a vector are marked false in a column 'embedded'."
        )


def day_of(instants: NDArray[np.datetime64]) -> NDArray[np.datetime64]:
    """The days of instants."""
    days: NDArray[np.datetime64] = instants.astype("datetime64[D]")
    return days


def lone_instants(panel: Panel) -> bool:
    """Whether the panel's dates are instants of single events, several on most days.

    Then nothing is said of what is common to a date, and a day's common shock is counted as often
    as the day has events. Bars within a day, a row an entity each, are no such thing.
    """
    num_days = len(np.unique(day_of(panel.sessions)))
    rows = np.bincount(panel.session, minlength=panel.num_sessions)
    return bool(np.median(rows) <= 1 and panel.num_sessions >= 2 * num_days)


def _lone_instants(panel: Panel) -> Iterator[str]:
    if lone_instants(panel):
        num_days = len(np.unique(day_of(panel.sessions)))
        yield (
            f"The {panel.num_sessions} dates are instants of {num_days} days, and most hold a "
            "single row: what is common to a day is taken for common to nobody. Write the day "
            "into 'date', and instants into 'label_start' and 'label_end'."
        )


def _early_labels(panel: Panel) -> Iterator[str]:
    date, start = panel.sessions[panel.session], panel.label_start
    if (start == day_of(start)).all():
        date = day_of(date)  # label starts are days
    early = (start < date) & (panel.label_end >= date)
    if early.any():
        yield (
            f"In {early.sum()} of {panel.num_rows} rows the label starts before the row's date, so "
            f"part of it was known by then ({name_rows(early)})."
        )


def _few_rows(panel: Panel) -> Iterator[str]:
    y = panel.y / np.abs(panel.y).max()  # squares of huge numbers are none
    far = np.abs(y - np.median(y))
    count = max(1, int(_FEW * len(far)))
    order = np.argsort(-far, kind="stable")
    squares = far[order] ** 2
    held = np.cumsum(squares) / squares.sum()
    if held[count - 1] < _NEARLY_ALL:
        return
    count = int(np.argmax(held >= _NEARLY_ALL)) + 1
    rows = np.zeros(len(far), dtype=bool)
    rows[order[:count]] = True
    extremes = ", ".join(f"{value:g}" for value in dict.fromkeys(panel.y[order[:count]][:3]))
    yield (
        f"{count} of {len(far)} rows {'holds' if count == 1 else 'hold'} "
        f"{held[count - 1]:.0%} of the target's variance ({name_rows(rows)}; y is {extremes}): "
        "every figure is about them. Look for codes of missing values and for other units."
    )
