"""Everything that is computed from one embedding on one panel.

Owns the order of the work: what is built once for a panel (views, plans, offsets: the layout)
and what is computed for every embedding (the measurement). The invariant: all embeddings of an
audit meet the same rows, folds and offsets, so their figures are paired, shift by shift. It
judges nothing (:mod:`headrace.audit.verdict`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit import folds
from headrace.audit.channels import channel_book, common_view, entity_rows, entity_view, level_view
from headrace.audit.config import parse_date
from headrace.audit.panel import iso, name_rows
from headrace.audit.premium import Arm, Premium, evaluation_leakage, premium, run_arms
from headrace.audit.records import CHANNELS
from headrace.audit.resample import (
    MIN_BLOCKS,
    Estimate,
    block_length,
    date_block_mean,
    draw_offsets,
    row_mean,
)
from headrace.audit.skill import Skill, purged_skill
from headrace.audit.threads import single_blas
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.audit.channels import View
    from headrace.audit.config import AuditConfig
    from headrace.audit.folds import ChronologicalPlan, Plan, SeenUnseenPlan
    from headrace.audit.panel import Panel
    from headrace.audit.records import Channel

SEEN_UNSEEN_FOLDS, SEEN_UNSEEN_BLOCKS = 2, 6
_NO_VARIANCE = 1e-20  # of the target's: what rounding leaves of a channel that has none
_SAFE_EXPONENT = 100  # of 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What every embedding of an audit shares.

    Attributes:
        panel, config: as given.
        length: sessions of a date block.
        offsets: ``(B,)`` of the shifted dates; empty where they are refused.
        refusal: why they are, or "".
        split_date: last training date of the level's chronological split.
        views: rows and targets of ``"common"``, ``"entity"`` and ``"level"``; a channel that
            has too few dates is missing, with the reason in ``untested``.
        purged: plans of the channels; ``forward``: walk-forward ones, for refused shifts.
        on, off, walk, seen_unseen: plans of the level.
    """

    panel: Panel
    config: AuditConfig
    length: int
    offsets: NDArray[np.int64]
    refusal: str
    split_date: np.datetime64
    views: dict[str, View]
    untested: dict[Channel, str]
    purged: dict[Channel, Plan]
    forward: dict[Channel, Plan]
    on: Plan
    off: ChronologicalPlan
    walk: Plan
    seen_unseen: SeenUnseenPlan

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Channels with enough dates to be tested."""
        return tuple(channel for channel in CHANNELS if channel in self.purged)


@dataclass(frozen=True, kw_only=True)
class LevelMeasurement:
    """What the field prints of one embedding; no verdict rests on it.

    Attributes:
        premium: both arms and what lies between them.
        on: scores of the leakage-on arm; ``off``: of the leakage-off arm, one an embargo.
        leakage: statistic C.
        walk: walk-forward scores.
    """

    premium: Premium
    on: Arm
    off: tuple[Arm, ...]
    leakage: Estimate | None = None
    walk: Arm | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one embedding gives.

    Attributes:
        skill: by channel, with the null of shifted dates where there is one.
        forward: walk-forward covariance share by channel, where shifted dates are refused.
        level: what carries no verdict; ``None`` where it was not asked for.
    """

    skill: dict[Channel, Skill]
    forward: dict[Channel, Estimate]
    level: LevelMeasurement | None = None


def shift_refusal(panel: Panel) -> str:
    """Why shifted dates are refused on this panel; "" where they are not."""
    if panel.is_full_matrix:
        return ""
    return (
        f"the panel fills {panel.coverage:.0%} of its {panel.num_entities} entities x "
        f"{panel.num_sessions} dates; whole cross-sections can only be moved against the dates "
        "where the full matrix of targets is there (rows without an embedding belong in the "
        "panel too, marked by a column 'embedded')"
    )


