"""Skill of unknown origin: purged correlation of each channel, against shifted dates.

Owns statistic 2 of the audit and the out-of-fold predictions that statistic 3 reads. The
invariant: a prediction enters as its deviation from the mean of its training rows, so a head
that learned nothing scores exactly 0. It calls nothing leakage: honest skill and knowledge of
the future look alike here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.regress import PENALTIES, nested_ridge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.audit.channels import View
    from headrace.audit.folds import Plan
    from headrace.audit.gram import GramBook
    from headrace.audit.regress import Predictions

    Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Skill:
    """Out-of-fold predictions of one channel and their correlation with the target.

    Attributes:
        deviation: ``(n,)`` prediction minus training mean, NaN for rows in no fold.
        correlation: observed.
        null: ``(B,)`` correlations under shifted dates, in the order of the offsets.
        penalties: chosen for the observed target, fold by fold.
    """

    deviation: Array
    correlation: float
    null: Array
    penalties: tuple[float, ...]


class _Correlation:
    """Running sums of predictions and targets, column by column."""

    def __init__(self, num_columns: int) -> None:
        self.sums = np.zeros((6, num_columns))

    def add(self, prediction: Array, target: Array, columns: slice) -> None:
        there = ~np.isnan(target)
        p, y = np.where(there, prediction, 0.0), np.where(there, target, 0.0)
        for row, term in enumerate((there, p, y, p * p, y * y, p * y)):
            self.sums[row, columns] += term.sum(axis=0)

    def value(self) -> Array:
        n, p, y, pp, yy, py = self.sums
        n = np.maximum(n, 1)
        spread = np.maximum(pp - p * p / n, 0.0) * np.maximum(yy - y * y / n, 0.0)
        covariance = py - p * y / n
        flat = spread <= 1e-24 * np.maximum(pp * yy, 1e-300)
        result: Array = np.where(flat, 0.0, covariance / np.sqrt(np.where(flat, 1.0, spread)))
        return result


def purged_skill(
    book: GramBook, view: View, plan: Plan, penalties: Sequence[float] = PENALTIES
) -> Skill:
    """Fit ``plan`` on ``view`` for the observed dates and every shift."""
    sums = _Correlation(view.targets.num_columns)
    deviation = np.full(book.num_rows, np.nan)
    chosen: list[float] = [np.nan] * len(plan.folds)

    def consume(predicted: Predictions) -> None:
        sums.add(predicted.deviation, predicted.target, predicted.columns)
        if predicted.columns.start == 0:
            deviation[predicted.rows] = predicted.deviation[:, 0]
            chosen[predicted.fold] = float(predicted.penalty[0])

    nested_ridge(
        book,
        view.targets,
        folds=plan.folds,
        windows=plan.windows,
        consume=consume,
        penalties=penalties,
        parts=plan.parts,
    )
    correlations = sums.value()
    return Skill(
        deviation=deviation,
        correlation=float(correlations[0]),
        null=correlations[1:],
        penalties=tuple(chosen),
    )
