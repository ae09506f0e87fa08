"""Documents held out and documents of a month: each once, with the tokens that are theirs."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.evaluation import EvalSet
from headrace.data.packing import RowSettings, plan_rows
from headrace.data.sources import DatasetSource
from headrace.data.subsets import by_month, hold_out, plan_subset, subset_key
from headrace.data.tokens import tokenise
from headrace.errors import ConfigError

SETTINGS = [
    RowSettings(max_length=8),
    RowSettings(max_length=8, packing_strategy="wrapped"),
    RowSettings(max_length=8, packing=False, excess_length="truncate"),
]


def predicted(offsets, plan):
    """How often each token of the store is predicted."""
    counts = np.zeros(offsets[-1], int)
    for start, length, more in zip(plan.starts, plan.lengths, plan.has_next, strict=True):
        counts[start + 1 : start + length + more] += 1
    return counts


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=20),
    chosen=st.sets(st.integers(0, 19)),
    settings=st.sampled_from(SETTINGS),
)
def test_rows_of_some_documents_are_those_of_a_store_of_these_alone(lengths, chosen, settings):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    documents = np.array(sorted(d for d in chosen if d < len(lengths)), np.int64)
    plan = plan_subset(offsets, settings, documents)
    inside = np.concatenate([[0], np.cumsum(np.diff(offsets)[documents])])
    alone = plan_rows(inside, settings)
    assert plan.num_tokens == alone.num_tokens
    ours, theirs = predicted(offsets, plan), predicted(inside, alone)
    spans = [np.arange(offsets[d], offsets[d + 1]) for d in documents]
    mine = np.concatenate(spans) if spans else np.empty(0, int)
    assert (ours[mine] == theirs).all()
    assert ours.sum() == theirs.sum()


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "rows.jsonl"
    dates = ["2016-03-01", "2016-04-01", None, "2016-03-31", "2016-04-02"] * 4
    rows = [
        {"input_ids": list(range(10 * n, 10 * n + 5)), "at": date} for n, date in enumerate(dates)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DatasetSource(path=str(path), type="tokens", date_field="at")
    return tokenise(source, None, cache_dir=tmp_path / "cache")


def test_what_is_held_out_is_not_trained_on(store):
    for size, expected in ((0.1, 2), (0.05, 1), (7, 7), (0.001, 1)):
        ((kept, out),) = hold_out([store], size, seed=1)
        assert len(out) == expected
        assert sorted([*kept, *out]) == list(range(20))
    again = hold_out([store, store], 10, seed=1)
    assert [len(out) for _, out in again] == [5, 5]
    assert (
        hold_out([store], 7, seed=1)[0][1].tolist() != hold_out([store], 7, seed=2)[0][1].tolist()
    )
    with pytest.raises(ConfigError, match="none is left to train on"):
        hold_out([store], 0.99, seed=1)
    with pytest.raises(ConfigError, match="20, of 20 documents in all, and none is left"):
        hold_out([store], 20, seed=1)


def test_every_document_is_in_one_month(store):
    months = by_month(store)
    assert [name for name, _ in months] == ["undated", "2016-03", "2016-04"]
    assert sorted(d for _, documents in months for d in documents) == list(range(20))
    few = EvalSet.open(store, RowSettings(max_length=16), label="x", documents=np.arange(5))
    assert {month: rows.plan.num_tokens for month, rows in few.parts} == {
        "undated": 5, "2016-03": 10, "2016-04": 10,
    }  # fmt: skip
    assert (few.num_tokens, few.num_rows) == (25, 3)
    assert subset_key(None) is None
    assert subset_key(np.arange(3)) != subset_key(np.arange(4))
