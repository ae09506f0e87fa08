"""Splitters: nobody trains on what a test label covers, and nothing is lost at the edges."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import sklearn
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from skfolio.model_selection import CombinatorialPurgedCV
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score

from headrace.audit.splits import (
    Chronological,
    CombinatorialPurged,
    EntityKFold,
    LabelTimes,
    PurgedKFold,
    WalkForward,
    date_blocks,
    runs,
)
from headrace.errors import ConfigError, DataError

DAY = np.timedelta64(1, "D")


def times(session, start, length, origin="2020-01-01") -> LabelTimes:
    """Rows dated ``session`` whose label runs ``length`` days from ``start`` days after it."""
    date = np.datetime64(origin) + np.asarray(session) * DAY
    begin = date + np.asarray(start) * DAY
    return LabelTimes(date, begin, begin + np.asarray(length) * DAY)


@st.composite
def panels(draw):
    """Ragged panels: some dates with many rows, label intervals of random place and length."""
    count = draw(st.integers(30, 120))
    session = draw(st.lists(st.integers(0, 59), min_size=count, max_size=count))
    start = draw(st.lists(st.integers(-1, 4), min_size=count, max_size=count))
    length = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    return times(session, start, length)


SPLITTERS = {
    "purged": lambda t, e: PurgedKFold(t, 4, e),
    "combinatorial": lambda t, e: CombinatorialPurged(t, 5, 2, e),
    "walk_forward": lambda t, e: WalkForward(t, 3, embargo=e),
    "chronological": lambda t, e: Chronological(t, t.sessions[len(t.sessions) * 2 // 3], e),
}


@pytest.mark.parametrize("kind", SPLITTERS)
@settings(max_examples=60, deadline=None)
@given(panel=panels(), embargo=st.integers(0, 5))
def test_no_training_label_meets_a_test_label(kind, panel, embargo):
    try:
        splits = list(SPLITTERS[kind](panel, embargo).split())
    except DataError:
        return  # refused by name: nothing left to train on
    for train, test in splits:
        assert len(train)
        assert len(test)
        assert not set(train) & set(test)
        meets = (panel.begin[train, None] <= panel.end[None, test]) & (
            panel.end[train, None] >= panel.begin[None, test]
        )
        assert not meets.any()


@settings(max_examples=40, deadline=None)
@given(panel=panels())
def test_every_date_is_tested_once_however_the_blocks_divide(panel):
    try:
        splits = list(PurgedKFold(panel, 7).split())
    except DataError:
        return
    tested = np.concatenate([test for _, test in splits])
    np.testing.assert_array_equal(np.sort(tested), np.arange(len(panel)))
    for _, test in splits:
        whole = np.isin(panel.session, panel.session[test])
        assert whole.sum() == len(test), "a date is never cut"


@given(sessions=st.integers(4, 500), blocks=st.integers(2, 40))
def test_blocks_leave_no_date_out_when_the_remainder_is_large(sessions, blocks):
    if sessions < blocks:
        with pytest.raises(DataError):
            date_blocks(sessions, blocks)
        return
    block = date_blocks(sessions, blocks)
    sizes = np.bincount(block, minlength=blocks)
    assert len(block) == sessions
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(block) >= 0).all()


def test_the_docstring_s_picture_is_what_happens():
    panel = times(np.arange(10), 0, 1)
    train, test = list(PurgedKFold(panel, 3, 1).split())[1]
    assert list(test) == [4, 5, 6]
    assert list(train) == [0, 1, 2, 9]
    # 3 ends at 4's date (closed); 7 starts at 6's label end; 8 is the embargoed session.


@pytest.mark.parametrize("unit", ["sessions", "days"])
def test_embargo_is_clamped_at_the_end_of_the_sample_not_skipped(unit):
    panel = times(np.arange(30), 0, 0)
    embargo = 12 if unit == "sessions" else 12 * DAY
    train, test = list(PurgedKFold(panel, 3, embargo).split())[1]
    assert list(test) == list(range(10, 20))
    assert list(train) == list(range(10)), "the embargo passes the end, and takes what is there"


def test_blocks_apart_are_purged_one_by_one():
    panel = times(np.arange(60), 0, 1)
    train, _ = next(
        split
        for chosen, split in zip(
            itertools.combinations(range(6), 2),
            CombinatorialPurged(panel, 6, 2).split(),
            strict=True,
        )
        if chosen == (1, 4)
    )
    between = [row for row in train if 20 <= row < 40]
    assert between == list(range(21, 39)), "a span from block 1 to 4 would lose these"
    assert runs(np.array([True, True, False, True])) == [(0, 1), (3, 3)]


def test_the_boundary_is_closed_on_both_sides():
    ends_on_the_day_before = times([0, 1, 2, 3], 0, [0, 0, 0, 0])
    train, _ = next(Chronological(ends_on_the_day_before, np.datetime64("2020-01-02")).split())
    assert list(train) == [0, 1]
    ends_on_the_first_test_day = times([0, 1, 2, 3], 0, [0, 1, 0, 0])
    train, _ = next(Chronological(ends_on_the_first_test_day, np.datetime64("2020-01-02")).split())
    assert list(train) == [0]


def test_jpx_labels_purge_two_sessions_before_a_split():
    panel = times(np.arange(20), 1, 1)
    train, test = next(Chronological(panel, np.datetime64("2020-01-10")).split())
    assert test.min() == 10
    assert train.max() == 7


def test_chronological_embargo_keeps_the_test_period_and_shortens_training():
    panel = times(np.arange(20), 0, 0)
    train, test = next(Chronological(panel, np.datetime64("2020-01-10"), 5).split())
    assert (train.max(), test.min()) == (4, 10)


def test_gaps_count_sessions_on_a_panel_not_rows():
    session = np.repeat(np.arange(30), 7)
    panel = times(session, 0, 0)
    train, test = next(PurgedKFold(panel, 3, 2).split())
    assert set(session[test]) == set(range(10))
    assert set(session[train]) == set(range(12, 30))


def test_walk_forward_goes_forward_and_rolls():
    panel = times(np.arange(60), 0, 1)
    expanding = list(WalkForward(panel, 5).split())
    rolling = list(WalkForward(panel, 5, window=10).split())
    assert len(expanding) == 5
    for (train, test), (short, same) in zip(expanding, rolling, strict=True):
        assert train.max() < test.min()
        assert train.min() == 0
        np.testing.assert_array_equal(test, same)
        assert short.min() == test.min() - 10


@pytest.mark.parametrize(("folds", "tested"), [(6, 2), (5, 3), (7, 2)])
@pytest.mark.parametrize(("length", "embargo"), [(0, 0), (2, 0), (1, 3)])
def test_equals_skfolio_on_one_row_a_date(folds, tested, length, embargo):
    """There, labels of L days purge what skfolio's ``purged_size=L`` purges, in rows."""
    count = 10 * folds  # where blocks divide evenly; the remainder is dealt differently
    panel = times(np.arange(count), 0, length)
    splitter = CombinatorialPurged(panel, folds, tested, embargo)
    ours = {tuple(test): tuple(train) for train, test in splitter.split()}
    theirs = CombinatorialPurgedCV(folds, tested, purged_size=length, embargo_size=embargo)
    for train, tests in theirs.split(np.zeros((count, 2))):
        assert ours[tuple(np.sort(np.concatenate(tests)))] == tuple(train)


