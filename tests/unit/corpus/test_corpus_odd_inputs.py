"""Inputs as they come: records in records, keys given twice, ids of any type, raw pages."""

from __future__ import annotations

import gzip
import json
import zlib
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.corpus.build import build_corpus
from headrace.corpus.config import config_from, rule_for
from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.sources import read_part, split_file
from headrace.corpus.sources.context import ReadContext
from headrace.corpus.sources.rows import _name_of, dump_end
from headrace.corpus.sources.units import InputFile, Part, files_not_matched, list_files
from headrace.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "The board of the mill met again and kept long minutes of what it had heard of wheat."


def config_of(path: Path, kind: str, **keys: Any) -> Any:
    source = {"name": "s", "type": kind, "path": str(path), **keys}
    return config_from(
        {"output_dir": str(path.parent / "out"), "cutoff": "2017-06-30", "sources": [source]}
    )


def read(path: Path, kind: str, **keys: Any) -> list[Any]:
    """Everything one file of a source gives."""
    config = config_of(path, kind, **keys)
    source = config.sources[0]
    context = ReadContext.for_rule(rule_for(config, source), 1 << 20)
    file = InputFile(path=path, name=path.name, num_bytes=path.stat().st_size, sha256="")
    return [
        item
        for start, stop, _ in split_file(source, file)
        for item in read_part(source, Part(file=file, start=start, stop=stop), context)
    ]


def reasons(items: list[Any]) -> list[str]:
    return [item.reason if isinstance(item, Rejection) else "" for item in items]


def write_lines(path: Path, *rows: Any) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_date_that_is_given_twice_is_no_date(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        '{"text": "two dates", "date": "2019-01-01", "date": "2016-01-01"}',
        '{"text": "inside", "meta": {"date": "2019", "x": 1, "date": "2016"}, "date": "2016"}',
        '{"text": "the \\"date\\" it says", "meta": {"date": "2019"}, "date": "2016-01-01"}',
        '{"text": "first", "text": "last", "date": "2016-01-01"}',
    )
    items = read(path, "jsonl", available_at="date")
    assert reasons(items) == ["bad_json", "bad_json", "", ""]
    assert "twice" in items[0].detail
    assert items[2].values["date"] == "2016-01-01"


