"""From the measurements of all models to their records.

Owns what needs the models side by side: the reference that is subtracted, the adjustment of
p-values over everything one audit tests, and the evidence each verdict is given. The
invariant: adding models never makes a claim easier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit import limits, tables
from headrace.audit.boundary import Contrast, contrast, two_sides
from headrace.audit.config import parse_date
from headrace.audit.records import (
    ContaminationRecord,
    Figure,
    ModelRecord,
    PerplexityRecord,
    RecallRecord,
)
from headrace.audit.resample import MIN_CLUSTERS, holm, max_t, persistent_length
from headrace.audit.verdict import Evidence, judge
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.audit.config import AuditConfig
    from headrace.audit.measure import Layout, Measurement
    from headrace.audit.panel import Panel
    from headrace.audit.records import Channel, EmbeddingRecord
    from headrace.audit.sources import EmbeddingSource

    Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class AuditedModel:
    """One audited model on its way to a record."""

    name: str
    source: EmbeddingSource
    cutoff: str | None
    measured: Measurement | None
    embedding: EmbeddingRecord
    recall: RecallRecord | None = None
    recall_significant: tuple[bool, bool] | None = None
    perplexity: tuple[PerplexityRecord, ...] = ()

    def cutoff_session(self, panel: Panel) -> int | None:
        """First session after the cutoff."""
        if self.cutoff is None:
            return None
        return panel.session_of(parse_date(self.cutoff, f"cutoff of {self.name!r}"))


def hopeless_record(
    model: AuditedModel, reasons: tuple[str, ...], config: AuditConfig
) -> ModelRecord:
    """The record of a model on a panel that says nothing."""
    judgement = judge(
        Evidence(
            cutoff=model.cutoff,
            hopeless=reasons,
            recall=model.recall_significant,
            level=config.level,
            min_sessions_a_side=config.min_sessions_a_side,
        )
    )
    return ModelRecord(
        name=model.name,
        cutoff=model.cutoff,
        stack=model.source.fingerprint,
        embedding=model.embedding,
        verdict=judgement.verdict,
        summary=judgement.summary,
        cautions=judgement.cautions,
        recall=model.recall,
        perplexity=model.perplexity,
    )


def channel_contrast(
    gain: Array, layout: Layout, channel: Channel, cutoff_session: int
) -> Contrast:
    """Statistic 3 of one channel.

    Raises:
        DataError: too few blocks, or a target that does not vary on a side.
    """
    view, panel, gap = layout.views[channel], layout.panel, layout.config.gap_sessions
    target, length = view.target, layout.length
    # Of a target without variance, what the features were taken out of is their mirror.
    two_sides(panel.y, panel.session, cutoff_session, gap)
    first = view.unit == view.unit[0]
    if channel == "common" or len(np.unique(view.unit)) < MIN_CLUSTERS:
        # What persists from date to date is a label that overlaps, whatever its interval says. The
        # entity channel has entities as clusters against it, but for two, which are one series.
        length = persistent_length(target[first][np.argsort(view.session[first])], length)
    return contrast(
        gain=gain,
        target=target,
        session=view.session,
        cutoff_session=cutoff_session,
        gap=gap,
        length=length,
        total_variance=tables.total_variance(layout),
        entity=view.unit if channel == "entity" else None,
    )


def reference_gains(
    measured: Measurement, reference: Sequence[Measurement], layout: Layout
) -> dict[Channel, Array]:
    """Predictions minus the mean of the reference's, by channel."""
    gains: dict[Channel, Array] = {}
    for channel in layout.channels:
        own = measured.skill[channel].deviation
        others = [other.skill[channel].deviation for other in reference]
        gains[channel] = own - np.mean(others, axis=0) if others else own
    return gains


def choose_reference(
    models: Sequence[AuditedModel],
    twins: Sequence[Measurement],
    config: AuditConfig,
    reference: str | None,
) -> tuple[list[Measurement], str]:
    """What the contrast subtracts, and its name."""
    if reference is not None:
        chosen = [m.measured for m in models if m.name == reference and m.measured is not None]
        return chosen, f"model {reference}"
    if len(twins) >= config.min_twins:
        return list(twins), f"mean of {len(twins)} untrained twins"
    return [], f"the constant (fewer than {config.min_twins} twins were given)"


