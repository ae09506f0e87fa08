"""Small panels and settings shared by the audit's tests; helpers come as fixtures."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.audit import AuditConfig, make_panel
from headrace.audit.synthetic import SyntheticConfig, simulate

DAY = np.timedelta64(1, "D")
SMALL = {
    "num_entities": 40,
    "num_sessions": 420,
    "rows_per_entity": 60,
    "dimension": 24,
    "num_twins": 0,
}


def _days(count: int, start: str = "2020-01-01") -> np.ndarray:
    return np.datetime64(start) + np.arange(count) * DAY


def _small_panel(num_entities: int = 4, num_sessions: int = 6, horizon: int = 1, **changes):
    rng = np.random.default_rng(0)
    unit, session = np.divmod(np.arange(num_entities * num_sessions), num_sessions)
    dates = _days(num_sessions)
    columns = {
        "entity": np.array([f"E{k}" for k in unit]),
        "date": dates[session],
        "label_start": dates[session],
        "label_end": dates[session] + horizon * DAY,
        "y": rng.standard_normal(len(unit)),
    }
    return make_panel(**(columns | changes))


@pytest.fixture(scope="session")
def days():
    """``days(count, start)``: consecutive dates."""
    return _days


@pytest.fixture(scope="session")
def small_panel():
    """``small_panel(...)``: a full panel of daily rows with labels ``horizon`` days long."""
    return _small_panel


@pytest.fixture(scope="session")
def small():
    """``small(leak=...)``: a simulated panel with embeddings that a test can afford."""
    return lambda **changes: simulate(SyntheticConfig(**(SMALL | changes)))


@pytest.fixture(scope="session")
def quick() -> AuditConfig:
    """Settings that a test can afford."""
    return AuditConfig(num_shifts=39, tables=False, positive_control=0.0)