def test_fields_inside_records_have_dotted_names(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "doc": {"body": TEXT}, "meta": {"date": "2016-01-01", "url": "u"}},
        {"id": "b", "doc": TEXT, "meta": None},
        {"id": "c", "doc": {"body": TEXT}, "meta": {}},
        {"id": "d", "doc.body": TEXT, "meta.date": "2016-02-02"},
    ]
    keys = {"text_field": "doc.body", "available_at": "meta.date", "metadata_fields": ["meta.url"]}
    items = read(write_lines(tmp_path / "a.jsonl", *rows), "jsonl", **keys)
    assert reasons(items) == ["", "empty_text", "", ""]
    assert [item.values.get("meta.date") for item in (items[0], items[2], items[3])] == [
        "2016-01-01", None, "2016-02-02",
    ]  # fmt: skip
    assert items[0].metadata == {"meta.url": "u"}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([rows[0], {**rows[2], "doc": None}]), path)
    items = read(path, "parquet", **keys)
    assert reasons(items) == ["", "empty_text"]
    assert items[0].text == TEXT
    assert items[0].values["meta.date"] == "2016-01-01"
    assert reasons(read(path, "parquet", text_field="body.text")) == ["bad_record"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array([5.0, None, float("nan")]), ["5", None, None]),
        (pa.array([7, 2**63, None], pa.uint64()), ["7", str(2**63), None]),
        (pa.array([b"a1", b"\xff\x00", b""], pa.binary()), ["a1", "ff00", None]),
        (pa.array(["x", "", None]).dictionary_encode(), ["x", None, None]),
        (pa.array(["x", "", None], pa.string_view()), ["x", None, None]),
    ],
)
def test_ids_of_every_column_type(tmp_path: Path, ids: pa.Array, expected: list[Any]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": ids, "text": [TEXT] * len(ids)}), path)
    items = read(path, "parquet")
    assert [item.doc_id for item in items] == expected


def test_what_is_no_id_is_refused(tmp_path: Path) -> None:
    rows = [{"id": given, "text": TEXT} for given in (5.5, True, [1], {"a": 1})]
    assert set(reasons(read(write_lines(tmp_path / "a.jsonl", *rows), "jsonl"))) == {"bad_record"}
    given = UUID("12345678123456781234567812345678")
    assert _name_of(given) == "12345678-1234-5678-1234-567812345678"


@pytest.mark.parametrize(
    ("column", "form", "available"),
    [
        (pa.array([2016, None], pa.int32()), "%Y", "2016-12-31T23:59:59.999999"),
        (pa.array([2016.0, float("nan")]), "%Y", "2016-12-31T23:59:59.999999"),
        (pa.array([20160105, None]), "%Y%m%d", "2016-01-05T23:59:59.999999"),
        (pa.array([Decimal(2016), None]), "%Y", "2016-12-31T23:59:59.999999"),
        (pa.array([b"2016-01-05", None], pa.binary()), None, "2016-01-05T23:59:59.999999"),
        (pa.array(["2016/1/5", ""], pa.large_string()), None, "2016-01-05T23:59:59.999999"),
        (pa.array([date(2016, 1, 5), None], pa.date64()), None, "2016-01-05T23:59:59.999999"),
    ],
)
def test_dates_of_every_column_type(
    tmp_path: Path, column: pa.Array, form: str | None, available: str
) -> None:
    (tmp_path / "in").mkdir()
    table = pa.table({"text": [TEXT, TEXT + " Later."], "date": column})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    rule = {"field": "date", **({} if form is None else {"format": form})}
    config = config_of(tmp_path / "in", "parquet", available_at=rule, max_bad_share=0.5)
    manifest = build_corpus(config)
    assert manifest.data["sources"][0]["bad_reasons"] == {"undated": 1}
    documents = pq.read_table(next((manifest.path / "documents").iterdir()))
    assert documents["available_at"][0].as_py().isoformat() == f"{available}+00:00"


def test_bare_numbers_say_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", {"text": TEXT, "year": 2016})
    with pytest.raises(DataError, match="'%Y'"):
        build_corpus(config_of(tmp_path / "in", "jsonl", available_at="year", max_bad_share=1))


def test_a_byte_order_mark_inside_a_text_is_left_out(tmp_path: Path) -> None:
    (item,) = read(write_lines(tmp_path / "a.jsonl", {"text": "\ufeff" + TEXT}), "jsonl")
    assert item.text == TEXT


def test_usual_endings_in_either_case_are_read_and_other_files_told(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep" / "er").mkdir(parents=True)
    names = ["a.jsonl", "b.NDJSON", "deep/c.jl.gz", "deep/er/d.JSONL.GZ", "e.json"]
    for number, name in enumerate(names):
        line = json.dumps({"text": f"{TEXT} {number}", "date": "2016-01-05"}).encode()
        (folder / name).write_bytes(gzip.compress(line) if name.lower().endswith("gz") else line)
    (folder / "README.md").write_text("no data")
    (folder / "deep" / "f.csv").write_text("text,date\n")
    (folder / ".hidden").write_text("")
    config = config_of(folder, "jsonl", available_at="date")
    assert [name for name, _ in list_files(config.sources[0])] == names
    assert files_not_matched(config.sources[0]) == ["README.md", "deep/f.csv"]
    source = build_corpus(config).data["sources"][0]
    assert (source["files"], source["files_not_matched"]) == (5, 2)
    assert source["first_not_matched"] == ["README.md", "deep/f.csv"]
    given = config_of(folder, "jsonl", available_at="date", pattern="**/*.jsonl")
    assert [name for name, _ in list_files(given.sources[0])] == ["a.jsonl"]


def test_feather_files_are_read_and_caches_of_data_sets_are_not(tmp_path: Path) -> None:
    frame = pl.DataFrame({"id": ["p1", "p2"], "text": [TEXT, TEXT], "date": ["2016", "2017"]})
    frame.write_ipc(tmp_path / "data.arrow")
    frame.write_ipc(tmp_path / "cache-0123.arrow")
    source = config_of(tmp_path, "hf_dataset", available_at="date").sources[0]
    assert [name for name, _ in list_files(source)] == ["data.arrow"]
    items = read(tmp_path / "data.arrow", "hf_dataset", available_at="date")
    assert [(item.doc_id, item.position) for item in items] == [("p1", 1), ("p2", 2)]
    whole = (tmp_path / "data.arrow").read_bytes()
    (tmp_path / "data.arrow").write_bytes(whole[:-30])
    items = read(tmp_path / "data.arrow", "hf_dataset", available_at="date")
    assert reasons(items) == ["corrupt_file"]


def test_dumps_of_the_first_crawls_are_dated_by_their_years() -> None:
    assert dump_end("CC-MAIN-2009-2010") == date(2011, 2, 14)
    assert dump_end("CC-MAIN-2008-2009") == date(2010, 2, 14)
    assert dump_end("CC-MAIN-2012") == date(2013, 2, 14)
    assert dump_end("CC-MAIN-2013-99") is None
    assert dump_end("CC-MAIN-1012") is None


def test_names_with_brackets_in_changelogs(tmp_path: Path) -> None:
    path = tmp_path / "changelog.Debian"
    path.write_text(
        "mill (1.0) unstable; urgency=low\n\n  * Grind.\n\n"
        " -- A <the miller> B <a@b.example>  Mon, 04 Jan 2016 10:00:00 +0100\n"
    )
    (item,) = read(path, "debian_changelog")
    assert item.values == {"date": "Mon, 04 Jan 2016 10:00:00 +0100"}


def test_a_file_with_two_dates_in_the_index_has_none(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}.txt").write_text(f"{TEXT} {name}")
    index = tmp_path / "index.csv"
    index.write_bytes(
        b"\xef\xbb\xbffile,date\r\na.txt,2016-01-04\r\na.txt,2016-01-04\r\n"
        b"b.txt,2016-01-04\r\nb.txt,2019-01-01\r\n"
    )
    keys = {"index": str(index), "max_bad_share": 0.5}
    manifest = build_corpus(config_of(tmp_path / "in", "folder", **keys))
    assert manifest.data["sources"][0]["bad_reasons"] == {"unparseable_date": 1}


def response(body: bytes, *headers: bytes, longer: int = 0) -> bytes:
    head = b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Type: text/html; charset=utf-8", *headers])
    content = head + b"\r\n\r\n" + body
    length = str(len(content) + longer).encode()
    return (
        b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Date: 2016-01-04T10:00:00Z\r\n"
        b"Content-Length: " + length + b"\r\n\r\n" + content + b"\r\n\r\n"
    )


PAGE = b"<html><body><p>Wheat and rye</p></body></html>"
CHUNKS = b"10\r\n" + PAGE[:16] + b"\r\n1E;x=y\r\n" + PAGE[16:] + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (PAGE, []),
        (gzip.compress(PAGE), [b"Content-Encoding: gzip"]),
        (zlib.compress(PAGE), [b"content-encoding: DEFLATE"]),
        (CHUNKS, [b"Transfer-Encoding: chunked"]),
        (PAGE, [b"Transfer-Encoding: chunked"]),  # crawlers that keep the header alone
        (PAGE, [b"Content-Encoding: gzip"]),
        (
            b"%x\r\n" % len(gzip.compress(PAGE)) + gzip.compress(PAGE) + b"\r\n0\r\n\r\n",
            [b"Transfer-Encoding: chunked", b"Content-Encoding: gzip"],
        ),
    ],
)
def test_pages_kept_as_they_were_sent(tmp_path: Path, body: bytes, headers: list[bytes]) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(response(body, *headers))
    (item,) = read(path, "warc")
    assert isinstance(item, RawDocument), item
    assert item.text == "Wheat and rye"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (gzip.compress(PAGE)[:-12], [b"Content-Encoding: gzip"]),
        (b"\x1f\x8b" + PAGE, [b"Content-Encoding: gzip"]),
        (CHUNKS[:30], [b"Transfer-Encoding: chunked"]),
        (PAGE, [b"Content-Encoding: br"]),
    ],
)
def test_damaged_bodies_are_listed(tmp_path: Path, body: bytes, headers: list[bytes]) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(response(body, *headers) + response(PAGE))
    items = read(path, "warc")
    assert reasons(items) == ["bad_encoding", ""]


def test_a_record_that_reaches_into_the_next_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(response(PAGE) + response(PAGE, longer=40) + response(PAGE))
    assert reasons(read(path, "warc")) == ["", "corrupt_file"]
