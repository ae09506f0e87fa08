"""datatrove blocks: the same bytes through an executor, and the rule as a filter."""

from __future__ import annotations

import hashlib
import pickle
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("datatrove")

from datatrove.data import Document

from headrace.corpus.blocks import AvailabilityFilter, DatatroveWorkers, FutureMentions, RunJobs
from headrace.corpus.config import config_from
from headrace.corpus.cutoff import AvailabilityRule
from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_build_through_an_executor_has_the_same_bytes(
    build: Callable[..., Any], tmp_path: Path, write_jsonl: Any, prose: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("headrace.corpus.sources.units.UNIT_BYTES", 10_000)
    rows = [{"id": i, "text": prose(i), "date": f"{2010 + i % 9}-03-01"} for i in range(200)]
    source = {"path": str(write_jsonl(tmp_path / "in.jsonl", rows))}
    tokenizer = {"train": "bpe", "vocab_size": 300}
    plain = build(source, tokenizer=tokenizer, output="plain")
    # One worker runs tasks in this process: what differs from a plain build is the executor.
    executor = {"type": "local", "tasks": 3, "options": {"workers": 1}}
    spread = build(source, tokenizer=tokenizer, output="spread", executor=executor)
    assert tree(spread.path) == tree(plain.path)
    assert list((tmp_path / "spread.work" / "logs").iterdir())


def test_pieces_that_no_task_made_are_an_error(tmp_path: Path) -> None:
    class Job:
        place = tmp_path / "never"

    pool = DatatroveWorkers(
        config_values(tmp_path), kind="local", tasks=2, options={"workers": 1}, logging_dir=tmp_path
    )
    with pytest.raises(HeadraceError, match="1 of 1 pieces were not made"):
        list(pool.each(lambda _: None, [Job()]))
    pool = DatatroveWorkers({}, kind="else", tasks=2, options={}, logging_dir=tmp_path)
    with pytest.raises(ConfigError, match="no executor"):
        list(pool.each(lambda _: None, [Job()]))


def config_values(tmp_path: Path) -> dict[str, Any]:
    source = {"name": "s", "type": "jsonl", "path": "x"}
    values = {"output_dir": str(tmp_path / "c"), "cutoff": "2016-12-31", "sources": [source]}
    return config_from(values).model_dump(mode="json")


def test_ranks_share_the_jobs_out(tmp_path: Path) -> None:
    done: list[int] = []
    block = RunJobs(config_values(tmp_path), done.append, list(range(10)))  # type: ignore[list-item]
    for rank in range(3):
        assert list(block.run(rank=rank, world_size=3)) == []
    assert sorted(done) == list(range(10))


def test_the_filter_dates_documents_and_names_reasons() -> None:
    block = AvailabilityFilter(
        AvailabilityRule(fields=("date",), upper_bound_fields=("crawled",)),
        "2016-12-31",
        today=date(2020, 1, 1),
    )
    block = pickle.loads(pickle.dumps(block))

    def judge(**metadata: Any) -> tuple[Any, dict[str, Any]]:
        doc = Document(text="t", id="1", metadata=metadata)
        return block.filter(doc), doc.metadata

    kept, metadata = judge(date="2016-12-31")
    assert kept is True
    assert metadata["available_at"] == "2016-12-31T23:59:59.999999Z"
    assert metadata["upper_bound"] is False
    assert judge(crawled="2016-01-01")[1]["upper_bound"] is True
    assert judge(date="2017-01-01")[0] == (False, "after_cutoff")
    assert judge(date="2021-01-01")[0] == (False, "future_date")
    assert judge()[0] == (False, "undated")
    # Also after it has dated something, a block can travel.
    assert pickle.loads(pickle.dumps(block)).cutoff == block.cutoff


def test_mentions_are_noted_and_every_document_goes_on() -> None:
    texts = [
        "The mill stood still for most of the year, as the ledger has it, and nobody came.",
        "The mill stood still for most of the year 2019, as the ledger has it, and nobody came.",
    ]
    block = FutureMentions("2016-12-31")
    out = list(block.run(iter([Document(text=text, id=str(i)) for i, text in enumerate(texts)])))
    assert [doc.metadata for doc in out] == [{}, {"future_mentions": {2: 1}}]
