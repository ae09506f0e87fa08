"""Comparisons between models: what training removed, and the slope over knowledge cutoffs.

Owns statistics 5 and 6: weighted sums of paired figures of several models on the same rows and
the same shifts. The invariant: the error of a combination is that of the combination itself,
block by block and shift by shift, never pieced together from the models' own errors.

The interval is a t interval with ``SE = sqrt(date-block^2 + shift SD^2)``: the first term is
the error of fixed predictions, the second what refitting on other dates would move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from headrace.audit.config import parse_date
from headrace.audit.premium import arm_difference
from headrace.audit.records import EmbargoRecord, Figure, ReductionRecord
from headrace.audit.resample import MIN_BLOCKS, date_block_mean, scaled, shift_p_two_sided
from headrace.audit.tables import FigureMaker, null_of, total_variance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.audit.conclude import AuditedModel
    from headrace.audit.measure import Layout, Measurement
    from headrace.audit.records import Channel

    Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A weighted sum of one figure over models.

    Attributes:
        value: of the observed dates.
        null: ``(B,)`` under shifted dates.
        block_se: date-block error of fixed predictions.
        num_blocks, n: behind it.
    """

    value: float
    null: Array
    block_se: float
    num_blocks: int
    n: int

    def figure(self, *, protocol: str, stack: str, n_unit: str, note: str = "") -> Figure:
        """As a record, with its joint interval and two-sided shifted-date p-value."""
        shift_sd = float(self.null.std(ddof=1)) if len(self.null) > 1 else 0.0
        se = float(np.hypot(self.block_se, shift_sd))
        low = high = None
        if np.isfinite(se) and self.num_blocks >= MIN_BLOCKS:
            half = float(stats.t.ppf(0.975, self.num_blocks - 1)) * se
            low, high = self.value - half, self.value + half
        return Figure(
            value=self.value,
            n=self.n,
            n_unit=n_unit,
            protocol=protocol,
            stack=stack,
            low=low,
            high=high,
            method="date_block_and_shift_t" if len(self.null) else "date_block_t",
            num_blocks=self.num_blocks,
            p_value=shift_p_two_sided(self.value, self.null) if len(self.null) else None,
            null=null_of("shifted_dates", self.null),
            note=note,
        )


def combine_skill(
    measured: Sequence[Measurement], weights: Sequence[float], layout: Layout, channel: Channel
) -> Combination:
    """``sum(weight x correlation)`` of one channel."""
    view = layout.views[channel]
    influence = np.zeros(len(view.session))
    value, null = 0.0, np.zeros(len(layout.offsets))
    for measurement, weight in zip(measured, weights, strict=True):
        skill = measurement.skill[channel]
        value += weight * skill.correlation
        null += weight * skill.null if len(skill.null) else 0.0
        influence += weight * _correlation_influence(skill.deviation, view.target)
    return _combined(value, null, influence, view.session, layout)


def _combined(
    value: float, null: Array, influence: Array, session: NDArray[np.int64], layout: Layout
) -> Combination:
    """With the error of date blocks of what each row adds to the value."""
    error = date_block_mean(influence, session, length=layout.length)
    return Combination(
        value=value,
        null=null,
        block_se=error.se,
        num_blocks=error.num_blocks,
        n=len(session),
    )


def _correlation_influence(prediction: Array, target: Array) -> Array:
    """What each row adds to a correlation, to first order; its mean is 0."""
    if np.ptp(prediction) == 0:
        return np.zeros(len(target))
    x = (prediction - prediction.mean()) / prediction.std()
    y = (target - target.mean()) / target.std()
    correlation = float((x * y).mean())
    influence: Array = x * y - correlation / 2 * (x**2 + y**2)
    return influence


def combine_premium(
    measured: Sequence[Measurement], weights: Sequence[float], layout: Layout
) -> Combination:
    """``sum(weight x premium)``; the two arms' rows of one date err together."""
    view = layout.views["level"]
    value, null = 0.0, np.zeros(len(layout.offsets))
    influence = np.zeros(len(view.session))
    for measurement, weight in zip(measured, weights, strict=True):
        level = measurement.level
        assert level is not None
        value += weight * level.premium.premium
        null += weight * level.premium.null if len(level.premium.null) else 0.0
        for arm, sign in ((level.on, 1.0), (level.off[0], -1.0)):
            tested = ~np.isnan(arm.improvement)
            scores = arm.improvement[tested] / level.on.second_moments[0]
            # Scaled so that the mean over all rows is the arm's mean over its tested rows.
            share = tested.mean()
            influence[tested] += weight * sign * (scores - scores.mean()) / share
    return _combined(value, null, influence, view.session, layout)