def label_length(panel: Panel) -> int:
    """Sessions that a label covers, the longest over rows, at least 1: above 1, labels overlap."""
    first = np.searchsorted(panel.sessions, panel.label_start, side="left")
    last = np.searchsorted(panel.sessions, panel.label_end, side="right") - 1
    inside = panel.label_end <= panel.sessions[-1]
    spans = (last - first)[inside]
    return max(1, int(spans.max())) if len(spans) else 1


def num_usable_blocks(panel: Panel) -> int:
    """Date blocks that the embedded rows fill."""
    sessions = panel.session[panel.embedded_rows]
    length = block_length(label_length(panel))
    return int((sessions.max() - sessions.min() + 1) // length)


def _in_a_safe_unit(panel: Panel) -> Panel:
    """The panel with targets whose squares are numbers; no figure depends on their unit."""
    exponent = int(np.frexp(np.abs(panel.y).max())[1])
    if abs(exponent) <= _SAFE_EXPONENT:
        return panel
    return replace(panel, y=np.ldexp(panel.y, -exponent))


def _check_reach(panel: Panel) -> None:
    """Refuse labels that no other date could be purged against, such as those of 9999-12-31.

    Raises:
        DataError: naming their rows.
    """
    last = panel.sessions[-1]
    endless = panel.label_end - last > last - panel.sessions[0]
    if endless.any():
        raise DataError(
            f"the label ends on {iso(panel.label_end.max())}, further after the last date "
            f"({iso(last)}) than all dates span, in {name_rows(endless)}: no other date could be "
            "trained on",
            remedy="write the last instant that the label covers, or drop rows whose label is open",
        )


def build_layout(panel: Panel, config: AuditConfig) -> Layout:
    """Plan an audit.

    Raises:
        DataError: fewer entities than folds, an empty test period, or too few dates to plan.
    """
    if num_usable_blocks(panel) < MIN_BLOCKS:
        raise DataError(
            f"{panel.num_sessions} dates make {num_usable_blocks(panel)} blocks; at least "
            f"{MIN_BLOCKS} are needed",
            remedy="a panel of more dates",
        )
    _check_reach(panel)
    panel = _in_a_safe_unit(panel)
    refusal = shift_refusal(panel)
    rng = np.random.default_rng(config.seed)
    offsets = (
        np.zeros(0, dtype=np.int64)
        if refusal
        else draw_offsets(panel.num_sessions, panel.label_sessions, config.num_shifts, rng)
    )
    moved = np.concatenate(([0], offsets)).astype(np.int64)
    level = level_view(panel, moved)
    views: dict[str, View] = {"level": level}
    untested: dict[Channel, str] = {}
    counts: dict[Channel, int] = {
        "common": len(np.unique(panel.session[panel.embedded_rows])),
        "entity": len(np.unique(panel.session[entity_rows(panel)])),
    }
    least: dict[Channel, int] = {
        "common": config.min_dates_common,
        "entity": config.min_dates_entity,
    }
    builders: dict[Channel, Callable[[Panel, NDArray[np.int64]], View]] = {
        "common": common_view,
        "entity": entity_view,
    }
    for channel, build in builders.items():
        if counts[channel] < least[channel]:
            untested[channel] = f"{counts[channel]} dates, {least[channel]} are needed"
            continue
        view = build(panel, moved)
        if view.target.var() <= _NO_VARIANCE * panel.y[panel.embedded_rows].var():
            untested[channel] = "its target does not vary beyond what the numeric features say"
        else:
            views[channel] = view
    tested = [channel for channel in CHANNELS if channel in views]
    embargo = config.embargo_sessions
    if config.split_date is None:
        dated = np.unique(panel.session[panel.embedded_rows])
        split = panel.sessions[dated[int(0.7 * len(dated)) - 1]]
    else:
        split = parse_date(config.split_date, "split_date")
    purged, forward = {}, {}
    for channel in tested:
        times = views[channel].times
        purged[channel] = folds.purged_plan(times, num_splits=config.num_blocks, embargo=embargo)
        if refusal:
            forward[channel] = folds.walk_forward_plan(
                times, num_splits=config.num_blocks - 1, embargo=embargo
            )
    return Layout(
        panel=panel,
        config=config,
        length=block_length(label_length(panel)),
        offsets=offsets,
        refusal=refusal,
        split_date=split,
        views=views,
        untested=untested,
        purged=purged,
        forward=forward,
        on=folds.group_plan(level.times, level.unit, num_splits=config.entity_folds),
        off=folds.chronological_plan(
            level.times,
            split_date=split,
            embargoes=(0, *sorted(e for e in config.embargoes if e > 0)),
        ),
        walk=folds.walk_forward_plan(
            level.times, num_splits=config.walk_forward_splits, embargo=embargo
        ),
        seen_unseen=folds.seen_unseen_plan(
            level.times,
            level.unit,
            entity_folds=SEEN_UNSEEN_FOLDS,
            num_blocks=SEEN_UNSEEN_BLOCKS,
        ),
    )


def measure(
    values: NDArray[np.floating], layout: Layout, *, twin: bool = False, tables: bool = True
) -> Measurement:
    """Compute everything one embedding gives; one channel's book in memory at a time.

    A twin meets the observed dates alone, and of the tables the premium: it is a reference.
    """
    with single_blas():
        return _measure(values, layout, twin=twin, tables=tables and layout.config.tables)


def _measure(
    values: NDArray[np.floating], layout: Layout, *, twin: bool, tables: bool
) -> Measurement:
    panel, length = layout.panel, layout.length
    skill: dict[Channel, Skill] = {}
    forward: dict[Channel, Estimate] = {}
    for channel in layout.channels:
        view = layout.views[channel]
        book = channel_book(panel, values, channel)
        skill[channel] = purged_skill(
            book, view.unshifted() if twin else view, layout.purged[channel]
        )
        if channel in layout.forward:
            ahead = purged_skill(book, view.unshifted(), layout.forward[channel])
            tested = ~np.isnan(ahead.deviation)
            product = ahead.deviation[tested] * view.target[tested]
            session, unit = view.session[tested], view.unit[tested]
            forward[channel] = (
                row_mean(product, session, unit, length=length)
                if channel == "entity"
                else date_block_mean(product, session, length=length)
            )
        del book
    level = _measure_level(values, layout, twin=twin) if tables else None
    return Measurement(skill=skill, forward=forward, level=level)


def _measure_level(values: NDArray[np.floating], layout: Layout, *, twin: bool) -> LevelMeasurement:
    view, length = layout.views["level"], layout.length
    observed = view.unshifted()
    book = channel_book(layout.panel, values, "level")
    moved = observed if twin else view
    (on,) = run_arms(book, moved, layout.on, pooled=True)
    off = run_arms(book, moved, layout.off.plan, pooled=False)
    result = premium(on, off[0], view, length=length)
    if twin:
        return LevelMeasurement(premium=result, on=on, off=tuple(off))
    (walk,) = run_arms(book, observed, layout.walk, pooled=True)
    return LevelMeasurement(
        premium=result,
        on=on,
        off=tuple(off),
        leakage=evaluation_leakage(book, observed, layout.seen_unseen, length=length),
        walk=walk,
    )


def project(values: NDArray[np.floating], max_dimension: int, seed: int) -> NDArray[np.floating]:
    """A wide twin through a fixed random matrix: still an untrained random network."""
    dimension = values.shape[1]
    if dimension <= max_dimension:
        return values
    rng = np.random.default_rng(seed)
    matrix: NDArray[np.float32] = rng.standard_normal((dimension, max_dimension), dtype=np.float32)
    scale = values.std(axis=0, dtype=np.float64)
    scaled = (matrix / np.where(scale > 0, scale, 1.0)[:, None]).astype(np.float32)
    return np.asarray(values, dtype=np.float32) @ scaled
