"""Intervals and p-values: date blocks, shifted dates, and corrections for several tests.

Owns the arithmetic of uncertainty. The invariant: an interval made here treats predictions as
fixed and dates as the sampled thing; a p-value made here counts the observed value among its
null, so it is never 0. It knows no model.

Sources: date-block t after the batch-means method, G - 1 degrees of freedom; Welch and
Satterthwaite for two arms; clusters of rows after Liang and Zeger 1986; Holm 1979; step-down max-T
of Westfall and Young 1993; shifted dates after the shift test of Harrison 2022 and the circular
shift test for time series.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import stats

from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

MIN_BLOCKS = 10
# Two entities without their mean are one series, mirrored: what they add to the contrast cancels,
# and their sums show no error. Three and four are told from it, by t with 2 and 3 degrees.
MIN_CLUSTERS = 3
MIN_BLOCKS_A_SIDE = 5  # where two sides of at least 10 blocks together are compared


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over dates with the error of date blocks.

    Attributes:
        value, se: estimate and standard error; ``se`` is NaN with fewer than 10 blocks.
        df: degrees of freedom of its t.
        num_blocks: blocks (or clusters) behind the error.
        n: observations behind the value.
        clusters: what is taken for independent.
    """

    value: float
    se: float
    df: float
    num_blocks: int
    n: int
    clusters: Literal["dates", "entities"] = "dates"

    def interval(self, level: float = 0.95) -> tuple[float, float] | tuple[None, None]:
        """Two-sided t interval; none where the blocks are too few."""
        if np.isnan(self.se):
            return None, None
        half = float(stats.t.ppf(0.5 + level / 2, self.df)) * self.se
        return self.value - half, self.value + half

    def p_above(self, null: float = 0.0) -> float:
        """One-sided p-value against values at or below ``null``."""
        if self.se == 0.0 or np.isnan(self.se):
            # Nothing was predicted, or nothing can be said: no evidence, not infinite evidence.
            return 1.0
        return float(stats.t.sf((self.value - null) / self.se, self.df))


def block_length(label_length: int, *, at_least: int = 5) -> int:
    """Sessions of a block: a week, or five label lengths where labels overlap."""
    return at_least if label_length <= 1 else max(at_least, 5 * label_length)


