"""Contamination: what a model gains over its reference before its cutoff, minus after.

Owns statistic 3, the only one that can tell knowledge of the future from honest skill. The
invariant: everything but the dates is the same on both sides: the same folds, the same heads,
the same reference, the same target. It cannot tell knowledge of the future from honest skill
that happens to fade at the cutoff; every report says so.

The gain of a side is ``cov(model - reference, y) / var(y)``. Two things can be constant over time
when skill is: the covariance itself, or its ratio to the side's own variance. The contrast is
tested both ways, pooled variance (a mean of products) and own variance (a ratio, linearised),
and the larger p-value counts. A break of volatility at the cutoff then cannot pass for the
cutoff's work, whichever of the two is constant; and with heavy tails, where either test alone
rejects a constant skill on 6 to 20% of panels, both together reject on 2% at most (docs/audit.md,
benchmarks/audit_design.py).

Errors are clustered by date and, where rows are of entities, by entity too (Petersen 2009; Thompson
2011); the larger p-value counts. What is peculiar to an entity may last for months, so that blocks
of dates are no independent draws of it: honest skill at effects that come and go was called
knowledge of the future on 22 to 24% of panels by date blocks alone, on 2 to 4% by both (the same
benchmark).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import stats

from headrace.audit.resample import (
    MIN_BLOCKS,
    MIN_BLOCKS_A_SIDE,
    MIN_CLUSTERS,
    Estimate,
    clustered,
    date_block_mean,
    date_block_ratio,
    difference,
    scaled,
)
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]


_RUN_BLOCKS = 2
# Of the other side's spread: what is left of a constant when means of dates are taken from it.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Brief:
    """What is left of a contrast when gain and target lose their mean over each run of dates.

    Attributes:
        part: of the pooled contrast.
        p_value: that it falls at the cutoff, one-sided, the larger of both normalisations.
        run: sessions.
    """

    part: float
    p_value: float
    run: int


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Gain on each side of the cutoff and their difference.

    Attributes:
        before, after: gain as a share of var(y), in the normalisation that counts.
        contrast: of the normalisation and the clusters with the largest p-value.
        normalisation: ``"own"`` or ``"pooled"``, the one that counts.
        clusters: ``"dates"`` or ``"entities"``, likewise.
        p_value: one-sided, the largest.
        p_by_normalisation: the larger of both clusterings for each.
        brief: what is left of it within runs of dates; None where rows are of entities.
    """

    before: Estimate
    after: Estimate
    contrast: Estimate
    normalisation: str
    clusters: Literal["dates", "entities"]
    p_value: float
    p_by_normalisation: dict[str, float]
    brief: Brief | None

    @property
    def method(self) -> str:
        """How interval and p-value of the contrast were made, as figures name it."""
        return "date_block_t" if self.clusters == "dates" else "entity_cluster_t"

    def detectable(self, level: float, power: float = 0.8) -> float:
        """The contrast that would have been significant at ``level`` with ``power``."""
        quantiles = stats.t.ppf(1 - level, self.contrast.df) + stats.t.ppf(power, self.contrast.df)
        return float(quantiles * self.contrast.se)


