"""Sampling fills the budget, spread over the period, and depends on no order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.corpus.selection import priorities, water_fill

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.corpus.manifest import Manifest

strata = st.dictionaries(
    st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 40)),
    st.tuples(st.integers(1, 10_000), st.floats(0.1, 10)),
    min_size=1,
    max_size=30,
)


@given(strata, st.integers(0, 100_000))
def test_quotas_fill_the_budget_and_no_more_than_there_is(parts: Any, budget: int) -> None:
    available = {key: size for key, (size, _) in parts.items()}
    weights = {key: weight for key, (_, weight) in parts.items()}
    quotas = water_fill(available, weights, budget)
    assert all(0 <= quotas[key] <= available[key] for key in available)
    total = sum(quotas.values())
    assert total <= budget
    assert total >= min(budget, sum(available.values())) - len(available)
    # The level is one: what is not used up has the same share by weight.
    levels = [quotas[k] / weights[k] for k in available if quotas[k] < available[k]]
    if levels:
        low = min(weights[k] for k in available)
        assert max(levels) - min(levels) <= 2 * len(available) / low + 1e-6 * budget


def test_priorities_are_a_seeded_shuffle() -> None:
    keys = np.arange(10_000, dtype=np.uint64)
    first, second = priorities(keys, 0), priorities(keys, 1)
    assert np.array_equal(first, priorities(keys, 0))
    assert not np.array_equal(np.argsort(first), np.argsort(second))
    assert abs(np.corrcoef(np.argsort(np.argsort(first)), keys)[0, 1]) < 0.05


def by_month(manifest: Manifest) -> Counter[str]:
    months: Counter[str] = Counter()
    for row in manifest.data["histogram"]:
        months[row["month"]] += row["tokens"]
    return months


def doc_ids(manifest: Manifest) -> set[str]:
    return set(pq.read_table(manifest.documents_dir).column("doc_id").to_pylist())


@pytest.fixture
def crowded(tmp_path: Path, write_jsonl: Callable[..., Path], prose: Callable[..., str]) -> Path:
    """A file in which one month holds nine of ten documents, in the order of its stream."""
    rows = [{"id": i, "text": prose(i), "date": "2013-05-20"} for i in range(450)]
    rows += [
        {"id": 1000 + i, "text": prose(1000 + i), "date": f"2013-{1 + i % 10:02d}-20"}
        for i in range(50)
        if 1 + i % 10 != 5
    ]
    return write_jsonl(tmp_path / "in" / "crowded.jsonl", rows)


TOKENIZER = {"train": "bpe", "vocab_size": 300}


def test_a_budget_is_spread_over_the_months(build: Any, crowded: Path) -> None:
    source = {"path": str(crowded)}
    manifest = build(source, tokenizer=TOKENIZER, sampling={"max_tokens": 8000})
    months = by_month(manifest)
    assert manifest.num_tokens is not None
    assert 7000 < manifest.num_tokens <= 8000
    assert len(months) == 10
    assert max(months.values()) < 0.25 * sum(months.values())
    counts = manifest.counts
    assert counts["not_sampled"] == 495 - manifest.num_documents
    everything = build(source, tokenizer=TOKENIZER, output="all")
    (check,) = [c for c in everything.checks if c["name"] == "concentration"]
    assert check["status"] == "warned"
    assert "2013-05" in check["message"]


def test_sampling_is_the_same_in_any_order_and_with_other_sources(
    build: Any, crowded: Path, tmp_path: Path
) -> None:
    settings = {"tokenizer": TOKENIZER, "sampling": {"max_tokens": 3000, "spread": "none"}}
    first = build({"path": str(crowded)}, **settings)
    lines = crowded.read_bytes().splitlines()
    turned = tmp_path / "turned.jsonl"
    turned.write_bytes(b"\n".join(lines[::-1]))
    # The vocabulary is trained in the order of the stream; give both the same one.
    settings["tokenizer"] = str(first.tokenizer_dir)
    again = build({"path": str(crowded)}, output="again", **settings)
    other = build({"path": str(turned)}, output="turned", **settings)
    assert doc_ids(again) == doc_ids(other)


def test_a_larger_budget_holds_the_smaller_one_s_documents(build: Any, crowded: Path) -> None:
    first = build({"path": str(crowded)}, tokenizer=TOKENIZER)
    given_tokenizer = str(first.tokenizer_dir)
    chosen = [
        doc_ids(
            build(
                {"path": str(crowded)},
                tokenizer=given_tokenizer,
                sampling={"max_tokens": size},
                output=f"b{size}",
            )
        )
        for size in (2000, 4000, 8000)
    ]
    assert chosen[0] < chosen[1] < chosen[2]


def test_weights_share_the_budget_among_sources(
    build: Any, tmp_path: Path, write_jsonl: Callable[..., Path], prose: Callable[..., str]
) -> None:
    sources = []
    for number, name in enumerate(("a", "b")):
        rows = [
            {"text": prose(number * 10_000 + i), "date": f"2014-{1 + i % 12:02d}-01"}
            for i in range(300)
        ]
        sources.append({"name": name, "path": str(write_jsonl(tmp_path / f"{name}.jsonl", rows))})
    manifest = build(
        *sources,
        tokenizer=TOKENIZER,
        sampling={"max_tokens": 12_000, "weights": {"a": 0.75, "b": 0.25}},
    )
    tokens: Counter[str] = Counter()
    for row in manifest.data["histogram"]:
        tokens[row["source"]] += row["tokens"]
    assert tokens["a"] / sum(tokens.values()) == pytest.approx(0.75, abs=0.05)


def test_a_budget_that_cannot_be_filled_is_said(build: Any, crowded: Path) -> None:
    manifest = build({"path": str(crowded)}, tokenizer=TOKENIZER, sampling={"max_tokens": "1M"})
    (check,) = [c for c in manifest.checks if c["name"] == "token_budget"]
    assert check["status"] == "warned"
    assert manifest.num_documents == 495