def judge_all(
    models: Sequence[AuditedModel],
    twins: Sequence[Measurement],
    layout: Layout,
    reference: str | None,
    warnings: list[str],
) -> tuple[ModelRecord, ...]:
    """Test all models together and record each.

    Args:
        models: measured models.
        twins: measured untrained networks.
        layout: what they share.
        reference: name of the model to subtract instead of the twins' mean.
        warnings: is added to.
    """
    panel, config = layout.panel, layout.config
    if layout.refusal:
        warnings.append(f"Shifted-date tests are refused: {layout.refusal}.")
    subtracted, words = choose_reference(models, twins, config, reference)
    gains: dict[str, dict[Channel, Array]] = {}
    contrasts: dict[tuple[str, Channel], Contrast] = {}
    owns: dict[tuple[str, Channel], Contrast] = {}
    failed: dict[str, dict[Channel, str]] = {}
    for model in models:
        assert model.measured is not None
        own = [] if model.name == reference else subtracted
        gains[model.name] = reference_gains(model.measured, own, layout)
        failed[model.name] = {}
        before, after = limits.sides(layout.panel, model.cutoff_session(panel))
        if min(before, after) < config.min_sessions_a_side:
            continue
        cutoff_session = model.cutoff_session(panel)
        assert cutoff_session is not None
        for channel, gain in gains[model.name].items():
            try:
                contrasts[model.name, channel] = channel_contrast(
                    gain, layout, channel, cutoff_session
                )
                owns[model.name, channel] = channel_contrast(
                    model.measured.skill[channel].deviation, layout, channel, cutoff_session
                )
            except DataError as error:
                failed[model.name][channel] = error.message
    adjusted = dict(zip(contrasts, holm([c.p_value for c in contrasts.values()]), strict=True))
    skill_p = _skill_p(models, layout)
    return tuple(
        _record(
            model,
            twins=twins,
            layout=layout,
            gains=gains[model.name],
            contrasts={
                ch: (c, adjusted[n, ch]) for (n, ch), c in contrasts.items() if n == model.name
            },
            owns={ch: c for (n, ch), c in owns.items() if n == model.name},
            failed=failed[model.name],
            skill_p={ch: p for (n, ch), p in skill_p.items() if n == model.name},
            reference="the constant" if model.name == reference else words,
        )
        for model in models
    )


def _skill_p(models: Sequence[AuditedModel], layout: Layout) -> dict[tuple[str, Channel], float]:
    """Adjusted over all models and channels: max-T on shared shifts, or Holm without shifts."""
    keys = [(model, channel) for model in models for channel in layout.channels]
    if not keys:
        return {}
    if layout.refusal:
        raw = [m.measured.forward[channel].p_above() for m, channel in keys if m.measured]
        adjusted = holm(raw)
    else:
        skills = [m.measured.skill[channel] for m, channel in keys if m.measured]
        adjusted = max_t([s.correlation for s in skills], np.stack([s.null for s in skills]))
    return {(m.name, channel): p for (m, channel), p in zip(keys, adjusted, strict=True)}


def _record(
    model: AuditedModel,
    *,
    twins: Sequence[Measurement],
    layout: Layout,
    gains: dict[Channel, Array],
    contrasts: dict[Channel, tuple[Contrast, float]],
    owns: dict[Channel, Contrast],
    failed: dict[Channel, str],
    skill_p: dict[Channel, float],
    reference: str,
) -> ModelRecord:
    panel, config, measured = layout.panel, layout.config, model.measured
    assert measured is not None
    make = tables.FigureMaker(stack=model.source.fingerprint)
    skill: dict[str, Figure] = {}
    for channel in layout.channels:
        if layout.refusal:
            figure = make.forward_skill(measured.forward[channel], layout, channel)
            skill[channel] = replace(figure, p_adjusted=skill_p[channel], adjustment="holm")
        else:
            others = [twin.skill[channel].correlation for twin in twins]
            figure = make.skill(measured.skill[channel], layout, channel, others)
            skill[channel] = replace(figure, p_adjusted=skill_p[channel], adjustment="max_t")
    contamination: dict[str, ContaminationRecord] = {
        channel: make.contamination((result, owns[channel]), layout, channel, p, reference)
        for channel, (result, p) in contrasts.items()
    }
    cutoff_session = model.cutoff_session(panel)
    before, after = limits.sides(panel, cutoff_session)
    judgement = judge(
        Evidence(
            cutoff=model.cutoff,
            level=config.level,
            min_sessions_a_side=config.min_sessions_a_side,
            sessions_before=before,
            sessions_after=after,
            untested=layout.untested,
            said_by_features=limits.said_by_features(layout),
            skill_p=skill_p,
            skill_test="walk-forward, without shifts" if layout.refusal else "shifted dates",
            too_few_shifts=limits.too_few_shifts(layout),
            skill_detectable={
                channel: limits.detectable_skill(measured, layout, channel)
                for channel in layout.channels
            },
            skill_lasting={
                channel: lasting
                for channel in layout.channels
                if (lasting := limits.lasting_skill(measured.skill[channel])) is not None
            },
            contrast_p={channel: p for channel, (_, p) in contrasts.items()},
            contrast_own_p={channel: own.p_value for channel, own in owns.items()},
            contrast_share={ch: c.contrast.value for ch, (c, _) in contrasts.items()},
            contrast_before={ch: c.before.value for ch, (c, _) in contrasts.items()},
            contrast_brief={ch: c.brief for ch, (c, _) in contrasts.items()},
            contrast_detectable={
                ch: c.detectable(config.level) for ch, (c, _) in contrasts.items()
            },
            contrast_failed=failed,
            recall=model.recall_significant,
            r2_negative=measured.level is not None and measured.level.premium.both_negative,
        )
    )
    return ModelRecord(
        name=model.name,
        cutoff=model.cutoff,
        stack=model.source.fingerprint,
        embedding=model.embedding,
        verdict=judgement.verdict,
        summary=judgement.summary,
        channels=judgement.channels,
        share_of_r2=judgement.share_of_r2,
        cautions=judgement.cautions,
        evaluation=make.evaluation(measured, layout, twins),
        skill=skill,
        contamination=contamination,
        periods=make.periods(gains, layout, cutoff_session),
        walk_forward=make.walk_forward(measured, layout),
        embargo=make.embargo(measured, layout),
        recall=model.recall,
        perplexity=model.perplexity,
    )
