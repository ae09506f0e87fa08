"""What the field prints: R2 with and without leakage-prone folds, and the premium between them.

Owns the two arms, the matched premium, the premium's null under shifted dates, and statistic 1
(evaluation leakage, ``seen_unseen``). The invariant: both arms are scored against one
denominator and against the mean of their own training rows, so a head that learned nothing
scores exactly 0 in both and a change of volatility between their test periods is no premium.
No verdict rests on anything here.

``R2 = mean((y - training mean)^2 - (y - prediction)^2) / D`` with D the variance of y over all
embedded rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.regress import PENALTIES, nested_ridge
from headrace.audit.resample import Estimate, date_block_mean, scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.audit.channels import View
    from headrace.audit.folds import Plan, SeenUnseenPlan
    from headrace.audit.gram import GramBook
    from headrace.audit.regress import Predictions

    Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Pooled out-of-fold scores of one protocol.

    Attributes:
        improvement: ``(n,)`` fall of the squared error below that of the training mean, for the
            observed target; NaN for rows that are not tested.
        totals, counts: ``(M,)`` sum of improvements and number of tested rows, every column.
        second_moments: ``(M,)`` mean square of the (globally centred) targets of tested rows.
    """

    improvement: Array
    totals: Array
    counts: Array
    second_moments: Array

    def r2(self, denominators: Array) -> Array:
        """``(M,)`` R2 of every column."""
        scores: Array = self.totals / np.maximum(self.counts, 1) / denominators
        return scores


class _Scores:
    """Running sums of an arm."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.improvement = np.full(num_rows, np.nan)
        self.totals, self.counts, self.squares = np.zeros((3, num_columns))

    def add(self, predicted: Predictions) -> None:
        plain = predicted.target - predicted.constant
        gain = plain**2 - (plain - predicted.deviation) ** 2
        self.totals[predicted.columns] += np.nansum(gain, axis=0)
        self.counts[predicted.columns] += np.count_nonzero(~np.isnan(gain), axis=0)
        self.squares[predicted.columns] += np.nansum(predicted.target**2, axis=0)
        if predicted.columns.start == 0:
            self.improvement[predicted.rows] = gain[:, 0]

    def arm(self) -> Arm:
        return Arm(
            improvement=self.improvement,
            totals=self.totals,
            counts=self.counts,
            second_moments=self.squares / np.maximum(self.counts, 1),
        )


def run_arms(
    book: GramBook,
    view: View,
    plan: Plan,
    *,
    pooled: bool,
    penalties: Sequence[float] = PENALTIES,
) -> list[Arm]:
    """Fit ``plan`` on the level view for the observed dates and every shift.

    Returns:
        One arm with all folds pooled, or one a fold.
    """
    count = 1 if pooled else len(plan.folds)
    scores = [_Scores(book.num_rows, view.targets.num_columns) for _ in range(count)]

    def consume(predicted: Predictions) -> None:
        scores[0 if pooled else predicted.fold].add(predicted)

    nested_ridge(
        book,
        view.targets,
        folds=plan.folds,
        windows=plan.windows,
        consume=consume,
        penalties=penalties,
        parts=plan.parts,
    )
    return [score.arm() for score in scores]


@dataclass(frozen=True, kw_only=True)
class Premium:
    """R2 of both arms and their difference.

    Attributes:
        r2_on, r2_off: estimates with date-block errors.
        premium: the difference; no interval of it holds up (see docs), so it is a number.
        null: ``(B,)`` premium under shifted dates.
        matched: paired difference on the rows that both arms test, with date-block errors.
    """

    r2_on: Estimate
    r2_off: Estimate
    premium: float
    null: Array
    matched: Estimate

    @property
    def both_negative(self) -> bool:
        """Whether both arms predict worse than their training mean."""
        return max(self.r2_on.value, self.r2_off.value) < 0


def premium(on: Arm, off: Arm, view: View, *, length: int) -> Premium:
    """Compare two arms of one embedding; column 0 is the observed one.

    Both arms are divided by the variance over the rows the on-arm tests, which are all rows.
    """
    denominators = np.maximum(on.second_moments, np.finfo(float).tiny)
    by_shift = on.r2(denominators) - off.r2(denominators)
    unit = 1.0 / float(denominators[0])
    both = ~np.isnan(on.improvement) & ~np.isnan(off.improvement)

    def estimate(values: Array, rows: NDArray[np.bool_]) -> Estimate:
        return scaled(date_block_mean(values[rows], view.session[rows], length=length), unit)

    return Premium(
        r2_on=estimate(on.improvement, ~np.isnan(on.improvement)),
        r2_off=estimate(off.improvement, ~np.isnan(off.improvement)),
        premium=float(by_shift[0]),
        null=by_shift[1:],
        matched=estimate(on.improvement - off.improvement, both),
    )


def arm_difference(first: Arm, second: Arm, view: View, *, length: int, unit: float) -> Estimate:
    """``R2(first) - R2(second)`` paired on the rows both test, divided by ``unit``."""
    both = ~np.isnan(first.improvement) & ~np.isnan(second.improvement)
    paired = (first.improvement - second.improvement)[both]
    return scaled(date_block_mean(paired, view.session[both], length=length), 1.0 / unit)


def evaluation_leakage(
    book: GramBook,
    view: View,
    seen_unseen: SeenUnseenPlan,
    *,
    length: int,
    penalties: Sequence[float] = PENALTIES,
) -> Estimate:
    """``C = 2 cov(seen - unseen, y) / var(y)``, with the error of date blocks.

    The same row is predicted by heads that trained on other entities of its dates and by one
    that did not; seen predictions of a row are averaged over its heads.
    """
    target = view.target
    seen = np.zeros(book.num_rows)
    count = np.zeros(book.num_rows)
    unseen = np.full(book.num_rows, np.nan)

    def consume(predicted: Predictions) -> None:
        value = predicted.deviation[:, 0] + predicted.constant[0]
        own = seen_unseen.block[predicted.rows] == seen_unseen.left_out[predicted.fold]
        unseen[predicted.rows[own]] = value[own]
        seen[predicted.rows[~own]] += value[~own]
        count[predicted.rows[~own]] += 1

    nested_ridge(
        book,
        view.targets,
        folds=seen_unseen.plan.folds,
        windows=seen_unseen.plan.windows,
        consume=consume,
        penalties=penalties,
        parts=seen_unseen.plan.parts,
    )
    gain = seen / count - unseen
    product = 2.0 * (gain - gain.mean()) * (target - target.mean())
    return scaled(date_block_mean(product, view.session, length=length), 1.0 / target.var())