def two_sides(
    target: Array, session: NDArray[np.integer], cutoff_session: int, gap: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Rows before and after a cutoff, ``gap`` sessions left out on each side of it.

    Raises:
        DataError: a target that does not vary on a side, such as one that was filled in there.
    """
    sides = (session < cutoff_session - gap, session >= cutoff_session + gap)
    spreads = [float(np.ptp(target[side])) if side.any() else 0.0 for side in sides]
    if min(spreads) <= _ROUNDING * max(spreads):
        raise DataError(
            "the target does not vary on one side of the cutoff",
            remedy="give a panel whose targets vary on both sides, or leave the cutoff out",
        )
    return sides


def side_gain(
    gain: Array,
    target: Array,
    session: NDArray[np.integer],
    length: int,
    *,
    min_blocks: int = MIN_BLOCKS,
) -> tuple[Estimate, Estimate]:
    """Covariance of ``gain`` and ``target`` over rows, and its ratio to the target's variance."""
    centred = target - target.mean()
    product = (gain - gain.mean()) * centred
    return (
        date_block_mean(product, session, length=length, min_blocks=min_blocks),
        date_block_ratio(product, centred**2, session, length=length, min_blocks=min_blocks),
    )


def contrast(
    *,
    gain: Array,
    target: Array,
    session: NDArray[np.integer],
    cutoff_session: int,
    gap: int,
    length: int,
    total_variance: float,
    entity: NDArray[np.integer] | None = None,
) -> Contrast:
    """Test one channel of one model.

    Args:
        gain: ``(n,)`` prediction of the model minus that of the reference.
        target: ``(n,)`` residualised target.
        session: ``(n,)`` dates.
        cutoff_session: first session after the cutoff.
        gap: sessions left out on each side of it.
        length: sessions of a block.
        total_variance: of the panel's target, both channels together: figures are printed as
            shares of it, so that channels add up; no p-value depends on it.
        entity: ``(n,)`` of the rows, where they have one; fewer than 3 are no clusters.

    Raises:
        DataError: fewer than 5 blocks on a side or 10 together, or a target that does not vary
            on a side.
    """
    sides = two_sides(target, session, cutoff_session, gap)
    gains = [
        side_gain(gain[side], target[side], session[side], length, min_blocks=MIN_BLOCKS_A_SIDE)
        for side in sides
    ]
    blocks = [estimate.num_blocks for estimate, _ in gains]
    if min(blocks) < MIN_BLOCKS_A_SIDE or sum(blocks) < MIN_BLOCKS:
        raise DataError(
            f"{blocks[0]} date blocks of {length} sessions before the cutoff and {blocks[1]} after "
            f"it; {MIN_BLOCKS_A_SIDE} on either side and {MIN_BLOCKS} together are needed",
            remedy="a panel of more dates around the cutoff",
        )
    # The channel's share of the total sets the unit of what is printed, and nothing else.
    share = float(target[sides[0] | sides[1]].var()) / total_variance
    units = {"pooled": 1 / total_variance, "own": share}
    arms = {
        "pooled": [scaled(covariance, units["pooled"]) for covariance, _ in gains],
        "own": [scaled(ratio, units["own"]) for _, ratio in gains],
    }
    tests: dict[tuple[str, Literal["dates", "entities"]], Estimate] = {
        (name, "dates"): difference(before, after) for name, (before, after) in arms.items()
    }
    if entity is not None and len(np.unique(entity[sides[0] | sides[1]])) >= MIN_CLUSTERS:
        for name, influence in _influences(gain, target, sides, gains).items():
            value = tests[name, "dates"].value
            tests[name, "entities"] = clustered(value, units[name] * influence, entity)
    # Without a gain before the cutoff there is nothing that could have been known.
    p_values = {
        key: estimate.p_above() if arms[key[0]][0].value > 0 else 1.0
        for key, estimate in tests.items()
    }
    counts = max(p_values, key=lambda key: p_values[key])
    brief = None
    if entity is None and (whole := tests["pooled", "dates"].value) > 0:
        brief = _brief(gain, target, session, sides, length, whole=whole * total_variance)
    return Contrast(
        before=arms[counts[0]][0],
        after=arms[counts[0]][1],
        contrast=tests[counts],
        normalisation=counts[0],
        clusters=counts[1],
        p_value=p_values[counts],
        p_by_normalisation={
            name: max(p for key, p in p_values.items() if key[0] == name) for name in arms
        },
        brief=brief,
    )


def _brief(
    gain: Array,
    target: Array,
    session: NDArray[np.integer],
    sides: Sequence[NDArray[np.bool_]],
    length: int,
    *,
    whole: float,
) -> Brief:
    """Within runs of two blocks; ``whole`` is the contrast of covariances."""
    run = _RUN_BLOCKS * length
    gains = [
        side_gain(
            _within_runs(gain[side], session[side], run),
            _within_runs(target[side], session[side], run),
            session[side],
            length,
            min_blocks=MIN_BLOCKS_A_SIDE,
        )
        for side in sides
    ]
    covariance, ratio = (difference(before, after) for before, after in zip(*gains, strict=True))
    p_value = max(covariance.p_above(), ratio.p_above()) if gains[0][0].value > 0 else 1.0
    return Brief(part=covariance.value / whole, p_value=p_value, run=run)


def _within_runs(values: Array, session: NDArray[np.integer], run: int) -> Array:
    block = (session - session.min()) // run
    counts = np.maximum(np.bincount(block), 1)
    within: Array = values - (np.bincount(block, values) / counts)[block]
    return within


def _influences(
    gain: Array,
    target: Array,
    sides: tuple[NDArray[np.bool_], NDArray[np.bool_]],
    gains: list[tuple[Estimate, Estimate]],
) -> dict[str, Array]:
    """What each row adds to the contrast, to first order, in either normalisation; sums to 0."""
    pooled, own = np.zeros((2, len(gain)))
    for sign, side, (covariance, ratio) in zip((1.0, -1.0), sides, gains, strict=True):
        centred = target[side] - target[side].mean()
        square = centred**2
        product = (gain[side] - gain[side].mean()) * centred
        pooled[side] = sign * (product - covariance.value) / len(product)
        own[side] = sign * (product - ratio.value * square) / square.sum()
    return {"pooled": pooled, "own": own}