def slope_weights(years: Sequence[float]) -> list[float]:
    """Weights that turn figures of models into a least-squares slope over their years."""
    centred = np.asarray(years, dtype=np.float64) - np.mean(years)
    weights = centred / (centred**2).sum()
    return [float(weight) for weight in weights]


def reduction_record(
    pair: tuple[str, str], models: Sequence[AuditedModel], layout: Layout
) -> ReductionRecord:
    """What training removed: the base model's figures minus the trained model's."""
    by_name = {model.name: model for model in models}
    chosen = [by_name[name] for name in pair]
    measured = [model.measured for model in chosen if model.measured is not None]
    stack = "+".join(sorted({model.source.fingerprint for model in chosen}))
    make = FigureMaker(stack=stack)
    weights = (1.0, -1.0)
    return ReductionRecord(
        base=pair[0],
        trained=pair[1],
        skill={
            channel: combine_skill(measured, weights, layout, channel).figure(
                protocol=make.protocol(layout.purged[channel].protocol),
                stack=stack,
                n_unit="dates" if channel == "common" else "rows",
            )
            for channel in layout.channels
        },
        premium=_premium_figure(measured, weights, layout, make),
        walk_forward=_walk_forward_difference(measured, layout, make),
        embargo=_embargo_differences(measured, layout, make),
    )


def _walk_forward_difference(
    measured: Sequence[Measurement], layout: Layout, make: FigureMaker
) -> Figure | None:
    first, second = (m.level.walk if m.level is not None else None for m in measured)
    if first is None or second is None:
        return None
    view, unit = layout.views["level"], total_variance(layout)
    estimate = arm_difference(first, second, view, length=layout.length, unit=unit)
    return make.of_estimate(estimate, layout.walk.protocol, note="pooled over the windows")


def _embargo_differences(
    measured: Sequence[Measurement], layout: Layout, make: FigureMaker
) -> tuple[EmbargoRecord, ...]:
    first, second = (m.level for m in measured)
    if first is None or second is None:
        return ()
    view, unit = layout.views["level"], total_variance(layout)
    records = []
    for k, sessions in enumerate(layout.off.embargoes):
        protocol = layout.off.protocols[k]
        off = arm_difference(first.off[k], second.off[k], view, length=layout.length, unit=unit)
        gains = [level.on.improvement - level.off[k].improvement for level in (first, second)]
        both = ~np.isnan(gains[0]) & ~np.isnan(gains[1])
        paired = (gains[0] - gains[1])[both]
        premium = date_block_mean(paired, view.session[both], length=layout.length)
        records.append(
            EmbargoRecord(
                embargo_sessions=sessions,
                r2_off=make.of_estimate(off, protocol),
                premium=make.of_estimate(
                    scaled(premium, 1.0 / unit),
                    f"{layout.on.protocol} - {protocol}",
                    note="matched: both arms on the rows after the split",
                ),
            )
        )
    return tuple(records)


def _premium_figure(
    measured: Sequence[Measurement],
    weights: Sequence[float],
    layout: Layout,
    make: FigureMaker,
    note: str = "",
) -> Figure:
    protocol = f"{layout.on.protocol} - {layout.off.plan.protocol}"
    if any(measurement.level is None for measurement in measured):
        return make.missing(protocol, "not computed: tables are off")
    return combine_premium(measured, weights, layout).figure(
        protocol=make.protocol(protocol), stack=make.stack, n_unit="rows", note=note
    )


def slope_figures(models: Sequence[AuditedModel], layout: Layout) -> dict[str, Figure]:
    """Change of each figure a year of knowledge cutoff, over models of at least 3 cutoffs."""
    dated = [model for model in models if model.cutoff is not None]
    moments = [parse_date(str(model.cutoff), "cutoff") for model in dated]
    if len(set(moments)) < 3:
        return {}
    years = [
        float((m - np.datetime64("2000-01-01")) / np.timedelta64(1, "D")) / 365.2425
        for m in moments
    ]
    weights = slope_weights(years)
    measured = [model.measured for model in dated if model.measured is not None]
    stack = "+".join(sorted({model.source.fingerprint for model in dated}))
    make = FigureMaker(stack=stack)
    note = f"per year of knowledge cutoff, over {len(dated)} models"
    figures: dict[str, Figure] = {
        channel: combine_skill(measured, weights, layout, channel).figure(
            protocol=make.protocol(layout.purged[channel].protocol),
            stack=stack,
            n_unit="dates" if channel == "common" else "rows",
            note=note,
        )
        for channel in layout.channels
    }
    figures["premium"] = _premium_figure(measured, weights, layout, make, note=note)
    return figures
