"""Intervals cover, p-values are uniform, corrections are the textbook's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.signal import lfilter

from headrace.audit.resample import (
    admissible_offsets,
    block_length,
    clustered,
    date_block_mean,
    date_block_ratio,
    difference,
    draw_offsets,
    holm,
    max_t,
    persistent_length,
    row_mean,
    scaled,
    shift_p,
    shift_p_two_sided,
)
from headrace.audit.synthetic import market_shocks
from headrace.errors import DataError


def test_block_mean_is_the_plain_t_interval_when_every_block_is_one_value():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(40)
    estimate = date_block_mean(values, np.arange(40), length=1)
    low, high = stats.t.interval(0.95, 39, values.mean(), stats.sem(values))
    assert estimate.interval() == pytest.approx((low, high))
    assert estimate.p_above() == pytest.approx(
        stats.ttest_1samp(values, 0, alternative="greater")[1]
    )


def test_ratio_is_the_ratio_of_sums_and_ignores_scale():
    rng = np.random.default_rng(1)
    above, below = rng.standard_normal(300), rng.random(300)
    session = np.sort(rng.integers(0, 100, 300))
    estimate = date_block_ratio(above, below, session, length=5)
    assert estimate.value == pytest.approx(above.sum() / below.sum())
    doubled = date_block_ratio(2 * above, 2 * below, session, length=5)
    assert (doubled.value, doubled.se) == pytest.approx((estimate.value, estimate.se))
    assert scaled(estimate, -3.0).se == pytest.approx(3 * estimate.se)


def test_date_blocks_cover_where_rows_share_the_date_s_shock():
    """Known answer 0: rows of a date move together, so rows counted alone cover far too little."""
    rng = np.random.default_rng(2)
    session = np.repeat(np.arange(200), 8)
    covered = naive = 0
    for _ in range(300):
        shocks = market_shocks(200, rng)
        values = shocks[session] + rng.standard_normal(1600)
        low, high = date_block_mean(values, session, length=5).interval()
        covered += low < 0 < high
        naive += abs(stats.ttest_1samp(values, 0)[0]) < 1.96
    assert 0.91 <= covered / 300 <= 0.985
    assert naive / 300 < 0.75


def test_difference_is_welch_s():
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal(60), 3 * rng.standard_normal(25) + 0.4
    gap = difference(
        date_block_mean(a, np.arange(60), length=1), date_block_mean(b, np.arange(25), length=1)
    )
    welch = stats.ttest_ind(a, b, equal_var=False, alternative="greater")
    assert gap.p_above() == pytest.approx(welch.pvalue)
    assert gap.df == pytest.approx(welch.df)


def test_too_few_blocks_give_a_number_and_no_interval():
    estimate = date_block_mean(np.arange(40.0), np.arange(40), length=5)
    assert estimate.num_blocks == 8
    assert estimate.interval() == (None, None)
    assert estimate.p_above() == 1.0
    with pytest.raises(DataError, match="no rows"):
        date_block_mean(np.zeros(0), np.zeros(0, dtype=int), length=5)


def test_nothing_predicted_is_no_evidence():
    estimate = date_block_mean(np.zeros(100), np.arange(100), length=5)
    assert estimate.p_above() == 1.0


def test_blocks_grow_with_labels_that_overlap():
    assert block_length(1) == 5
    assert block_length(20) == 100


@pytest.mark.parametrize(
    ("sessions", "label", "least"), [(100, 1, 10), (100, 2, 10), (100, 20, 40)]
)
def test_offsets_keep_labels_apart_in_both_directions(sessions, label, least):
    offsets = admissible_offsets(sessions, label)
    assert offsets.min() == least
    assert offsets.max() == sessions - least


def test_drawn_offsets_are_different_and_all_when_there_are_fewer():
    rng = np.random.default_rng(0)
    drawn = draw_offsets(400, 1, 199, rng)
    assert len(np.unique(drawn)) == 199
    assert len(draw_offsets(60, 1, 199, rng)) == 41


def test_shift_p_counts_the_observed_value_itself():
    null = np.array([0.1, 0.2, 0.3, 0.4])
    assert shift_p(0.35, null) == pytest.approx(2 / 5)
    assert shift_p(9.0, null) == pytest.approx(1 / 5)
    assert shift_p_two_sided(-9.0, null) == pytest.approx(1 / 5)


def test_holm_is_the_textbook_s():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_max_t_keeps_the_family_s_error_and_ignores_units():
    rng = np.random.default_rng(4)
    claims = 0
    for _ in range(400):
        shared = rng.standard_normal(200)
        draws = 0.7 * shared + 0.7 * rng.standard_normal((5, 200))
        units = np.array([1.0, 10.0, 1e-3, 5.0, 2.0])[:, None]
        draws = draws * units + units
        adjusted = max_t(draws[:, 0], draws[:, 1:])
        claims += min(adjusted) <= 0.05
    assert 0.02 <= claims / 400 <= 0.085


def test_max_t_steps_down():
    rng = np.random.default_rng(5)
    null = rng.standard_normal((2, 999))
    first, second = max_t([8.0, 2.3], null)
    assert first == pytest.approx(1 / 1000)
    assert second == pytest.approx(
        shift_p(2.3 - np.median(null[1]), null[1] - np.median(null[1])), abs=5e-3
    )
    assert second >= first


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_the_error_of_a_ratio_does_not_depend_on_the_unit(unit):
    rng = np.random.default_rng(0)
    y = rng.standard_normal(400)
    gain = 0.1 * y + rng.standard_normal(400)
    plain = date_block_ratio(gain * y, y**2, np.arange(400), length=5)
    scaled_up = date_block_ratio(gain * y * unit**2, (y * unit) ** 2, np.arange(400), length=5)
    assert scaled_up.value == pytest.approx(plain.value, rel=1e-12)
    assert scaled_up.se == pytest.approx(plain.se, rel=1e-12)
    assert scaled_up.p_above() == pytest.approx(plain.p_above(), rel=1e-9)


def test_clustered_error_is_the_t_error_of_the_clusters_sums():
    rng = np.random.default_rng(0)
    own = rng.standard_normal(12)
    cluster = np.repeat(np.arange(12), 5)
    influence = np.repeat((own - own.mean()) / 60, 5)
    found = clustered(own.mean(), influence, cluster)
    assert found.se == pytest.approx(stats.sem(own))
    assert (found.df, found.num_blocks, found.n) == (11, 12, 60)
    unused = clustered(own.mean(), np.append(influence, 0.0), np.append(cluster, 40))
    assert unused == found


def test_clusters_that_add_nothing_are_no_evidence():
    assert clustered(0.1, np.zeros(20), np.arange(20)).p_above() == 1.0


def test_blocks_grow_with_a_series_that_persists_and_not_with_noise():
    rng = np.random.default_rng(1)
    noise = rng.standard_normal(1000)
    assert persistent_length(noise, 5) == 5
    assert persistent_length(np.full(1000, 3.0), 5) == 5
    series = np.empty(1000)
    series[0] = noise[0]
    for t in range(1, 1000):
        series[t] = 0.9 * series[t - 1] + noise[t]
    length = persistent_length(series, 5)
    centred = series - series.mean()
    rho = float(centred[1:] @ centred[:-1] / (centred @ centred))
    # Andrews (1991): 1.1447 (alpha T)^(1/3), alpha = 4 rho^2 / ((1 - rho)^2 (1 + rho)^2).
    andrews = 1.1447 * (4 * rho**2 / ((1 - rho) ** 2 * (1 + rho) ** 2) * 1000) ** (1 / 3)
    assert length == int(np.ceil(andrews))
    assert persistent_length(series, length) == length


def test_what_lasts_in_entities_is_no_evidence_from_every_date():
    """Products of an entity persist for months where both its target and its vectors do."""
    rejected = {"dates": 0, "both": 0}
    entity, session = np.divmod(np.arange(30 * 400), 400)
    for seed in range(100):
        shocks = np.random.default_rng(seed).standard_normal((2, 30, 700))
        target, vector = lfilter([0.2], [1, -0.98], shocks)[..., 300:]
        product = (target * vector).ravel()
        estimates = {
            "dates": date_block_mean(product, session, length=5),
            "both": row_mean(product, session, entity, length=5),
        }
        for name, estimate in estimates.items():
            rejected[name] += estimate.p_above() <= 0.05
    assert rejected["dates"] > 15
    assert rejected["both"] <= 9
    two = entity < 2
    assert row_mean(product[two], session[two], entity[two], length=5).clusters == "dates"
