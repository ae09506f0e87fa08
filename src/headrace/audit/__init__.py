"""Leakage measurement: panels, splits, statistics, verdicts."""
