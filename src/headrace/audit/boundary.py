"""Contamination: what a model gains over its reference before its cutoff, minus after.

Owns statistic 3, the only one that can tell knowledge of the future from honest skill. The
invariant: everything but the dates is the same on both sides: the same folds, the same heads,
the same reference, the same target. It cannot tell knowledge of the future from honest skill
that happens to fade at the cutoff; every report says so.

The gain of a side is ``cov(model - reference, y) / var(y)``. Volatility differs between sides,
and a constant skill is constant either in the units of y or as a share of its variance; the
contrast is therefore tested both with each side's own variance and with the pooled one, and the
larger p-value counts: a break of volatility at the cutoff can then not pass for the cutoff's
work whichever of the two is constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy import stats

from headrace.audit.resample import Estimate, date_block_mean, difference, scaled
from headrace.errors import DataError

if TYPE_CHECKING:
    import numpy as np
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
    """

    before: Estimate
    after: Estimate
    contrast: Estimate
    normalisation: str
    p_value: float

    def detectable(self, level: float, power: float = 0.8) -> float:
        """The contrast that would have been significant at ``level`` with ``power``."""
        quantiles = stats.t.ppf(1 - level, self.contrast.df) + stats.t.ppf(power, self.contrast.df)
        return float(quantiles * self.contrast.se)


def side_gain(gain: Array, target: Array, session: NDArray[np.integer], length: int) -> Estimate:
    """Covariance of ``gain`` and ``target`` over rows, centred within the side, date blocks."""
    product = (gain - gain.mean()) * (target - target.mean())
    return date_block_mean(product, session, length=length)


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
        DataError: fewer than 10 blocks on a side, or a target that does not vary there.
    """
    sides = (session < cutoff_session - gap, session >= cutoff_session + gap)
    raw = [side_gain(gain[side], target[side], session[side], length) for side in sides]
    own = [float(target[side].var()) for side in sides]
    if min(own) <= 0.0:
        raise DataError("the target does not vary on one side of the cutoff")
    pooled = float(target[sides[0] | sides[1]].var())
    # The channel's own variance decides what "constant skill" means; its share of the total
    # only sets the unit.
    share = pooled / total_variance
    shares = {"own": [share / variance for variance in own], "pooled": [share / pooled] * 2}
    candidates = {
        name: difference(scaled(raw[0], factors[0]), scaled(raw[1], factors[1]))
        for name, factors in shares.items()
    }
    p_values = {name: estimate.p_above() for name, estimate in candidates.items()}
    counts = max(p_values, key=lambda name: p_values[name])
    return Contrast(
        before=scaled(raw[0], shares[counts][0]),
        after=scaled(raw[1], shares[counts][1]),
        contrast=candidates[counts],
        normalisation=counts,
        p_value=p_values[counts],
    )
