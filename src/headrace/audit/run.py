"""The audit, from panel and embeddings to the result.

Owns the entry point and the order of the work: names and stacks are checked before anything is
computed, twins are measured first, then models, and all models are judged together at the end.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from headrace import __version__
from headrace.audit import limits
from headrace.audit.combine import reduction_record, slope_figures
from headrace.audit.conclude import AuditedModel, choose_reference, hopeless_record, judge_all
from headrace.audit.config import AuditConfig, parse_date
from headrace.audit.measure import Layout, Measurement, build_layout, measure, project
from headrace.audit.oddities import odd_vectors, oddities
from headrace.audit.positive import positive_control
from headrace.audit.published_defects import (
    PublishedOptions,
    check_published,
    published_reduction,
    run_published,
)
from headrace.audit.recall import RecallAnswers, judge_recall
from headrace.audit.records import (
    AuditResult,
    ControlRecord,
    Figure,
    PerplexityRecord,
    PublishedRecord,
    ReductionRecord,
)
from headrace.audit.sources import EmbeddingSource, as_source, load, load_vectors
from headrace.audit.threads import spread
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from headrace.audit.panel import Panel
    from headrace.audit.published import PublishedScores
    from headrace.audit.sources import Loader

    Array = NDArray[np.float64]
    Source = EmbeddingSource | NDArray[np.floating] | Path | Loader


def run_audit(
    panel: Panel,
    embeddings: Mapping[str, Source],
    cutoffs: Mapping[str, str] | None = None,
    *,
    twins: Mapping[str, Source] | None = None,
    reference: str | None = None,
    reductions: Sequence[tuple[str, str]] = (),
    recall: Mapping[str, RecallAnswers] | None = None,
    perplexity: Mapping[str, Sequence[PerplexityRecord]] | None = None,
    published: PublishedOptions | None = None,
    config: AuditConfig | None = None,
    progress: Callable[[str], None] | None = None,
) -> AuditResult:
    """Measure what each model knows of the future, and judge it.

    Args:
        panel: forecasts and their labels.
        embeddings: by model name, a row for each embedded panel row: an array, an ``.npy`` path,
            a callable from row positions to vectors, or an :class:`EmbeddingSource`.
        cutoffs: knowledge cutoff of each model, ISO text (a plain date means its end). Models
            without one are ``not_identified``.
        twins: untrained networks of the same shape, at least 4, whose mean prediction is the
            reference of the contamination contrast. Without them it is the constant.
        reference: a model of ``embeddings`` to be the reference instead, known to be of its
            time (a point-in-time model).
        reductions: (base, trained) pairs of models to compare.
        recall: what models stated of dated market moves.
        perplexity: loss by month of models.
        published: also run protocol ``vessl-2026`` on every model, for comparison.
        config: settings.
        progress: is told what is being done.

    Raises:
        ConfigError: names that do not match, or embeddings of different stacks.
        DataError: a panel or embedding that cannot be audited; rows are named.
    """
    config = config or AuditConfig()
    say = progress or (lambda _: None)
    sources = {name: as_source(values) for name, values in embeddings.items()}
    twin_sources = {name: as_source(values) for name, values in (twins or {}).items()}
    cutoffs = dict(cutoffs or {})
    recall, perplexity = dict(recall or {}), dict(perplexity or {})
    for given in (recall, perplexity):
        _check_known(given, sources, "recall answers or losses")
    _check_names(sources, twin_sources, cutoffs, reference, reductions)
    mixed = _check_stacks(sources, config)
    hopeless = limits.hopeless(panel, config)
    layout = None if hopeless else build_layout(panel, config)
    if layout is not None and published is not None:
        check_published(panel, published)

    measured_twins = _measure_twins(twin_sources, panel, config, layout, say)
    models: list[AuditedModel] = []
    odd: list[str] = []
    published_runs: dict[str, tuple[PublishedScores, PublishedRecord]] = {}
    for name, source in sources.items():
        values, embedding = load(name, source, panel)
        odd += odd_vectors(name, values, panel)
        measured = None
        if layout is not None:
            say(f"model {name}")
            measured = measure(values, layout)
            if published is not None:
                say(f"model {name}, vessl-2026")
                published_runs[name] = run_published(
                    panel,
                    values,
                    published,
                    offsets=layout.offsets,
                    stack=source.fingerprint,
                )
        answers, significant = None, None
        if name in recall:
            answers, significant = judge_recall(
                recall[name], cutoffs.get(name), config, stack=source.fingerprint
            )
        models.append(
            AuditedModel(
                name=name,
                source=source,
                cutoff=cutoffs.get(name),
                measured=measured,
                embedding=embedding,
                recall=answers,
                recall_significant=significant,
                perplexity=tuple(perplexity.get(name, ())),
            )
        )
    controls: tuple[ControlRecord, ...] = ()
    if layout is not None and config.positive_control > 0:
        say("positive control")
        controls = _controls(models, measured_twins, twin_sources, layout, reference)
    say("verdicts")
    warnings = [
        *panel.notes,
        *oddities(panel),
        *odd,
        *_other_panels({**sources, **twin_sources}, panel),
    ]
    if layout is None:
        records = tuple(hopeless_record(model, hopeless, config) for model in models)
        compared: tuple[ReductionRecord, ...] = ()
        slope: dict[str, Figure] = {}
    else:
        records = judge_all(models, measured_twins, layout, reference, warnings)
        compared = tuple(reduction_record(pair, models, layout) for pair in reductions)
        slope = slope_figures(models, layout)
    records = tuple(
        replace(record, published=published_runs[record.name][1])
        if record.name in published_runs
        else record
        for record in records
    )
    compared = tuple(
        replace(
            pair,
            published=published_reduction(
                published_runs[pair.base][0],
                published_runs[pair.trained][0],
                stack=pair.premium.stack,
            ),
        )
        if pair.base in published_runs
        else pair
        for pair in compared
    )
    if mixed:
        warnings.append("Embeddings of different stacks are compared, because this was asked for.")
    return AuditResult(
        panel=limits.panel_record(panel),
        models=records,
        settings=_settings(config, layout),
        stacks={
            source.fingerprint: dict(source.stack)
            for source in (*sources.values(), *twin_sources.values())
        },
        headrace_version=__version__,
        mixed_stacks=mixed,
        twins=tuple(twin_sources),
        reductions=compared,
        controls=controls,
        slope=slope,
        warnings=tuple(warnings),
    )


def _measure_twins(
    sources: Mapping[str, EmbeddingSource],
    panel: Panel,
    config: AuditConfig,
    layout: Layout | None,
    say: Callable[[str], None],
) -> list[Measurement]:
    """Each twin, side by side; without a layout they are only checked."""

    def one(source: tuple[str, EmbeddingSource]) -> Measurement | None:
        values = load_vectors(*source, panel)
        if layout is None:
            return None
        values = project(values, config.twin_max_dimension, config.seed)
        return measure(values, layout, twin=True)

    measured = []
    results = spread(one, list(sources.items()), dimension=config.twin_max_dimension)
    for name in sources:
        say(f"twin {name}")
        measured.append(next(results))
    return [twin for twin in measured if twin is not None]


def _controls(
    models: Sequence[AuditedModel],
    twins: Sequence[Measurement],
    twin_sources: Mapping[str, EmbeddingSource],
    layout: Layout,
    reference: str | None,
) -> tuple[ControlRecord, ...]:
    """One at each cutoff, planted in the first twin, or in the first model without twins."""
    host = next(iter(twin_sources.items()), (models[0].name, models[0].source))
    subtracted, _ = choose_reference(models, twins, layout.config, reference)
    records = []
    values: NDArray[np.floating] | None = None
    for cutoff in dict.fromkeys(model.cutoff for model in models if model.cutoff is not None):
        if values is None:
            values = load_vectors(host[0], host[1], layout.panel)
        record = positive_control(values, cutoff, layout, subtracted, stack=host[1].fingerprint)
        records += [] if record is None else [record]
    return tuple(records)


def _check_known(given: Mapping[str, Any], sources: Mapping[str, Any], what: str) -> None:
    for name in given:
        if name not in sources:
            raise ConfigError(
                f"{what} were given for {name!r}, which has no embeddings; models here: "
                f"{', '.join(sources)}",
                remedy="correct the name, or give its embeddings",
            )


def _other_panels(sources: Mapping[str, EmbeddingSource], panel: Panel) -> list[str]:
    """A warning where vectors were made for other rows: they are matched by position alone."""
    stated = {name: source.panel for name, source in sources.items() if source.panel is not None}
    if not stated:
        return []
    own = panel.sha256()
    others = [name for name, made_for in stated.items() if made_for != own]
    if not others:
        return []
    text = (
        f"Vectors of {', '.join(others)} were made for another version of this panel, and are "
        "matched to its rows by position: embed them again if rows came, went or moved."
    )
    return [text]


def _settings(config: AuditConfig, layout: Layout | None) -> dict[str, Any]:
    settings = asdict(config) | {"embargoes": list(config.embargoes)}
    if layout is not None:
        settings["split_date"] = str(layout.split_date.astype("datetime64[D]"))
        settings["block_sessions"] = layout.length
        settings["num_shifts"] = len(layout.offsets)
    return settings


def _check_names(
    sources: Mapping[str, EmbeddingSource],
    twins: Mapping[str, EmbeddingSource],
    cutoffs: Mapping[str, str],
    reference: str | None,
    reductions: Sequence[tuple[str, str]],
) -> None:
    if not sources:
        raise ConfigError("no embeddings were given", remedy="give --embeddings NAME=FILE.npy")
    known = f"models here: {', '.join(sources)}"
    for name, text in cutoffs.items():
        if name not in sources:
            raise ConfigError(
                f"a cutoff was given for {name!r}, which has no embeddings; {known}",
                remedy="correct the name, or give its embeddings",
            )
        parse_date(text, f"cutoff of {name!r}")
    both = sorted(set(sources) & set(twins))
    if both:
        raise ConfigError(
            f"{', '.join(both)}: both a model and a twin", remedy="give each name once"
        )
    if reference is not None and reference not in sources:
        raise ConfigError(
            f"reference {reference!r} has no embeddings; {known}", remedy="name one of them"
        )
    for pair in reductions:
        for name in pair:
            if name not in sources:
                raise ConfigError(
                    f"reduction {pair}: {name!r} has no embeddings; {known}",
                    remedy="name two of them",
                )


def _check_stacks(sources: Mapping[str, EmbeddingSource], config: AuditConfig) -> bool:
    by_stack: dict[str, list[str]] = {}
    for name, source in sources.items():
        by_stack.setdefault(source.fingerprint, []).append(name)
    if len(by_stack) > 1 and not config.allow_mixed_stacks:
        groups = "; ".join(f"{key}: {', '.join(names)}" for key, names in by_stack.items())
        raise ConfigError(
            f"embeddings come from {len(by_stack)} different stacks ({groups}); figures move with "
            "the stack, so they are not compared",
            remedy="embed all models on one stack, or pass --allow-mixed-stacks and read the mark",
        )
    return len(by_stack) > 1
