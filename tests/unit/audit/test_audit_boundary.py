"""The contrast at the cutoff: whose draws its errors count, and what it is called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.signal import lfilter

from headrace.audit import AuditConfig
from headrace.audit.boundary import contrast
from headrace.audit.conclude import channel_contrast
from headrace.audit.measure import build_layout
from headrace.audit.synthetic import SyntheticConfig, simulate
from headrace.audit.tables import FigureMaker
from headrace.audit.verdict import excuse

SESSIONS = 400


def effects(rng, num_entities, persistence):
    """``(N, T)`` without date means: what is an entity's own, and comes and goes."""
    shocks = rng.standard_normal((num_entities, SESSIONS + 500))
    own = lfilter([np.sqrt(1 - persistence**2)], [1, -persistence], shocks)[:, 500:]
    return own - own.mean(axis=0)


@pytest.mark.parametrize("num_entities", [3, 4])
def test_few_entities_that_are_told_apart_do_not_pass_for_knowledge(num_entities):
    draws, session = 150, np.tile(np.arange(SESSIONS), num_entities)
    entity = np.repeat(np.arange(num_entities), SESSIONS)
    rejected = {"dates": 0, "both": 0}
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal((num_entities, SESSIONS))
        target = effects(rng, num_entities, 0.993) * 0.45 + (noise - noise.mean(axis=0)) * 0.9
        which = rng.standard_normal(num_entities)
        gain = np.repeat(which - which.mean(), SESSIONS)
        for name, clusters in (("dates", None), ("both", entity)):
            found = contrast(
                gain=gain,
                target=target.ravel(),
                session=session,
                cutoff_session=SESSIONS // 2,
                gap=10,
                length=5,
                total_variance=1.0,
                entity=clusters,
            )
            rejected[name] += found.p_value <= 0.05
    assert rejected["dates"] > 0.12 * draws
    assert rejected["both"] < 0.08 * draws


def test_two_entities_are_one_series_and_its_blocks_as_long_as_it_persists():
    drawn = simulate(
        SyntheticConfig(num_entities=2, num_sessions=SESSIONS, rows_per_entity=SESSIONS)
    )
    panel, rng = drawn.panel, np.random.default_rng(1)
    config = AuditConfig(entity_folds=2, num_shifts=19)
    blocks = {}
    for persistence in (0.0, 0.9):
        y = panel.y.copy()
        y[np.lexsort((panel.session, panel.entity))] = effects(rng, 2, persistence).ravel()
        layout = build_layout(replace(panel, y=y), config)
        gain = rng.standard_normal(len(layout.views["entity"].session))
        blocks[persistence] = channel_contrast(gain, layout, "entity", SESSIONS // 2).contrast
    assert blocks[0.0].num_blocks == 76  # 380 sessions in fives
    assert 10 <= blocks[0.9].num_blocks < 20


@pytest.mark.parametrize(
    ("drift", "leak", "part"), [(1.0, 0.0, 0.0), (0.0, 1.0, 0.9), (1.0, 0.3, 0.3)]
)
def test_a_drift_that_the_date_predicts_is_no_knowledge(drift, leak, part):
    """More of a trend lies on the longer side: its contrast is significant, and tells nothing.

    Beside it a leak is found: what is left within runs of dates is a contrast by itself.
    """
    rng = np.random.default_rng(0)
    session, noise = np.arange(SESSIONS), 0.25 * rng.standard_normal(SESSIONS)
    trend, known = np.linspace(-0.5, 0.5, SESSIONS), np.where(session < 300, noise, 0.0)
    found = contrast(
        gain=drift * trend + leak * known, target=trend + noise, session=session,
        cutoff_session=300, gap=10, length=5, total_variance=1.0,
    )  # fmt: skip
    assert found.p_value < 0.01
    assert found.brief.part == pytest.approx(part, abs=0.15)
    assert found.brief.run == 10
    reason = excuse(found.contrast.value, before=found.before.value, own_p=0.0, brief=found.brief)
    assert ("what lasts longer than 10 sessions" in reason) == (leak == 0)


def test_figures_name_the_clusters_that_count():
    session, entity = np.tile(np.arange(SESSIONS), 12), np.repeat(np.arange(12), SESSIONS)
    rng = np.random.default_rng(2)
    target = rng.standard_normal(len(session))
    known = target * (session < SESSIONS // 2) * rng.lognormal(0, 2, 12)[entity]
    given = {
        "gain": known,
        "target": target,
        "session": session,
        "cutoff_session": SESSIONS // 2,
        "gap": 10,
        "length": 5,
        "total_variance": 1.0,
    }
    assert contrast(**given).method == "date_block_t"
    found = contrast(**given, entity=entity)
    assert (found.method, found.contrast.num_blocks) == ("entity_cluster_t", 12)
    panel = simulate(SyntheticConfig(num_entities=12, num_sessions=SESSIONS)).panel
    layout = build_layout(panel, AuditConfig(num_shifts=19))
    made = FigureMaker(stack="")
    record = made.contamination((found, found), layout, "entity", 0.5, "the constant")
    assert record.contrast.method == record.own.method == "entity_cluster_t"
