"""Statistics between heads and between models: evaluation leakage, reduction, slope."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.audit import AuditConfig, run_audit
from headrace.audit.channels import channel_book
from headrace.audit.combine import slope_weights
from headrace.audit.measure import build_layout
from headrace.audit.premium import evaluation_leakage

SHAPE = (24, 120)


def leakage(small_panel, days, *, common: float, seed: int):
    """C of vectors that name the date and know half of what is the row's own.

    ``common`` is the share of y that a date shares. Without a skill of its own, no head would trust
    its vectors at all.
    """
    rng = np.random.default_rng(seed)
    session = np.arange(SHAPE[0] * SHAPE[1]) % SHAPE[1]
    own = rng.standard_normal(SHAPE)
    y = np.sqrt(common) * rng.standard_normal(SHAPE[1]) + np.sqrt(1 - common) * own
    dates = days(SHAPE[1])[session]
    panel = small_panel(*SHAPE, label_start=dates, label_end=dates, y=y.ravel())
    layout = build_layout(panel, AuditConfig(num_shifts=19, min_dates_common=60))
    names = rng.standard_normal((SHAPE[1], 128))[session]
    knowledge = own.ravel() + rng.standard_normal(len(session))
    book = channel_book(panel, np.column_stack([names, knowledge]), "level")
    view = layout.views["level"].unshifted()
    return evaluation_leakage(book, view, layout.seen_unseen, length=layout.length)


def test_an_evaluation_that_shows_other_rows_of_a_date_is_measured(small_panel, days):
    """Heads that saw half the entities of a date know its mean; others know nothing of it."""
    found = [leakage(small_panel, days, common=0.5, seed=seed) for seed in range(4)]
    assert all(estimate.p_above() < 1e-3 for estimate in found)
    # At most 2 cov(date's mean, y) / var(y), which is 2 x 0.5; ridge shrinks it.
    assert 0.3 < np.mean([estimate.value for estimate in found]) < 1.0


def test_dates_that_share_nothing_leak_nothing(small_panel, days):
    found = [leakage(small_panel, days, common=0.0, seed=seed) for seed in range(40)]
    assert sum(estimate.p_above() <= 0.05 for estimate in found) <= 5
    assert abs(np.mean([estimate.value for estimate in found])) < 0.02


def reduction(small, quick, seed: int, *, base: float, trained: float):
    """Two models of one panel that know these shares of y on every date, noise of their own."""
    drawn = small(seed=seed)
    panel, rng = drawn.panel, np.random.default_rng(seed + 1000)
    rows = panel.embedded_rows
    own = panel.y - (np.bincount(panel.session, panel.y) / 40)[panel.session]
    signal = own[rows] / own.std()
    models = {}
    for name, share in (("base", base), ("trained", trained)):
        vectors = rng.standard_normal((len(rows), 6))
        vectors[:, 0] = np.sqrt(share) * signal + np.sqrt(1 - share) * vectors[:, 0]
        models[name] = vectors
    result = run_audit(panel, models, config=quick, reductions=[("base", "trained")])
    return result.reductions[0].skill["entity"]


def test_equal_models_are_not_told_apart(small, quick):
    figures = [reduction(small, quick, seed, base=0.05, trained=0.05) for seed in range(40)]
    assert sum(figure.p_value <= 0.05 for figure in figures) <= 6
    covered = sum(figure.low <= 0 <= figure.high for figure in figures)
    assert covered >= 37  # of 40; docs/audit.md: 96 to 100%


def test_what_training_removed_is_seen_with_its_sign(small, quick):
    for seed in range(3):
        figure = reduction(small, quick, seed, base=0.1, trained=0.0)
        assert figure.low > 0
        assert figure.p_value <= 0.05
        assert figure.value == pytest.approx(np.sqrt(0.1), abs=0.08)
        assert reduction(small, quick, seed, base=0.0, trained=0.1).high < 0


def test_slope_weights_are_those_of_least_squares():
    years = [14.0, 15.5, 19.0, 20.0]
    values = np.array([0.1, 0.3, 0.2, 0.7])
    slope, _ = np.polyfit(years, values, 1)
    assert values @ slope_weights(years) == pytest.approx(slope)
