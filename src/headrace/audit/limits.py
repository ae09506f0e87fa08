"""How much data a statement needs.

Owns the least sizes of docs/audit.md and what could have been seen at the size there is. The
invariant: a panel that is too small yields a reason, in numbers, never a figure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.channels import common_view, entity_rows, entity_view
from headrace.audit.measure import Layout, Measurement, label_length, num_usable_blocks
from headrace.audit.oddities import day_of, lone_instants
from headrace.audit.records import PanelRecord
from headrace.audit.resample import MIN_BLOCKS, block_length
from headrace.audit.tables import total_variance

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.audit.channels import View
    from headrace.audit.config import AuditConfig
    from headrace.audit.panel import Panel
    from headrace.audit.records import Channel
    from headrace.audit.skill import Skill

_POWER = 0.8416  # standard normal quantile of 80%
_NEARLY_ALL = 0.9  # of a channel's variance, said by features
_LASTING = 0.02  # correlation below which there is nothing to speak of


def hopeless(panel: Panel, config: AuditConfig) -> tuple[str, ...]:
    """Why nothing at all can be said; empty where something can."""
    lone = lone_instants(panel)
    sessions = panel.session[panel.embedded_rows]
    common = len(np.unique(day_of(panel.sessions[sessions]) if lone else sessions))
    entity = len(np.unique(panel.session[entity_rows(panel)]))
    reasons = []
    if common < config.min_dates_common and entity < config.min_dates_entity:
        reasons.append(
            f"{common} {'days' if lone else 'dates'} have an embedding and {entity} have at least "
            f"two: {config.min_dates_common} are needed to test what entities do together, "
            f"{config.min_dates_entity} to test how they differ."
        )
    if num_usable_blocks(panel) < MIN_BLOCKS:
        label = label_length(panel)
        cause = f", five times the longest label of {label}" if label > 1 else ""
        reasons.append(
            f"The dates make {num_usable_blocks(panel)} blocks of {block_length(label)} sessions"
            f"{cause}; at least {MIN_BLOCKS} are needed."
        )
    return tuple(reasons)


def sides(panel: Panel, cutoff_session: int | None) -> tuple[int, int]:
    """Sessions with an embedded row before and after a cutoff; (0, 0) without one.

    Days, where sessions are instants of single events: a day's events are no independent draws.
    """
    if cutoff_session is None:
        return 0, 0
    sessions = np.unique(panel.session[panel.embedded_rows])
    parts = [sessions[sessions < cutoff_session], sessions[sessions >= cutoff_session]]
    if lone_instants(panel):
        days = [len(np.unique(day_of(panel.sessions[part]))) for part in parts]
        return days[0], days[1]
    return len(parts[0]), len(parts[1])


def too_few_shifts(layout: Layout) -> str:
    """Why shifted dates cannot reach the level; "" where they can.

    Max-T over models keeps the smallest p-value at ``1 / (1 + B)``; the channels of one model
    are still asked to be separable one by one, so that one rare shift decides nothing alone.
    """
    if layout.refusal or not layout.channels:
        return ""
    num_shifts, level = len(layout.offsets), layout.config.level
    needed = int(np.ceil(len(layout.channels) / level)) - 1
    if num_shifts >= needed:
        return ""
    return (
        f"{num_shifts} shifts of the dates are admissible; {needed} are needed at level {level:g}."
    )


def detectable_skill(measured: Measurement, layout: Layout, channel: Channel) -> float:
    """Share of var(y) that a channel's skill needed to be seen with 80% probability."""
    share = float(layout.views[channel].target.var()) / total_variance(layout)
    skill = measured.skill[channel]
    if len(skill.null) > 1:
        limit = np.quantile(skill.null, 1 - layout.config.level) + _POWER * skill.null.std(ddof=1)
        return float(max(limit, 0.0) ** 2) * share
    estimate = measured.forward[channel]
    # With S the share explained, the covariance is S and its error about sqrt(S / blocks).
    quantiles = 1.645 + _POWER
    return float(quantiles**2 / estimate.num_blocks) * share


def said_by_features(layout: Layout) -> dict[Channel, float]:
    """Share of a channel's target that is linear in the numeric features, where it is nearly all.

    Features that hold the target, or are about as many as the dates, leave little to test.
    """
    panel = layout.panel
    if panel.features.shape[1] == 0:
        return {}
    bare = replace(panel, features=panel.features[:, :0], feature_names=())
    views: dict[Channel, Callable[[Panel, NDArray[np.int64]], View]] = {
        "common": common_view,
        "entity": entity_view,
    }
    shares: dict[Channel, float] = {}
    for channel in layout.channels:
        whole = float(views[channel](bare, np.zeros(1, dtype=np.int64)).target.var())
        shares[channel] = 1.0 - float(layout.views[channel].target.var()) / whole
    return {channel: share for channel, share in shares.items() if share > _NEARLY_ALL}


def lasting_skill(skill: Skill) -> tuple[float, float] | None:
    """(correlation, median of shifted dates) where predictions meet almost any dates' targets."""
    if len(skill.null) == 0 or np.quantile(skill.null, 0.05) < _LASTING:
        return None
    return skill.correlation, float(np.median(skill.null))


def panel_record(panel: Panel) -> PanelRecord:
    """The panel as the result describes it."""
    return PanelRecord(
        name=panel.name,
        sha256=panel.sha256(),
        num_rows=len(panel.embedded_rows),
        num_matrix_rows=panel.num_rows,
        num_entities=panel.num_entities,
        num_dates=panel.num_sessions,
        first_date=panel.date_text(0),
        last_date=panel.date_text(panel.num_sessions - 1),
        coverage=panel.coverage,
        label_sessions=panel.label_sessions,
        features=panel.feature_names,
        dropped=dict(panel.dropped),
        notes=panel.notes,
    )