def date_block_ratio(
    numerator: Array,
    denominator: Array,
    session: NDArray[np.integer],
    *,
    length: int,
    min_blocks: int = MIN_BLOCKS,
) -> Estimate:
    """``sum(numerator) / sum(denominator)``, linearised, with the error of date blocks.

    Args:
        numerator: ``(n,)`` one contribution a row.
        denominator: ``(n,)`` likewise.
        session: ``(n,)`` its date.
        length: sessions a block; the last block takes the remainder.
        min_blocks: for an error.

    Returns:
        NaN where the denominator is 0 in sum.

    Raises:
        DataError: no rows.
    """
    if len(numerator) == 0:
        raise DataError("no rows to average", remedy="a panel with rows")
    first = int(session.min())
    num_blocks = max(1, (int(session.max()) - first + 1) // length)
    block = np.minimum((session - first) // length, num_blocks - 1)
    filled = np.bincount(block, minlength=num_blocks) > 0
    above = np.bincount(block, numerator, num_blocks)[filled]
    below = np.bincount(block, denominator, num_blocks)[filled]
    count = len(above)
    if below.sum() == 0.0:
        # A target that does not vary: there is no ratio, and that is no reason to stop.
        return Estimate(
            value=np.nan, se=np.nan, df=float(count - 1), num_blocks=count, n=len(numerator)
        )
    ratio = above.sum() / below.sum()
    residual = above - ratio * below
    se = np.nan
    if count >= min_blocks:
        se = float(np.sqrt(count / (count - 1) * (residual**2).sum()) / below.sum())
    # Rounding of a sum that is exactly zero must not look like a tiny, certain effect. The bound
    # is in the ratio's own unit: the numerator's alone called every error of large targets zero.
    if se <= 1e-12 * float(np.abs(numerator).max()) / float(np.abs(denominator).mean()):
        se = 0.0
    return Estimate(
        value=float(ratio), se=se, df=float(count - 1), num_blocks=count, n=len(numerator)
    )


def date_block_mean(
    values: Array, session: NDArray[np.integer], *, length: int, min_blocks: int = MIN_BLOCKS
) -> Estimate:
    """Mean of ``values`` with the error of blocks of ``length`` consecutive sessions."""
    ones = np.ones(len(values))
    return date_block_ratio(values, ones, session, length=length, min_blocks=min_blocks)


def row_mean(
    values: Array, session: NDArray[np.integer], entity: NDArray[np.integer], *, length: int
) -> Estimate:
    """Mean over rows of entities, with the error of date blocks or of entities.

    What is peculiar to an entity may last for longer than a block: the clustering with the larger
    p-value counts, where there are entities enough to be clusters.
    """
    dates = date_block_mean(values, session, length=length)
    if len(np.unique(entity)) < MIN_CLUSTERS:
        return dates
    entities = clustered(dates.value, (values - dates.value) / len(values), entity)
    return entities if entities.p_above() > dates.p_above() else dates


def clustered(value: float, influence: Array, cluster: NDArray[np.integer]) -> Estimate:
    """An estimate with the error of independent clusters of rows.

    Args:
        value: the estimate.
        influence: ``(n,)`` what each row adds to it, to first order; 0 for rows that add nothing.
        cluster: ``(n,)`` not negative.
    """
    used = influence != 0
    filled = np.bincount(cluster[used]) > 0
    sums = np.bincount(cluster[used], influence[used])[filled]
    count = len(sums)
    se = float(np.sqrt(count / max(count - 1, 1) * (sums**2).sum()))
    # As in date_block_ratio: rounding must not look like a tiny, certain effect.
    if se <= 1e-12 * float(np.abs(influence).sum()):
        se = 0.0
    return Estimate(
        value=value,
        se=se,
        df=float(max(count - 1, 1)),
        num_blocks=count,
        n=int(used.sum()),
        clusters="entities",
    )


def persistent_length(series: Array, at_least: int) -> int:
    """Sessions of a block for a series that persists from date to date.

    The bandwidth of Andrews (1991, equations 6.2 and 6.4) for a series that follows an AR(1),
    where it is at least twice ``at_least``; ``at_least`` otherwise. A series of 1,171 dates
    reaches that at an autocorrelation of 0.34: returns never do, levels, spreads and volatilities
    do.

    Args:
        series: ``(T,)`` one value a date, in the order of time.
        at_least: sessions.
    """
    centred = series - series.mean()
    square = float(centred @ centred)
    if len(series) < 3 or square == 0:
        return at_least
    rho = float(np.clip(centred[1:] @ centred[:-1] / square, 0.0, 0.99))
    alpha = 4 * rho**2 / (1 - rho**2) ** 2
    bandwidth = int(np.ceil(1.1447 * (alpha * len(series)) ** (1 / 3)))
    return bandwidth if bandwidth >= 2 * at_least else at_least


def difference(first: Estimate, second: Estimate) -> Estimate:
    """``first - second`` of independent dates, Welch's degrees of freedom."""
    variance = first.se**2 + second.se**2
    spread = first.se**4 / first.df + second.se**4 / second.df
    return Estimate(
        value=first.value - second.value,
        se=float(np.sqrt(variance)),
        df=float(variance**2 / spread) if spread > 0 else min(first.df, second.df),
        num_blocks=first.num_blocks + second.num_blocks,
        n=first.n + second.n,
    )


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """The estimate of ``factor`` times the quantity."""
    return replace(estimate, value=estimate.value * factor, se=estimate.se * abs(factor))


def admissible_offsets(num_sessions: int, label_sessions: int) -> NDArray[np.int64]:
    """Every circular offset of at least ``max(10, 2 x label)`` sessions in both directions."""
    least = max(10, 2 * label_sessions)
    return np.arange(least, num_sessions - least + 1, dtype=np.int64)


def draw_offsets(
    num_sessions: int, label_sessions: int, num_draws: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """``num_draws`` different admissible offsets in random order, or all there are."""
    offsets = admissible_offsets(num_sessions, label_sessions)
    return rng.permutation(offsets)[:num_draws]


def shift_p(observed: float, null: Array) -> float:
    """``(1 + #{null >= observed}) / (1 + B)``."""
    return float((1 + np.count_nonzero(null >= observed)) / (1 + len(null)))


def shift_p_two_sided(observed: float, null: Array) -> float:
    """Two-sided, about the median of the null."""
    centre = float(np.median(null))
    return shift_p(abs(observed - centre), np.abs(null - centre))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment, in the order given."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    factors = len(p) - np.arange(len(p))
    stepped = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    adjusted = np.empty(len(p))
    adjusted[order] = stepped
    return [float(value) for value in adjusted]


def max_t(observed: Sequence[float], null_SB: Array) -> list[float]:
    """Step-down max-T on shared shifts, one-sided.

    Each statistic is put on a scale of its own first (median and standard deviation), so that
    none dominates the maximum by its units. The observed value is among those that set the scale:
    the null calls it one of them, and a scale that left it out would make it stand out too often.

    Args:
        observed: S statistics.
        null_SB: ``(S, B)``, column b from the same offset for every statistic.
    """
    together = np.column_stack([np.asarray(observed, dtype=np.float64), null_SB])
    spread = together.std(axis=1, keepdims=True)
    spread[spread == 0] = 1.0
    together = (together - np.median(together, axis=1, keepdims=True)) / spread
    z, null = together[:, 0], together[:, 1:]
    order = np.argsort(-z, kind="stable")
    adjusted = np.empty(len(z))
    running = 0.0
    for rank, s in enumerate(order):
        p = shift_p(float(z[s]), null[order[rank:]].max(axis=0))
        running = max(running, p)
        adjusted[s] = running
    return [float(value) for value in adjusted]
