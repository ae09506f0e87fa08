"""Measurements as records: every number with its n, interval, protocol and stack.

Owns the translation and nothing else: what is computed here is quantiles of nulls and the
adjustment of p-values across models.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from headrace.audit.boundary import side_gain
from headrace.audit.premium import arm_difference
from headrace.audit.records import (
    Channel,
    ContaminationRecord,
    EmbargoRecord,
    EvaluationRecord,
    Figure,
    Null,
    PeriodRecord,
    SplitRecord,
)
from headrace.audit.regress import ESTIMATOR_VERSION
from headrace.audit.resample import Estimate, date_block_mean, scaled, shift_p, shift_p_two_sided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.audit.boundary import Contrast
    from headrace.audit.measure import Layout, Measurement
    from headrace.audit.skill import Skill

    Array = NDArray[np.float64]

NUM_PERIODS = 12
_METHODS = {"dates": "date_block_t", "entities": "entity_cluster_t"}


def null_of(kind: str, values: Sequence[float] | Array) -> Null | None:
    """Summary of a null, or ``None`` where there is none."""
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) == 0:
        return None
    low, middle, high = np.quantile(numbers, [0.05, 0.5, 0.95])
    return Null(
        kind=kind,
        num_draws=len(numbers),
        median=float(middle),
        sd=float(numbers.std(ddof=1)) if len(numbers) > 1 else None,
        q05=float(low),
        q95=float(high),
        values=tuple(float(round(value, 9)) for value in numbers),
    )


@dataclass(frozen=True, kw_only=True)
class FigureMaker:
    """Figures of one model: its stack, and the estimator all of them share."""

    stack: str

    def protocol(self, name: str) -> str:
        """Protocol and estimator in one word."""
        return f"{name} {ESTIMATOR_VERSION}"

    def of_estimate(
        self, estimate: Estimate, protocol: str, *, n_unit: str = "rows", note: str = ""
    ) -> Figure:
        """A date-block figure."""
        low, high = estimate.interval()
        if not note and low is None:
            note = "too few date blocks for an interval"
        elif not note and estimate.value == estimate.se == 0:
            note = "exactly 0: nothing was predicted, constant only was chosen"
        return Figure(
            value=estimate.value,
            n=estimate.n,
            n_unit=n_unit,
            protocol=self.protocol(protocol),
            stack=self.stack,
            low=low,
            high=high,
            method=_METHODS[estimate.clusters] if low is not None else "",
            num_blocks=estimate.num_blocks,
            note=note,
        )

    def skill(
        self, skill: Skill, layout: Layout, channel: Channel, twins: Sequence[float]
    ) -> Figure:
        """Correlation with its one-sided shifted-date p-value, not yet adjusted."""
        view = layout.views[channel]
        return Figure(
            value=skill.correlation,
            n=len(view.session),
            n_unit="dates" if channel == "common" else "rows",
            protocol=self.protocol(layout.purged[channel].protocol),
            stack=self.stack,
            method="shifted_dates" if len(skill.null) else "",
            p_value=shift_p(skill.correlation, skill.null) if len(skill.null) else None,
            null=null_of("shifted_dates", skill.null),
            twins=null_of("twins", twins),
            note=f"shifted dates refused: {layout.refusal}" if layout.refusal else "",
        )

    def forward_skill(self, estimate: Estimate, layout: Layout, channel: Channel) -> Figure:
        """The stand-in where shifted dates are refused: walk-forward covariance share of var(y)."""
        unit = 1.0 / total_variance(layout)
        figure = self.of_estimate(
            scaled(estimate, unit),
            layout.forward[channel].protocol,
            n_unit="dates" if channel == "common" else "rows",
            note=f"shifted dates refused: {layout.refusal}",
        )
        return replace(figure, p_value=estimate.p_above())

    def evaluation(
        self, measured: Measurement, layout: Layout, twins: Sequence[Measurement]
    ) -> EvaluationRecord | None:
        """Both arms, the premium beside its null, and statistic C."""
        level = measured.level
        if level is None or level.leakage is None:
            return None
        result = level.premium
        both = f"{layout.on.protocol} - {layout.off.plan.protocol}"
        premium = Figure(
            value=result.premium,
            n=result.r2_on.n,
            n_unit="rows",
            protocol=self.protocol(both),
            stack=self.stack,
            method="shifted_dates" if len(result.null) else "",
            p_value=shift_p_two_sided(result.premium, result.null) if len(result.null) else None,
            null=null_of("shifted_dates", result.null),
            twins=null_of("twins", [t.level.premium.premium for t in twins if t.level is not None]),
            note="no interval of a premium holds up; compare it with its null",
        )
        return EvaluationRecord(
            r2_on=self.of_estimate(result.r2_on, layout.on.protocol),
            r2_off=self.of_estimate(result.r2_off, layout.off.plan.protocol),
            premium=premium,
            premium_matched=self.of_estimate(result.matched, both),
            leakage=self.of_estimate(level.leakage, layout.seen_unseen.plan.protocol),
        )

    def missing(self, protocol: str, note: str) -> Figure:
        """A figure that could not be had."""
        return Figure(
            value=None, n=0, n_unit="rows", protocol=self.protocol(protocol), stack=self.stack,
            note=note,
        )  # fmt: skip

    def contamination(
        self,
        pair: tuple[Contrast, Contrast],
        layout: Layout,
        channel: Channel,
        adjusted: float,
        reference: str,
    ) -> ContaminationRecord:
        """Both sides of the cutoff; ``pair``: over the reference, and of the predictions alone."""
        result, own = pair
        protocol = layout.purged[channel].protocol
        unit = "dates" if channel == "common" else "rows"
        contrast = replace(
            self.of_estimate(result.contrast, protocol, n_unit=unit),
            p_value=result.p_value,
            p_adjusted=adjusted,
            adjustment="holm",
            note=f"share of var(y); one-sided; {result.normalisation} variance and clusters of "
            f"{result.clusters} count",
            method=result.method,
        )
        return ContaminationRecord(
            channel=channel,
            before=self.of_estimate(result.before, protocol, n_unit=unit),
            after=self.of_estimate(result.after, protocol, n_unit=unit),
            contrast=contrast,
            detectable=result.detectable(layout.config.level),
            reference=reference,
            own=replace(
                self.of_estimate(own.contrast, protocol, n_unit=unit),
                p_value=own.p_value,
                note="the model's predictions alone, nothing subtracted",
                method=own.method,
            ),
        )

    def periods(
        self, gains: dict[Channel, Array], layout: Layout, cutoff_session: int | None
    ) -> tuple[PeriodRecord, ...]:
        """Covariance gain over time, in stretches that no cutoff crosses."""
        records = []
        for first, last, side in stretches(
            layout.panel.num_sessions, cutoff_session, layout.config.gap_sessions
        ):
            figures: dict[Channel, Figure | None] = {"common": None, "entity": None}
            for channel, gain in gains.items():
                figures[channel] = self._period(gain, layout, channel, first, last)
            records.append(
                PeriodRecord(
                    start=layout.panel.date_text(first),
                    end=layout.panel.date_text(last),
                    side=side,
                    common=figures["common"],
                    entity=figures["entity"],
                )
            )
        return tuple(records)

    def _period(
        self, gain: Array, layout: Layout, channel: Channel, first: int, last: int
    ) -> Figure | None:
        view = layout.views[channel]
        inside = (view.session >= first) & (view.session <= last)
        if np.count_nonzero(inside) < 2:
            return None
        covariance, _ = side_gain(
            gain[inside], view.target[inside], view.session[inside], layout.length
        )
        return self.of_estimate(
            scaled(covariance, 1.0 / total_variance(layout)),
            layout.purged[channel].protocol,
            n_unit="dates" if channel == "common" else "rows",
        )

    def walk_forward(self, measured: Measurement, layout: Layout) -> tuple[SplitRecord, ...]:
        """R2 of every walk-forward window, and pooled."""
        if measured.level is None or measured.level.walk is None:
            return ()
        view, panel = layout.views["level"], layout.panel
        unit = 1.0 / total_variance(layout)
        improvement = measured.level.walk.improvement
        records = []
        for k, fold in enumerate(layout.walk.folds):
            score = date_block_mean(
                improvement[fold.test], view.session[fold.test], length=layout.length
            )
            train, test = view.session[fold.train], view.session[fold.test]
            records.append(
                SplitRecord(
                    label=f"window {k + 1}",
                    train_start=panel.date_text(int(train.min())),
                    train_end=panel.date_text(int(train.max())),
                    test_start=panel.date_text(int(test.min())),
                    test_end=panel.date_text(int(test.max())),
                    num_train=len(fold.train),
                    r2=self.of_estimate(scaled(score, unit), layout.walk.protocol),
                )
            )
        tested = ~np.isnan(improvement)
        pooled = date_block_mean(improvement[tested], view.session[tested], length=layout.length)
        records.append(
            replace(
                records[-1],
                label="pooled",
                train_start=records[0].train_start,
                test_start=records[0].test_start,
                r2=self.of_estimate(scaled(pooled, unit), layout.walk.protocol),
            )
        )
        return tuple(records)

    def embargo(self, measured: Measurement, layout: Layout) -> tuple[EmbargoRecord, ...]:
        """The leakage-off arm by embargo, 0 being the plain one."""
        level = measured.level
        if level is None:
            return ()
        view = layout.views["level"]
        unit = total_variance(layout)
        records = []
        for sessions, arm, protocol in zip(
            layout.off.embargoes, level.off, layout.off.protocols, strict=True
        ):
            tested = ~np.isnan(arm.improvement)
            score = date_block_mean(
                arm.improvement[tested], view.session[tested], length=layout.length
            )
            paired = arm_difference(level.on, arm, view, length=layout.length, unit=unit)
            records.append(
                EmbargoRecord(
                    embargo_sessions=sessions,
                    r2_off=self.of_estimate(scaled(score, 1.0 / unit), protocol),
                    premium=self.of_estimate(
                        paired,
                        f"{layout.on.protocol} - {protocol}",
                        note="matched: both arms on the rows after the split",
                    ),
                )
            )
        return tuple(records)


def total_variance(layout: Layout) -> float:
    """Variance of y over the embedded rows, the denominator of every share."""
    return float(layout.panel.y[layout.panel.embedded_rows].var())


def stretches(
    num_sessions: int, cutoff_session: int | None, gap: int
) -> list[tuple[int, int, Literal["before", "gap", "after", "unknown"]]]:
    """About twelve stretches of sessions (first, last, side); none crosses the cutoff's gap."""
    parts: list[tuple[int, int, Literal["before", "gap", "after", "unknown"]]]
    if cutoff_session is None:
        parts = [(0, num_sessions, "unknown")]
    else:
        start = max(0, min(cutoff_session - gap, num_sessions))
        stop = max(0, min(cutoff_session + gap, num_sessions))
        if cutoff_session in {0, num_sessions}:
            start = stop = cutoff_session
        parts = [(0, start, "before"), (start, stop, "gap"), (stop, num_sessions, "after")]
    found = []
    for first, end, side in parts:
        if end <= first:
            continue
        count = 1 if side == "gap" else max(1, round(NUM_PERIODS * (end - first) / num_sessions))
        edges = np.linspace(first, end, count + 1).round().astype(int)
        found += [(int(a), int(b) - 1, side) for a, b in itertools.pairwise(edges)]
    return found
