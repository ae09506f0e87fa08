"""Size and power of the verdicts; benchmarks/audit_calibration.py does it at full size."""

from __future__ import annotations

import pytest

from headrace.audit import AuditConfig, run_audit
from headrace.audit.synthetic import SyntheticConfig, simulate

CONFIG = AuditConfig(num_shifts=39, tables=False, positive_control=0.0)
SIZE = {
    "num_entities": 20,
    "num_sessions": 340,
    "rows_per_entity": 80,
    "dimension": 16,
    "num_twins": 0,
}
NULLS = (
    {},
    {"network": "calendar"},
    {"feature_skill": 0.1},
    {"skill": 0.05},
    {"skill": 0.05, "skill_constant_in": "units", "volatility_break": 2.0},
)


def verdict(changes, seed):
    drawn = simulate(SyntheticConfig(seed=seed, **(SIZE | changes)))
    result = run_audit(drawn.panel, {"m": drawn.embedding}, {"m": drawn.cutoff}, config=CONFIG)
    return result.models[0].verdict


@pytest.mark.slow
def test_two_hundred_null_panels_give_at_most_eighteen_claims():
    """18 of 200 is exceeded 0.7% of the time at a true rate of 5%."""
    verdicts = [verdict(changes, seed) for changes in NULLS for seed in range(200 // len(NULLS))]
    assert len(verdicts) == 200
    assert "too_little_data" not in verdicts, "panels that are not tested prove nothing"
    assert verdicts.count("knows_the_future") <= 18


@pytest.mark.slow
def test_nothing_known_is_called_skill_about_as_often_as_the_level_says():
    verdicts = [verdict(changes, seed) for changes in NULLS[:2] for seed in range(500, 560)]
    assert "too_little_data" not in verdicts, "panels that are not tested prove nothing"
    assert verdicts.count("skill") <= 13


@pytest.mark.slow
def test_effects_of_entities_that_come_and_go_are_not_called_knowledge():
    """By date blocks alone 11 of these 60 are; 7 is exceeded 1% of the time at 5%."""
    changes = {
        "num_entities": 30,
        "rows_per_entity": 340,
        "dimension": 8,
        "entity_effect": 0.2,
        "cutoff_fraction": 0.62,
    }
    verdicts = [verdict(changes, seed) for seed in range(60)]
    assert "too_little_data" not in verdicts, "panels that are not tested prove nothing"
    assert verdicts.count("knows_the_future") <= 7


def test_a_large_leak_is_found_on_most_small_panels():
    verdicts = [verdict({"leak": 0.1}, seed) for seed in range(10)]
    assert verdicts.count("knows_the_future") >= 8
