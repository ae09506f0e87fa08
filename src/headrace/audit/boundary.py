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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from headrace.audit.resample import (
    MIN_BLOCKS,
    MIN_BLOCKS_A_SIDE,
    Estimate,
    date_block_mean,
    date_block_ratio,
    difference,
    scaled,
)
from headrace.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Gain on each side of the cutoff and their difference.

    Attributes:
        before, after: gain as a share of var(y), in the normalisation that counts.
        contrast: of the normalisation with the larger p-value.
        normalisation: ``"own"`` or ``"pooled"``, the one that counts.
        p_value: one-sided, the larger of the two.
        p_by_normalisation: both.
    """

    before: Estimate
    after: Estimate
    contrast: Estimate
    normalisation: str
    p_value: float
    p_by_normalisation: dict[str, float]

    def detectable(self, level: float, power: float = 0.8) -> float:
        """The contrast that would have been significant at ``level`` with ``power``."""
        quantiles = stats.t.ppf(1 - level, self.contrast.df) + stats.t.ppf(power, self.contrast.df)
        return float(quantiles * self.contrast.se)


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

    Raises:
        DataError: fewer than 5 blocks on a side or 10 together, or a target that does not vary
            on a side.
    """
    sides = (session < cutoff_session - gap, session >= cutoff_session + gap)
    if min(float(np.ptp(target[side])) if side.any() else 0.0 for side in sides) == 0.0:
        raise DataError("the target does not vary on one side of the cutoff")
    gains = [
        side_gain(gain[side], target[side], session[side], length, min_blocks=MIN_BLOCKS_A_SIDE)
        for side in sides
    ]
    blocks = [estimate.num_blocks for estimate, _ in gains]
    if min(blocks) < MIN_BLOCKS_A_SIDE or sum(blocks) < MIN_BLOCKS:
        raise DataError(
            f"{blocks[0]} date blocks of {length} sessions before the cutoff and {blocks[1]} after "
            f"it; {MIN_BLOCKS_A_SIDE} on either side and {MIN_BLOCKS} together are needed"
        )
    # The channel's share of the total sets the unit of what is printed, and nothing else.
    share = float(target[sides[0] | sides[1]].var()) / total_variance
    arms = {
        "pooled": [scaled(covariance, 1 / total_variance) for covariance, _ in gains],
        "own": [scaled(ratio, share) for _, ratio in gains],
    }
    candidates = {name: difference(before, after) for name, (before, after) in arms.items()}
    # Without a gain before the cutoff there is nothing that could have been known.
    p_values = {
        name: estimate.p_above() if arms[name][0].value > 0 else 1.0
        for name, estimate in candidates.items()
    }
    counts = max(p_values, key=lambda name: p_values[name])
    return Contrast(
        before=arms[counts][0],
        after=arms[counts][1],
        contrast=candidates[counts],
        normalisation=counts,
        p_value=p_values[counts],
        p_by_normalisation=p_values,
    )
