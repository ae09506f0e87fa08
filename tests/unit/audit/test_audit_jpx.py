"""The JPX file to the letter: rounding, splits, gaps, the closed day, label intervals."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.audit.jpx import (
    COLUMNS,
    adjusted_close,
    jpx_panel,
    read_jpx,
    round_half_up,
    targets,
)
from headrace.audit.published_jpx import published_panel
from headrace.audit.synthetic_jpx import SyntheticJpxConfig, synthetic_jpx, write_synthetic_jpx
from headrace.errors import DataError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("jpx") / "stock_prices.csv"
    write_synthetic_jpx(path, SyntheticJpxConfig(num_securities=30, num_sessions=1202, seed=2))
    return path


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_rounding_is_decimal_s_half_up_for_every_quoted_price(thousandths):
    values = np.array(thousandths) / 1000
    exact = [float(Decimal(repr(float(v))).quantize(Decimal("0.1"), ROUND_HALF_UP)) for v in values]
    np.testing.assert_array_equal(round_half_up(values), exact)


def test_known_ties():
    np.testing.assert_array_equal(round_half_up(np.array([0.05, 0.15, 0.25, 1.45, 2.349999])),
                                  [0.1, 0.2, 0.3, 1.5, 2.3])  # fmt: skip


def test_a_split_scales_its_own_row_and_all_before_it():
    close = np.array([1000.0, 1000.0, 500.0, 510.0])
    factor = np.array([1.0, 0.5, 1.0, 1.0])
    first = np.zeros(4, dtype=np.intp)
    np.testing.assert_array_equal(
        adjusted_close(close, factor, first), [500.0, 500.0, 500.0, 510.0]
    )
    np.testing.assert_allclose(
        targets(adjusted_close(close, factor, first), first), [0.0, 0.02, np.nan, np.nan]
    )


def test_gaps_and_zeros_are_filled_forward_within_the_security_only():
    close = np.array([100.0, np.nan, 0.01, 120.0, np.nan, 50.0])
    first = np.array([0, 0, 0, 0, 4, 4])
    adjusted = adjusted_close(close, np.ones(6), first)
    np.testing.assert_array_equal(adjusted[:4], [100.0, 100.0, 100.0, 120.0])
    assert np.isnan(adjusted[4])
    assert adjusted[5] == 50.0


def test_the_synthetic_file_has_every_peculiarity(path):
    frame = pl.read_csv(path)
    assert tuple(frame.columns) == COLUMNS
    closed = frame.filter(pl.col("Date") == "2020-10-01")
    assert len(closed) > 20
    assert closed["Close"].null_count() == len(closed)
    assert frame.filter(pl.col("AdjustmentFactor") != 1.0).height > 0
    assert frame.filter((pl.col("Date") != "2020-10-01") & pl.col("Close").is_null()).height > 0
    counts = frame.group_by("SecuritiesCode").len()["len"]
    assert counts.min() < counts.max()
    assert frame["Target"].null_count() > 0


def test_targets_are_recomputed_and_agree_with_the_file(path):
    prices = read_jpx(path)
    computed = targets(prices.adjusted_close, prices.first_row)
    both = ~np.isnan(computed) & ~np.isnan(prices.target)
    assert both.sum() > 30_000
    np.testing.assert_allclose(prices.target[both], computed[both], atol=1e-8)
    raw = np.full(len(prices.close), np.nan)
    raw[:-2] = prices.close[2:] / prices.close[1:-1] - 1
    assert (np.abs(raw[both] - computed[both]) > 0.3).any(), "raw closes would show the splits"


at_7 = pl.int_range(pl.len()) == 7


def rewritten(path, tmp_path, change):
    frame = change(pl.read_csv(path))
    out = tmp_path / "stock_prices.csv"
    frame.write_csv(out)
    return out


def test_a_target_that_prices_contradict_is_refused_by_row_id(path, tmp_path):
    wrong = pl.int_range(pl.len()) == 50
    out = rewritten(
        path, tmp_path,
        lambda f: f.with_columns(Target=pl.when(wrong).then(0.5).otherwise(pl.col("Target"))),
    )  # fmt: skip
    row_id = pl.read_csv(path)["RowId"][50]
    with pytest.raises(DataError, match=row_id):
        read_jpx(out)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: pl.concat([f, f[3:4]]), "repeats"),
        (lambda f: f.drop("AdjustmentFactor"), "lacks AdjustmentFactor"),
        (
            lambda f: f.with_columns(
                AdjustmentFactor=pl.when(at_7).then(None).otherwise("AdjustmentFactor")
            ),
            "AdjustmentFactor is missing or not positive: row",
        ),
        (
            lambda f: f.with_columns(
                Close=pl.when(at_7).then(pl.lit("-")).otherwise(pl.col("Close").cast(pl.String))
            ),
            "'Close' holds text that is no number",
        ),
        (
            lambda f: f.with_columns(Date=pl.when(at_7).then(pl.lit("soon")).otherwise("Date")),
            "'Date' has text that is no date",
        ),
    ],
)
def test_files_of_another_shape_are_refused(path, tmp_path, change, words):
    with pytest.raises(DataError, match=words):
        read_jpx(rewritten(path, tmp_path, change))
    with pytest.raises(DataError, match="no JPX price file"):
        read_jpx(tmp_path / "missing.csv")


def test_labels_run_from_the_next_row_to_the_one_after(path):
    panel = jpx_panel(read_jpx(path), num_entities=20, dates_per_entity=10)
    assert panel.label_sessions == 2
    inside = panel.label_end <= panel.sessions[-1]
    start = np.searchsorted(panel.sessions, panel.label_start[inside])
    assert (start - panel.session[inside] >= 1).all()
    assert (panel.label_end >= panel.label_start).all()
    assert panel.is_full_matrix
    assert panel.embedded.sum() == 200


def test_the_universe_is_known_at_the_start(path):
    """Late listings are out, later delistings are in: the future plays no part in the choice."""
    prices = read_jpx(path)
    panel = jpx_panel(prices, num_entities=1000)
    counts = np.bincount(panel.entity)
    assert counts.min() < counts.max(), "securities that are delisted later are in"
    start = panel.sessions[0]
    late = [c for c in np.unique(prices.code) if prices.date[prices.code == c].min() > start]
    assert late
    assert not set(map(str, late)) & set(panel.entities)
    last = {c: prices.date[prices.code == c].max() for c in np.unique(prices.code)}
    delisted = {str(c) for c, date in last.items() if date < prices.date.max()}
    assert delisted & set(panel.entities)
    published, facts = published_panel(prices, num_entities=15)
    assert not delisted & set(published.entities), "the published choice never sees one"
    assert facts.num_left_early == len(delisted)


def test_features_end_at_the_date_and_stay_in_the_security(path):
    prices = read_jpx(path)
    panel = jpx_panel(prices, num_entities=5, dates_per_entity=5)
    later = prices.date > panel.sessions[200]
    changed = prices.adjusted_close.copy()
    changed[later] *= np.linspace(1, 3, later.sum())
    other = jpx_panel(
        type(prices)(**(vars(prices) | {"adjusted_close": changed})),
        num_entities=5, dates_per_entity=5,
    )  # fmt: skip
    early = panel.session <= 200
    np.testing.assert_array_equal(panel.features[early], other.features[other.session <= 200])


def test_the_same_seed_gives_the_same_file():
    config = SyntheticJpxConfig(
        num_securities=12, num_sessions=80, num_delisted=1, num_listed_late=1
    )
    assert synthetic_jpx(config).equals(synthetic_jpx(config))
