"""A whole build: the account balances, bytes repeat, vintages hold, bad input is listed."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys
from datetime import date
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from headrace.corpus.build import build_corpus
from headrace.corpus.config import config_from, load_config
from headrace.corpus.document import REASONS
from headrace.corpus.files import sole_user
from headrace.corpus.manifest import Manifest
from headrace.errors import CapacityError, ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKENIZER = {"train": "bpe", "vocab_size": 300}


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rejected(manifest: Manifest) -> list[dict[str, Any]]:
    return pq.read_table(manifest.path / "rejected.parquet").to_pylist()


def ids(manifest: Manifest) -> list[str]:
    return pq.read_table(manifest.documents_dir).column("doc_id").to_pylist()


@pytest.fixture
def dated(tmp_path: Path, write_jsonl: Callable[..., Path], prose: Callable[..., str]) -> Path:
    """120 documents of 2010 to 2019, one a month, with repeats and edits."""
    rows = [
        {"id": f"d{i}", "text": prose(i), "date": f"{2010 + i // 12}-{1 + i % 12:02d}-15"}
        for i in range(120)
    ]
    rows += [{**rows[3], "id": "again", "date": "2018-01-01"}]
    rows += [{**rows[90], "id": "earlier", "date": "2012-01-01"}]
    edited = rows[30]["text"].replace("wheat", "oats", 1) + " Edited."
    rows += [{"id": "edited", "text": edited, "date": "2014-06-01"}]
    return write_jsonl(tmp_path / "in" / "dated.jsonl", rows)


def test_the_account_balances_and_names_every_record(build: Any, dated: Path) -> None:
    manifest = build({"path": str(dated)}, tokenizer=TOKENIZER)
    counts = manifest.counts
    assert counts["records"] == 123
    assert counts["after_cutoff"] == 36 + 1 - 0
    assert counts["near_duplicates"] == 1
    assert counts["documents"] == 123 - 37 - 1
    assert "earlier" in ids(manifest)
    listed = rejected(manifest)
    assert len(listed) == counts["records"] - counts["documents"]
    assert {row["reason"] for row in listed} == {"after_cutoff", "near_duplicate"}
    (near,) = [row for row in listed if row["reason"] == "near_duplicate"]
    assert near["doc_id"] == "edited"
    assert near["detail"].startswith("of s0:d30, similarity")
    (check,) = [c for c in manifest.checks if c["name"] == "near_duplicates"]
    # d90 of 2017 repeats "earlier" of 2012, and "again" of 2018 repeats d3 of 2010.
    assert check["counts"]["across"] == 2


def test_documents_and_tokens_agree_row_by_row(build: Any, dated: Path) -> None:
    manifest = build({"path": str(dated)}, tokenizer=TOKENIZER)
    documents = pq.read_table(manifest.documents_dir)
    tokens = pq.read_table(manifest.tokens_dir)
    assert documents.column("doc_id") == tokens.column("doc_id")
    assert documents.column("available_at") == tokens.column("available_at")
    assert pa.types.is_list(tokens.schema.field("input_ids").type)
    tokenizer = Tokenizer.from_file(str(manifest.tokenizer_dir / "tokenizer.json"))
    for text, row in zip(
        documents.column("text").to_pylist(), tokens.column("input_ids").to_pylist(), strict=True
    ):
        assert row[-1] == manifest.data["tokenizer"]["eos_token_id"]
        assert tokenizer.decode(row[:-1]) == text
    total = sum(map(len, tokens.column("input_ids").to_pylist()))
    assert total == manifest.num_tokens == sum(r["tokens"] for r in manifest.data["histogram"])


def test_the_same_inputs_give_the_same_bytes(build: Any, dated: Path, tmp_path: Path) -> None:
    build({"path": str(dated)}, tokenizer=TOKENIZER, output="a")
    build({"path": str(dated)}, tokenizer=TOKENIZER, output="b", num_workers=2)
    build({"path": str(dated)}, tokenizer=TOKENIZER, output="c", num_workers=3)
    build({"path": str(dated)}, tokenizer=TOKENIZER, output="a")  # in place, from its pieces
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c")
    manifest = (tmp_path / "a" / "manifest.json").read_text()
    assert str(tmp_path) not in manifest.replace(str(dated), "")


def test_a_script_without_a_guard_runs_once(tmp_path: Path, write_jsonl: Any, prose: Any) -> None:
    rows = [{"id": str(i), "text": prose(i), "available_at": "2016-01-01"} for i in range(60)]
    write_jsonl(tmp_path / "in.jsonl", rows)
    values = {
        "output_dir": str(tmp_path / "out"),
        "cutoff": "2016-12-31",
        "num_workers": 2,
        "sources": [{"name": "s", "type": "jsonl", "path": str(tmp_path / "in.jsonl")}],
    }
    script = tmp_path / "build.py"
    script.write_text(
        "from headrace.corpus.build import build_corpus\n"
        "from headrace.corpus.config import config_from\n"
        f"print(build_corpus(config_from({values!r})).num_documents)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "60\n", done.stderr


def test_boundaries_of_the_cutoff(build: Any, tmp_path: Path, write_jsonl: Any, prose: Any) -> None:
    instants = {
        "last": "2016-12-31T23:59:59.999999Z",
        "day": "2016-12-31",
        "late": "2017-01-01T00:00:00Z",
        "zone": "2016-12-31T20:00:00-05:00",
        "month": "2016-12",
        "year": "2016",
        "seoul": "2017-01-01T08:59:59+09:00",
    }
    rows = [
        {"id": name, "text": prose(i), "date": text}
        for i, (name, text) in enumerate(instants.items())
    ]
    manifest = build({"path": str(write_jsonl(tmp_path / "b.jsonl", rows))})
    assert set(ids(manifest)) == {"last", "day", "month", "year", "seoul"}
    assert manifest.num_tokens is None
    assert manifest.tokens_dir is None


def test_each_vintage_is_the_corpus_of_its_own_cutoff(build: Any, dated: Path) -> None:
    cutoffs = {"early": "2012-06-30", "mid": "2014-06-30", "late": "2017-03-01"}
    together = build({"path": str(dated)}, cutoffs=cutoffs, tokenizer=TOKENIZER)
    assert [v.data["cutoff_name"] for v in together.vintages] == ["early", "mid", "late"]
    vocabulary = str(together.vintages[0].tokenizer_dir)
    for vintage in together.vintages:
        given = vintage.data["cutoff_given"]
        alone = build(
            {"path": str(dated)}, cutoff=given, output=f"alone-{given}", tokenizer=vocabulary
        )
        assert set(ids(vintage)) == set(ids(alone))
        assert vintage.num_tokens == alone.num_tokens
        for key in ("documents", "after_cutoff", "near_duplicates", "exact_duplicates", "records"):
            assert vintage.counts[key] == alone.counts[key], key
        assert vintage.data["histogram"] == alone.data["histogram"]
    inodes = [
        {path.stat().st_ino for path in vintage.documents_dir.iterdir()}
        for vintage in together.vintages
    ]
    assert inodes[0] <= inodes[1] <= inodes[2]  # what vintages share is one file


def unit_folders(work: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (work / "units").iterdir()}


def test_adding_a_source_redoes_only_what_changed(
    build: Any, dated: Path, tmp_path: Path, write_jsonl: Any, prose: Any
) -> None:
    vocabulary = str(build({"path": str(dated)}, tokenizer=TOKENIZER, output="v").tokenizer_dir)
    build({"path": str(dated)}, tokenizer=vocabulary)
    work = tmp_path / "corpus.work"
    before = {
        kind: {path.name for path in (work / kind).iterdir()}
        for kind in ("units", "tokens", "shards")
    }
    inodes = unit_folders(work)
    rows = [{"id": i, "text": prose(5000 + i), "date": "2015-01-01"} for i in range(5)]
    second = write_jsonl(tmp_path / "second.jsonl", rows)
    both = build({"path": str(dated)}, {"path": str(second)}, tokenizer=vocabulary)
    assert both.num_documents == 85 + 5
    for kind, names in before.items():
        assert names < {path.name for path in (work / kind).iterdir()}, kind
    assert inodes.items() < unit_folders(work).items()
    fresh = build({"path": str(dated)}, {"path": str(second)}, tokenizer=vocabulary, output="fresh")
    assert tree(both.path) == tree(fresh.path)
    # What is no longer used is removed.
    build({"path": str(second)}, tokenizer=vocabulary)
    assert not unit_folders(work).keys() & inodes.keys()


def test_a_changed_file_is_read_again(build: Any, dated: Path) -> None:
    first = build({"path": str(dated)})
    lines = dated.read_bytes().splitlines()
    dated.write_bytes(b"\n".join(lines[:50]))
    assert build({"path": str(dated)}).num_documents == 50 < first.num_documents


BAD_LINES = [
    b'{"id": 1, "text": "half a line, "date',
    b'{"id": 2, "text": "caf\xe9 in latin-1", "date": "2015-01-01"}',
    b'{"id": 3, "text": "no date at all"}',
    b'{"id": 4, "text": "sometime", "date": "sometime"}',
    b'{"id": 5, "text": "ambiguous", "date": "03/04/2015"}',
    b'{"id": 6, "text": "old", "date": "1812-01-01"}',
    b'{"id": 7, "text": "from the future", "date": "2999-01-01"}',
    b'{"id": 8, "text": "   ", "date": "2015-01-01"}',
    (
        b'{"id": 9, "text": "collected too early", "date": "2015-01-01T00:00:00Z",'
        b' "collected_at": "2014-01-01T00:00:00Z"}'
    ),
    b'{"id": 10, "text": "\\ufffd\\ufffd\\ufffd\\ufffd damaged", "date": "2015-01-01"}',
    b'{"id": 11, "text": "%s", "date": "2015-01-01"}' % (b"x" * 5000),
    b'{"id": "d0", "text": "an id that was there, with another text", "date": "2015-01-01"}',
]
BAD_REASONS = [
    "bad_json", "bad_encoding", "undated", "unparseable_date", "ambiguous_date", "before_range",
    "future_date", "empty_text", "contradictory_times", "bad_encoding", "too_long", "duplicate_id",
]  # fmt: skip


def test_bad_input_is_skipped_counted_and_listed_with_its_position(
    build: Any, tmp_path: Path, write_jsonl: Any, prose: Any
) -> None:
    good = [{"id": f"d{i}", "text": prose(i), "date": "2014-01-01"} for i in range(30)]
    folder = tmp_path / "in"
    write_jsonl(folder / "a.jsonl", [*good[:20], *BAD_LINES, *good[20:]])
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 9)[:-12])
    source = {"path": str(folder)}
    with pytest.raises(DataError, match=r"records are bad .*limit 5\.0%") as caught:
        build(source, max_document_bytes=2000)
    assert "bad_json, first at a.jsonl, record 21" in str(caught.value)
    report = json.loads((tmp_path / "corpus.work" / "failed" / "report.json").read_text())
    assert report["sources"]["s0"]["reasons"]["undated"] >= 1
    assert not (tmp_path / "corpus").exists()

    manifest = build(source, max_document_bytes=2000, max_bad_share=1.0)
    assert sorted(ids(manifest)) == sorted(f"d{i}" for i in range(30))
    listed = rejected(manifest)
    in_file = [row for row in listed if row["file"] == "a.jsonl"]
    assert sorted((row["position"], row["reason"]) for row in in_file) == [
        (21 + i, reason) for i, reason in enumerate(BAD_REASONS)
    ]
    others = {(row["file"], row["reason"]) for row in listed if row["file"] != "a.jsonl"}
    assert others == {
        ("empty.jsonl", "empty_file"), ("cut.jsonl.gz", "truncated_file"),
        ("cut.jsonl.gz", "undated"),
    }  # fmt: skip
    assert manifest.counts["bad"] == len(listed)
    assert all(row["reason"] in REASONS for row in listed)
    assert not (tmp_path / "corpus.work" / "failed").exists()


def test_a_source_may_have_its_own_share_of_bad_records(
    build: Any, tmp_path: Path, write_jsonl: Any, prose: Any
) -> None:
    rows = [{"text": prose(i), "date": "2014-01-01"} for i in range(9)] + [b"{"]
    source = {"path": str(write_jsonl(tmp_path / "a.jsonl", rows)), "max_bad_share": 0.1}
    assert build(source).counts["bad"] == 1


def test_future_dates_are_told_from_dates_after_the_cutoff(
    tmp_path: Path, write_jsonl: Any, prose: Any
) -> None:
    rows = [
        {"text": prose(i), "date": day}
        for i, day in enumerate(["2015-01-01", "2018-01-01", "2018-03-05"])
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    values = {
        "output_dir": str(tmp_path / "c"), "cutoff": "2016-12-31", "max_bad_share": 1,
        "sources": [{"name": "s", "type": "jsonl", "path": str(path), "available_at": "date"}],
    }  # fmt: skip
    config = config_from(values)
    first = build_corpus(config, today=date(2018, 2, 1))
    assert [row["reason"] for row in rejected(first)] == ["after_cutoff", "future_date"]
    later = build_corpus(config, today=date(2018, 4, 1))
    assert [row["reason"] for row in rejected(later)] == ["after_cutoff", "after_cutoff"]


def test_positions_are_absolute_in_files_read_in_ranges(
    build: Any, tmp_path: Path, write_jsonl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.corpus.sources.units.UNIT_BYTES", 4000)
    rows: list[Any] = [
        {"id": i, "text": f"text {i} of its own kind {i * i}", "date": "2014-01-01"}
        for i in range(400)
    ]
    for number in (0, 123, 255, 399):
        rows[number] = b"{broken"
    source = {"path": str(write_jsonl(tmp_path / "a.jsonl", rows))}
    near = {"near_duplicates": {"enabled": False}}
    manifest = build(source, checks=near)
    assert len(list((tmp_path / "corpus.work" / "units").iterdir())) > 5
    assert [row["position"] for row in rejected(manifest)] == [1, 124, 256, 400]
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    offsets = [sum(map(len, lines[:n])) for n in (0, 123, 255, 399)]
    assert [row["byte"] for row in rejected(manifest)] == offsets
    assert manifest.num_documents == 396
    documents = pq.read_table(manifest.path / "documents").sort_by("position")
    assert documents["position"].to_pylist() == [
        number for number in range(1, 401) if number not in (1, 124, 256, 400)
    ]
    assert documents["doc_id"].to_pylist()[:2] == ["1", "2"]


def test_many_duplicates_are_listed_with_what_they_repeat(
    build: Any, tmp_path: Path, write_jsonl: Any, prose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.corpus.sources.units.UNIT_BYTES", 4000)
    monkeypatch.setattr("headrace.corpus.rejections._OPEN_UNITS", 2)
    texts = [prose(number % 40) for number in range(200)]
    rows = [{"id": f"r{i}", "text": text, "date": "2014-01-01"} for i, text in enumerate(texts)]
    rows += [{"id": "r3", "text": prose(900), "date": "2014-01-02"}]
    rows += [{"id": "late", "text": texts[0], "date": "2031-01-01"}]
    source = {"path": str(write_jsonl(tmp_path / "a.jsonl", rows)), "max_bad_share": 0.1}
    manifest = build(source)
    assert len(list((tmp_path / "corpus.work" / "units").iterdir())) > 5
    listed = {row["position"]: row for row in rejected(manifest)}
    for number in range(40, 200):
        row = listed[number + 1]
        assert row["reason"] == "exact_duplicate"
        assert (row["doc_id"], row["detail"]) == (f"r{number}", f"of s0:r{number % 40}")
    assert listed[201]["reason"] == "duplicate_id"
    assert listed[201]["detail"] == "of s0:r3"
    assert listed[202]["reason"] in {"after_cutoff", "future_date"}
    assert len(listed) == 162


def test_the_cutoff_before_every_document_is_an_error(build: Any, dated: Path) -> None:
    with pytest.raises(DataError, match="before every document; the earliest is available at 2010"):
        build({"path": str(dated)}, cutoff="2009-12-31")


def test_an_empty_corpus_is_an_error(build: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        build({"path": str(path)}, max_bad_share=1.0)


def test_documents_that_no_filter_keeps_are_an_error(build: Any, dated: Path) -> None:
    with pytest.raises(DataError, match="corpus is empty"):
        build({"path": str(dated)}, checks={"length": {"max_chars": 3}})


def test_a_check_that_fails_leaves_no_corpus_and_a_report(
    build: Any, tmp_path: Path, write_jsonl: Any, prose: Any
) -> None:
    rows = [
        {"id": i, "text": prose(i) + " In 2019 it was all over, they wrote.", "date": "2014-01-01"}
        for i in range(20)
    ]
    source = {"path": str(write_jsonl(tmp_path / "a.jsonl", rows))}
    checks = {"future_mentions": {"action": "fail", "max_share": 0.1}}
    with pytest.raises(DataError, match=r"future_mentions is 1, limit 0\.1"):
        build(source, checks=checks)
    assert not (tmp_path / "corpus").exists()
    failed = json.loads((tmp_path / "corpus.work" / "failed" / "checks.json").read_text())
    (check,) = [c for c in failed["2016-12-31"] if c["name"] == "future_mentions"]
    assert check["status"] == "failed"
    assert check["counts"]["years"] == {"2019": 20}
    assert "In 2019 it was" in check["examples"][0]["snippet"]
    warned = build(source, checks={"future_mentions": {"action": "warn", "max_share": 0.1}})
    assert [c["status"] for c in warned.checks if c["name"] == "future_mentions"] == ["warned"]


def test_a_failed_build_leaves_the_old_corpus_as_it_was(build: Any, dated: Path) -> None:
    first = build({"path": str(dated)})
    before = tree(first.path)
    dated.write_bytes(dated.read_bytes() + b"{broken\n" * 100)
    with pytest.raises(DataError, match="bad_json"):
        build({"path": str(dated)})
    assert tree(first.path) == before


def test_filters_count_what_they_take_out(
    build: Any, tmp_path: Path, write_jsonl: Any, prose: Any
) -> None:
    texts = [
        prose(0),
        "short",
        prose(1) * 40,
        "Der Preis des Weizens und der Preis des Roggens " * 9,
    ]
    texts.append("\n".join(["Log in", "Subscribe to the newsletter", "Site map"] * 30))
    rows = [{"id": i, "text": text, "date": "2014-01-01"} for i, text in enumerate(texts)]
    manifest = build(
        {"path": str(write_jsonl(tmp_path / "a.jsonl", rows))},
        checks={
            "length": {"min_chars": 20, "max_chars": 5000},
            "languages": {"keep": ["en", "und"]},
            "boilerplate": {"max_document_share": 0.5},
        },
    )
    assert ids(manifest) == ["0"]
    assert manifest.counts["filtered"] == {
        "too_short": 1, "over_length": 1, "language": 1, "boilerplate": 1,
    }  # fmt: skip


def test_crawl_times_are_flagged(build: Any, tmp_path: Path, write_jsonl: Any, prose: Any) -> None:
    rows = [
        {"text": prose(i), "date": "2013-05-18T10:00:00Z", "dump": "CC-MAIN-2013-20", "id": str(i)}
        for i in range(4)
    ]
    rows.append({"text": prose(9), "dump": "CC-MAIN-2013-20", "id": "bounded"})
    rows.append({"text": prose(10), "date": "2015-05-18T10:00:00Z", "dump": "CC-MAIN-2013-20"})
    path = write_jsonl(tmp_path / "f.jsonl", rows)
    manifest = build({"type": "fineweb", "path": str(path), "available_at": {}}, max_bad_share=0.5)
    assert manifest.counts["upper_bound"] == manifest.num_documents == 5
    table = pq.read_table(manifest.documents_dir)
    assert table.column("upper_bound").to_pylist() == [True] * 5
    # A fetch two years after its own crawl's end: the clock of one of them is wrong.
    assert [row["reason"] for row in rejected(manifest)] == ["contradictory_times"]


def test_revisions_are_documents_of_their_own(
    build: Any, tmp_path: Path, write_jsonl: Any, prose: Any
) -> None:
    rows = [
        {"id": "f1", "text": prose(1), "date": "2014-01-01", "filing": "a"},
        {"id": "f2", "text": prose(2), "date": "2014-03-01", "filing": "a"},
        {"id": "f3", "text": prose(3), "date": "2014-01-01", "filing": "b"},
    ]
    source = {
        "path": str(write_jsonl(tmp_path / "a.jsonl", rows)),
        "revision_field": "filing",
    }
    manifest = build(source)
    assert manifest.num_documents == 3
    (check,) = [c for c in manifest.checks if c["name"] == "revisions"]
    assert check["counts"] == {"later_versions": 1, "revised": 1}
    assert check["examples"] == [{"doc_id": "s0:f2", "first": "s0:f1"}]


def test_settings_are_refused_before_any_work(build: Any, dated: Path, tmp_path: Path) -> None:
    source = {"path": str(dated)}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cutof": "2016"}, "unknown key 'cutof'; did you mean 'cutoff'"),
        ({"checks": {"future_mention": {}}}, "did you mean 'future_mentions'"),
        ({"tokenizer": str(tmp_path)}, "no tokenizer.json"),
        ({"sampling": {"max_tokens": 5}}, "needs a tokenizer"),
        ({"cutoffs": {"a/b": "2016"}}, "cannot name a folder"),
        ({"cutoffs": ["2016-12-31", "2016-12"]}, "the same instant"),
        ({"checks": {"near_duplicates": {"num_bands": 9}}}, "does not divide"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message.replace("'", ".")):
            build(source, **settings)
    with pytest.raises(ConfigError, match=r"available_at\.feild.*fields"):
        build({**source, "available_at": {"feild": "x"}})
    with pytest.raises(ConfigError, match="no type 'jsnl'; did you mean 'jsonl'"):
        build({**source, "type": "jsnl"})
    with pytest.raises(ConfigError, match="after needs a calendar"):
        build({**source, "available_at": {"field": "date", "after": "17:30"}})
    with pytest.raises(ConfigError, match="english: not among"):
        build(source, checks={"languages": {"keep": ["english"]}})
    with pytest.raises(ConfigError, match="names must differ"):
        build({**source, "name": "x"}, {**source, "name": "x"})


def test_what_a_base_model_and_a_tokenizer_know_is_weighed_against_each_cutoff(
    build: Any, dated: Path
) -> None:
    def statuses(manifest: Manifest, name: str) -> list[str]:
        return [
            next(check["status"] for check in vintage.checks if check["name"] == name)
            for vintage in manifest.vintages
        ]

    cutoffs = {"a": "2014-12-31", "b": "2016-12-31"}
    source = {"path": str(dated)}
    plain = build(source, cutoffs=cutoffs, tokenizer=TOKENIZER)
    assert statuses(plain, "base_model_vintage") == ["noted", "noted"]
    assert statuses(plain, "tokenizer_vintage") == ["noted", "noted"]
    given = {"path": str(plain.path / "a" / "tokenizer"), "knowledge_cutoff": 2015}
    known = build(
        source,
        cutoffs=cutoffs,
        tokenizer=given,
        base_model={"name": "mill-1B", "knowledge_cutoff": "2016-12-31"},
    )
    assert statuses(known, "base_model_vintage") == ["warned", "passed"]
    assert statuses(known, "tokenizer_vintage") == ["warned", "passed"]
    check = next(c for c in known.vintages[0].checks if c["name"] == "base_model_vintage")
    assert "cannot take out what it knows; known to 2016-12-31, 731 days after" in check["message"]
    with pytest.raises(ConfigError, match="trained here"):
        build(source, tokenizer={**TOKENIZER, "knowledge_cutoff": 2015})


def test_a_bare_year_is_a_year_and_no_timestamp(build: Any, dated: Path) -> None:
    manifest = build({"path": str(dated), "not_before": 2011}, cutoff=2012, max_bad_share=1)
    assert manifest.cutoff == "2012-12-31T23:59:59.999999Z"
    assert manifest.data["histogram"][0]["month"] == "2011-01"
    several = build({"path": str(dated)}, cutoffs=[2011, 2012], output="several")
    assert [v.data["cutoff_given"] for v in several.vintages] == ["2011", "2012"]


def test_a_build_does_not_read_what_it_writes(
    build: Any, tmp_path: Path, write_jsonl: Any, prose: Any
) -> None:
    rows = [{"id": i, "text": prose(i), "date": "2014-01-01"} for i in range(5)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    source = {"path": str(tmp_path), "pattern": "**/*"}
    first = tree(build(source).path)
    assert tree(build(source).path) == first


def test_file_names_that_are_no_text_are_escaped(
    build: Any, tmp_path: Path, write_jsonl: Any, prose: Any
) -> None:
    rows = [{"text": prose(i), "date": "2014-01-01"} for i in range(3)]
    path = write_jsonl(tmp_path / "in" / "a.jsonl", [*rows, b"{"])
    path.rename(os.fsdecode(os.fsencode(path.parent) + b"/caf\xe9.jsonl"))
    manifest = build({"path": str(tmp_path / "in")}, max_bad_share=1)
    assert rejected(manifest)[0]["file"] == "caf\\xe9.jsonl"


def test_only_a_corpus_is_replaced(build: Any, dated: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not a corpus"):
        build({"path": str(dated)})
    assert (tmp_path / "corpus" / "thesis.txt").exists()


def test_two_builds_do_not_share_their_work(build: Any, dated: Path, tmp_path: Path) -> None:
    with sole_user(tmp_path / "corpus.work"), pytest.raises(ConfigError, match="another build"):
        build({"path": str(dated)})


def test_a_full_disk_is_said_and_what_was_done_is_kept(
    build: Any, dated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("headrace.corpus.publish.link_or_copy", full)
        with pytest.raises(CapacityError, match="disk is full"):
            build({"path": str(dated)})
    assert not (tmp_path / "corpus").exists()
    inodes = unit_folders(tmp_path / "corpus.work")
    build({"path": str(dated)})
    assert unit_folders(tmp_path / "corpus.work") == inodes


def test_an_executor_without_its_package_says_what_to_install(tmp_path: Path, dated: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['datatrove'] = None\n"
        "from headrace.corpus.build import build_corpus\n"
        "from headrace.corpus.config import config_from\n"
        "from headrace.errors import ConfigError\n"
        "source = {'name': 's', 'type': 'jsonl', 'path': sys.argv[1], 'available_at': 'date'}\n"
        "config = config_from({'output_dir': sys.argv[2], 'cutoff': '2016', 'sources': [source],\n"
        "                      'executor': {'type': 'local', 'tasks': 2}})\n"
        "try:\n"
        "    build_corpus(config)\n"
        "except ConfigError as error:\n"
        "    assert 'headrace[scale]' in str(error)\n"
        "else:\n"
        "    raise SystemExit('nothing was said')\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(dated), str(tmp_path / "c")],
        check=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_overrides_reach_into_lists_and_models(tmp_path: Path, dated: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"output_dir: {tmp_path}/c\ncutoff: 2016-12-31\nsources:\n"
        f"  - {{name: a, type: jsonl, path: nowhere, available_at: date}}\n"
    )
    words = [f"sources.0.path={dated}", "checks.length.min_chars=7", "cutoff=2015-01-01"]
    config = load_config(path, words)
    assert config.sources[0].path == (str(dated),)
    assert config.checks.length.min_chars == 7
    assert config.vintages()[0].given == "2015-01-01"
    for word, message in (
        ("cutoff", "not key=value"),
        ("sources.9.path=x", "not an index"),
        ("cutoff.x=1", "holds a value"),
        ("tokenizer.trian=bpe", "did you mean 'train'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(path, [word])
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path / "none.yaml")
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(path)


def test_manifests_of_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no corpus"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "else"}')
    with pytest.raises(DataError, match="not a corpus manifest"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "headrace-corpus", "version": 99}')
    with pytest.raises(DataError, match="version 99"):
        Manifest.load(tmp_path)


def test_progress_reaches_the_end_of_every_stage(tmp_path: Path, dated: Path) -> None:
    seen = {}
    values = {
        "output_dir": str(tmp_path / "c"), "cutoff": "2016-12-31", "tokenizer": TOKENIZER,
        "sources": [{"name": "s", "type": "jsonl", "path": str(dated), "available_at": "date"}],
    }  # fmt: skip
    build_corpus(config_from(values), progress=lambda p: seen.update({p.stage: p}))
    assert list(seen) == ["documents", "duplicates", "tokens", "shards"]
    assert all(progress.done == progress.total for progress in seen.values())
