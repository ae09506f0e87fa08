"""What is odd about a panel though nothing is wrong with it is said, and changes no figure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.audit import run_audit
from headrace.audit.config import AuditConfig
from headrace.audit.limits import hopeless, sides
from headrace.audit.oddities import oddities
from headrace.errors import DataError


@pytest.fixture(scope="module")
def leaky(small):
    return small(leak=0.06, seed=1)


def test_a_usual_panel_has_no_oddities(small_panel):
    assert oddities(small_panel()) == ()
    heavy = np.random.default_rng(0).standard_t(2, 4 * 600)
    assert oddities(small_panel(num_sessions=600, y=heavy)) == ()


@pytest.mark.parametrize("code", [-999.0, 1e10, -1e300])
def test_codes_of_missing_targets_are_said_with_their_rows(small_panel, code):
    y = small_panel(num_sessions=200).y.copy()
    y[[7, 300]] = code
    (note,) = oddities(small_panel(num_sessions=200, y=y))
    assert "2 of 800 rows hold 100% of the target's variance (rows 7, 300; y is " in note


def test_labels_that_start_before_their_forecast_are_said(small_panel):
    panel = small_panel()
    start = panel.label_start.copy()
    start[3] -= np.timedelta64(1, "D")
    (note,) = oddities(small_panel(label_start=start))
    assert "In 1 of 24 rows the label starts before" in note
    assert "row 3" in note
    # A label that starts on the day of a forecast made at three starts with it.
    afternoon = panel.sessions[panel.session] + np.timedelta64(15, "h")
    later = panel.label_end + np.timedelta64(1, "D")
    assert oddities(small_panel(date=afternoon, label_end=later)) == ()


def test_instants_of_single_events_are_counted_by_their_days(small_panel, days):
    minutes = np.arange(24) * np.timedelta64(20, "m")
    date = days(3)[np.arange(24) // 8] + minutes
    panel = small_panel(date=date, label_start=date, label_end=date)
    (note,) = oddities(panel)
    assert "24 dates are instants of 3 days" in note
    assert "3 days have an embedding" in hopeless(panel, AuditConfig())[0]
    assert sides(panel, 16) == (2, 1)
    # Bars within a day, a row an entity each, are dates like any others.
    bars = days(1) + np.tile(np.arange(6), 4) * np.timedelta64(1, "h")
    assert oddities(small_panel(date=bars, label_start=bars, label_end=bars)) == ()


def test_vectors_of_zeros_are_said_with_their_rows(leaky, quick):
    values = leaky.embedding.copy()
    values[[0, 5]] = 0.0
    rows = leaky.panel.embedded_rows[[0, 5]]
    result = run_audit(leaky.panel, {"m": values}, config=quick)
    assert f"in 2 of {len(values)} rows (rows {rows[0]}, {rows[1]})" in result.warnings[0]


def test_labels_without_an_end_are_refused_by_row(leaky, quick):
    end = leaky.panel.label_end.copy()
    end[[4, 9]] = np.datetime64("9999-12-31")
    with pytest.raises(DataError, match=r"ends on 9999-12-31.*in rows 4, 9"):
        run_audit(replace(leaky.panel, label_end=end), {"m": leaky.embedding}, config=quick)


def test_a_target_that_stops_varying_at_the_cutoff_stops_no_audit(leaky, quick):
    panel = replace(leaky.panel, features=leaky.panel.features[:, :0], feature_names=())
    first = int(np.searchsorted(panel.sessions, np.datetime64(leaky.cutoff), side="right"))
    y = np.where(panel.session >= first, 0.1, panel.y)
    filled = replace(panel, y=y)
    model = run_audit(filled, {"m": leaky.embedding}, {"m": leaky.cutoff}, config=quick).models[0]
    assert model.verdict == "too_little_data"
    assert "does not vary on one side" in model.summary[0]
    assert model.periods[-1].common.value == pytest.approx(0, abs=1e-12)
    # Features leave their own mirror in such a target, which varies.
    filled = replace(leaky.panel, y=y)
    model = run_audit(filled, {"m": leaky.embedding}, {"m": leaky.cutoff}, config=quick).models[0]
    assert model.verdict == "too_little_data"