def test_entity_folds_are_scikit_learn_s():
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 13, 200)
    panel = times(np.arange(200) % 50, 0, 0)
    ours = list(EntityKFold(panel, 5).split(groups=groups))
    theirs = list(GroupKFold(5).split(np.zeros(200), groups=groups))
    for (train, test), (train2, test2) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(train, train2)
        np.testing.assert_array_equal(test, test2)


def test_scikit_learn_takes_them_as_they_are():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((90, 3)), rng.standard_normal(90)
    scores = cross_val_score(Ridge(), X, y, cv=PurgedKFold(times(np.arange(90), 0, 1), 5))
    assert len(scores) == 5


SEARCHES = {
    "purged": lambda t: PurgedKFold(t, 5, 1),
    "combinatorial": lambda t: CombinatorialPurged(t, 5, 2),
    "walk-forward": lambda t: WalkForward(t, 4),
    "chronological": lambda t: Chronological(t, np.datetime64("2020-02-15")),
    "entities": lambda t: EntityKFold(t, 3),
}


@pytest.mark.parametrize("routed", [False, True], ids=["groups", "routed groups"])
@pytest.mark.parametrize("kind", SEARCHES)
def test_a_grid_search_takes_them_copies_them_and_prints_them(kind, routed):
    day = np.repeat(np.arange(60), 5)
    splitter = SEARCHES[kind](times(day, 1, 1))
    rng = np.random.default_rng(0)
    X, y = sparse.csr_matrix(rng.standard_normal((300, 3))), rng.standard_normal(300)
    groups = {"groups": np.tile(np.arange(5), 60)} if kind == "entities" else {}
    search = GridSearchCV(Ridge(), {"alpha": [1.0, 10.0]}, cv=splitter)
    with sklearn.config_context(enable_metadata_routing=routed):
        found = clone(search).fit(X, y, **groups)
    assert found.n_splits_ == splitter.get_n_splits()
    assert "<300 rows on 60 dates>" in repr(splitter)
    again = pickle.loads(pickle.dumps(splitter))  # workers of a parallel search get it so
    ids = groups.get("groups")
    for one, two in zip(splitter.split(groups=ids), again.split(groups=ids), strict=True):
        np.testing.assert_array_equal(one[0], two[0])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: list(Chronological(times([0, 1], 0, 0), np.datetime64("2021-01-01")).split()),
            "test",
        ),
        (lambda: list(PurgedKFold(times(np.arange(9), 0, 30), 3).split()), "training set is empty"),
        (lambda: list(PurgedKFold(times([0, 1], 0, 0), 3).split()), "2 dates"),
        (
            lambda: list(EntityKFold(times([0, 1, 2], 0, 0), 5).split(groups=[1, 1, 2])),
            "2 entities",
        ),
        (lambda: times([0, 1], 0, [0, -1]), "row 1"),
        (lambda: times([], [], []), "no rows"),
        (lambda: list(PurgedKFold(times(np.arange(9), 0, 0), 3).split(np.zeros(4))), "9 rows"),
    ],
)
def test_what_cannot_be_split_is_refused(build, words):
    with pytest.raises(DataError, match=words):
        build()


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="test blocks"):
        list(CombinatorialPurged(times(np.arange(9), 0, 0), 3, 3).split())
    with pytest.raises(ConfigError, match="groups"):
        list(EntityKFold(times(np.arange(9), 0, 0), 3).split())


@pytest.mark.parametrize("length", [0, 1, 3])
def test_equals_purgedcv_whose_labels_are_half_open(length):
    """Its label ends before its evaluation time; one day later there is our closed interval."""
    purgedcv = pytest.importorskip("purgedcv")
    pandas = pytest.importorskip("pandas")
    panel = times(np.arange(53), 0, length)
    dates = pandas.Series(panel.begin.astype("datetime64[ns]"))
    ends = pandas.Series((panel.end + DAY).astype("datetime64[ns]"))
    theirs = purgedcv.PurgedKFold(5, prediction_times=dates, evaluation_times=ends)
    ours = PurgedKFold(panel, 5).split()
    for (train, test), (train2, test2) in zip(ours, theirs.split(np.zeros((53, 1))), strict=True):
        np.testing.assert_array_equal(test, test2)
        np.testing.assert_array_equal(train, train2)
