"""Rows: nothing lost, nothing predicted twice, nothing predicted across documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.packing import RowSettings, best_fit_decreasing, cached_plan, plan_rows
from headrace.errors import ConfigError


def make_offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=40)


def check_plan(lengths, plan, max_length):
    """Every predicted flat position, once; pieces inside documents; rows within capacity."""
    offsets = make_offsets(lengths)
    predicted = []
    for row in range(plan.num_rows):
        pieces = range(plan.row_offsets[row], plan.row_offsets[row + 1])
        assert len(pieces) >= 1
        assert sum(plan.lengths[p] for p in pieces) <= max_length
        for p in pieces:
            start, length = plan.starts[p], plan.lengths[p]
            document = np.searchsorted(offsets, start, side="right") - 1
            end = offsets[document + 1]
            assert start + length <= end
            targets = range(start + 1, start + length + bool(plan.has_next[p]))
            assert all(t < end for t in targets)
            predicted += targets
    assert len(set(predicted)) == len(predicted)
    return set(predicted)


@given(lengths=lengths_lists, max_length=st.integers(2, 16), packing=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_token_but_the_first_is_predicted_once(lengths, max_length, packing):
    offsets = make_offsets(lengths)
    plan = plan_rows(offsets, RowSettings(max_length=max_length, packing=packing))
    firsts = set(offsets[:-1][np.diff(offsets) > 0].tolist())
    assert check_plan(lengths, plan, max_length) == set(range(offsets[-1])) - firsts
    assert plan.num_tokens == plan.lengths.sum()
    assert plan.num_dropped_tokens == sum(length == 1 for length in lengths)


@given(lengths=lengths_lists, max_length=st.integers(2, 16))
@settings(max_examples=100, deadline=None)
def test_wrapped_fills_every_row_but_the_last(lengths, max_length):
    if sum(lengths) == 0:
        return
    offsets = make_offsets(lengths)
    plan = plan_rows(offsets, RowSettings(max_length=max_length, packing_strategy="wrapped"))
    firsts = set(offsets[:-1][np.diff(offsets) > 0].tolist())
    assert check_plan(lengths, plan, max_length) == set(range(offsets[-1])) - firsts
    filled = np.add.reduceat(plan.lengths, plan.row_offsets[:-1])
    assert (filled[:-1] == max_length).all()


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_best_fit_decreasing_is_within_its_bound(lengths):
    lengths = np.array(lengths)
    rows = best_fit_decreasing(lengths, 12)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= 12
    # Johnson 1973: at most 11/9 of the optimum plus 4; the optimum is at least the volume.
    assert len(filled) <= 11 / 9 * max(1, -(-lengths.sum() // 12)) * 1.5 + 4
    # Best fit leaves no two rows that could be one.
    half = np.sort(filled)[:2]
    assert len(half) < 2 or half.sum() > 12


def test_documents_that_fit_stay_whole():
    plan = plan_rows(make_offsets([5, 9, 3, 20, 7, 1]), RowSettings(max_length=10))
    whole = {
        (s, n)
        for s, n, more in zip(plan.starts, plan.lengths, plan.has_next, strict=True)
        if not more
    }
    assert {(0, 5), (5, 9), (14, 3), (37, 7)} <= whole
    # 20 = 10 + 10, as rows of their own; 7 + 3 share one; 9 and 5 stand alone.
    rows = np.split(np.arange(len(plan.starts)), plan.row_offsets[1:-1])
    assert sorted(sorted(plan.lengths[row].tolist()) for row in rows) == [
        [3, 7], [5], [9], [10], [10],
    ]  # fmt: skip


def test_a_cut_document_predicts_the_first_token_of_the_next_piece():
    plan = plan_rows(make_offsets([7]), RowSettings(max_length=3, packing=False))
    assert plan.lengths.tolist() == [3, 3]  # the seventh token is predicted, and predicts nothing
    assert plan.has_next.tolist() == [True, True]


def test_truncate_and_drop_say_what_they_lose():
    offsets = make_offsets([4, 10, 1])
    cut = plan_rows(offsets, RowSettings(max_length=6, excess_length="truncate"))
    assert sorted(cut.lengths.tolist()) == [4, 6]
    assert not cut.has_next.any()
    assert cut.num_dropped_tokens == 5
    dropped = plan_rows(offsets, RowSettings(max_length=6, excess_length="drop"))
    assert dropped.lengths.tolist() == [4]
    assert dropped.num_dropped_tokens == 11


def test_rows_keep_the_order_of_their_first_document():
    plan = plan_rows(make_offsets([3, 8, 5, 2, 8, 5]), RowSettings(max_length=8))
    firsts = plan.starts[plan.row_offsets[:-1]]
    assert (np.diff(firsts) > 0).all()


def test_settings_without_effect_are_refused():
    with pytest.raises(ConfigError, match="has no effect"):
        RowSettings(max_length=8, packing_strategy="wrapped", excess_length="drop")
    with pytest.raises(ConfigError, match="max_length is 1"):
        RowSettings(max_length=1)


def test_the_kept_plan_equals_a_new_one(tmp_path):
    offsets = make_offsets(np.random.default_rng(0).integers(0, 50, 200))
    for row_settings in (RowSettings(max_length=16), RowSettings(max_length=24, packing=False)):
        made = cached_plan(tmp_path, offsets, row_settings)
        kept = cached_plan(tmp_path, offsets, row_settings)
        new = plan_rows(offsets, row_settings)
        for name in ("row_offsets", "starts", "lengths", "has_next"):
            for plan in (made, kept):
                assert np.array_equal(getattr(plan, name), getattr(new, name))
        assert kept.num_tokens == new.num_tokens
        assert kept.num_dropped_tokens == new.num_dropped_tokens


@pytest.mark.parametrize("damage", [b"", b"junk", None])
@pytest.mark.parametrize("name", ["starts.npy", "counts.json"])
def test_a_kept_plan_that_was_damaged_is_made_again(tmp_path, name, damage):
    offsets, settings = np.array([0, 30, 50, 51, 90]), RowSettings(max_length=16)
    whole = cached_plan(tmp_path, offsets, settings)
    (place,) = tmp_path.glob("rows-*")
    file = place / name
    file.write_bytes(file.read_bytes()[:-9] if damage is None else damage)
    again = cached_plan(tmp_path, offsets, settings)
    assert again.num_tokens == whole.num_tokens
    assert np.array_equal(again.starts, plan_rows(offsets, settings).starts)
    assert [file.name for file in tmp_path.iterdir()] == [place.name]
