"""Every source type reads what it promises, and names the position of what it cannot read."""

from __future__ import annotations

import gzip
import json
import mailbox
import random
import re
from datetime import UTC, date, datetime
from email.message import EmailMessage
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.corpus.config import config_from, rule_for
from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.sources import read_part, split_file, tables
from headrace.corpus.sources.context import ReadContext
from headrace.corpus.sources.folder import date_from_path
from headrace.corpus.sources.rows import dump_end
from headrace.corpus.sources.spool import spool
from headrace.corpus.sources.units import (
    InputFile,
    Part,
    glob_expression,
    list_files,
    plan_units,
)
from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path


def read(path: Path, kind: str, *, max_bytes: int = 1 << 20, **keys: Any) -> list[Any]:
    """Everything one file of a source gives."""
    values = {
        "output_dir": "unused",
        "cutoff": "2016-12-31",
        "sources": [{"name": "s", "type": kind, "path": str(path), **keys}],
    }
    config = config_from(values)
    source = config.sources[0]
    context = ReadContext.for_rule(rule_for(config, source), max_bytes)
    size = path.stat().st_size
    file = InputFile(path=path, name=path.name, num_bytes=size, sha256="")
    return [
        item
        for start, stop, _ in split_file(source, file)
        for item in read_part(source, Part(file=file, start=start, stop=stop), context)
    ]


def reasons(items: list[Any]) -> list[tuple[str, int | None]]:
    return [(item.reason, item.position) for item in items if isinstance(item, Rejection)]


def documents(items: list[Any]) -> list[RawDocument]:
    return [item for item in items if isinstance(item, RawDocument)]


def test_bad_json_lines_are_listed_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'\xef\xbb\xbf{"text": "with a BOM", "id": 1}',
        b'{"text": "half a li',
        b"",
        b'{"text": "caf\xe9"}',
        b'["a list"]',
        b'{"id": "no text"}',
        b'{"text": 7}',
        b'{"text": "' + b"x" * 3000 + b'"}',
        b'{"text": "\\ud800 lone"}',
        b'{"text": "crlf"}\r',
        b'{"text": "bad id", "id": [1]}',
        b'{"text": "the last, without an end"}',
    ]
    path.write_bytes(b"\n".join(lines))
    items = read(path, "jsonl", max_bytes=2000)
    assert [item.text for item in documents(items)] == [
        "with a BOM", "crlf", "the last, without an end",
    ]  # fmt: skip
    assert documents(items)[0].doc_id == "1"
    assert reasons(items) == [
        ("bad_json", 2), ("bad_encoding", 4), ("bad_json", 5), ("empty_text", 6),
        ("bad_record", 7), ("too_long", 8), ("bad_json", 9), ("bad_record", 11),
    ]  # fmt: skip
    offsets = [item.byte for item in items]
    starts = [sum(len(line) + 1 for line in lines[:i]) for i in range(len(lines))]
    assert offsets == [start for i, start in enumerate(starts) if i != 2]


def test_declared_encodings_are_tried_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "caf\xe9"}\n{"text": "caf\xc3\xa9"}\n')
    items = read(path, "jsonl", encodings=["utf-8", "cp1252"])
    assert [item.text for item in items] == ["café", "café"]
    with pytest.raises(ConfigError, match="utf-16"):
        read(path, "jsonl", encodings="utf-16")


def test_utf16_files_are_named_and_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for data in ('{"text": "x"}\n'.encode("utf-16"), '{"text": "x"}'.encode("utf-16-le")):
        for content in (data, gzip.compress(data)):
            path.write_bytes(content)
            assert [item.reason for item in read(path, "jsonl")] == ["bad_encoding"]


def test_archives_and_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for head, word in ((b"PK\x03\x04", "zip"), (b"PAR1", "parquet")):
        path.write_bytes(head + b"\n\0x\n" * 50)
        (only,) = read(path, "jsonl")
        assert only.reason == "corrupt_file"
        assert word in only.detail.lower()


@pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b"")])
def test_empty_files_are_listed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert [item.reason for item in read(path, "jsonl")] == ["empty_file"]


def test_a_truncated_gzip_keeps_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    rows = b"".join(b'{"text": "row %d", "id": %d}\n' % (i, i * i) for i in range(5000))
    path.write_bytes(gzip.compress(rows)[:-3000])
    items = read(path, "jsonl")
    kept = documents(items)
    assert kept
    assert [item.text for item in kept] == [f"row {i}" for i in range(len(kept))]
    assert items[-1].reason == "truncated_file"
    assert items[-1].byte is not None


def test_parquet_dates_keep_their_precision(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    moment = datetime(2016, 5, 4, 12, tzinfo=UTC)
    table = pa.table(
        {
            "text": ["a", "b", None],
            "day": pa.array([date(2016, 5, 4), None, date(2016, 5, 5)]),
            "at": pa.array([moment, moment, None], pa.timestamp("ns", "UTC")),
            "naive": pa.array([moment.replace(tzinfo=None)] * 3, pa.timestamp("ms")),
        }
    )
    pq.write_table(table, path)
    items = read(path, "parquet", available_at={"fields": ["day", "at", "naive"]})
    first = documents(items)[0].values
    assert first["day"] == date(2016, 5, 4)
    assert first["at"] == moment
    assert first["naive"] == moment.replace(tzinfo=None)
    assert reasons(items) == [("empty_text", 3)]


def test_parquet_instants_out_of_range_do_not_stop_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    days = pa.array([10**9, 17000], pa.int32()).cast(pa.date32())
    stamps = pa.array([2**62, 0], pa.int64()).cast(pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["far", "near"], "day": days, "at": stamps}), path)
    items = read(path, "parquet", available_at={"fields": ["day", "at"]})
    assert [item.text for item in items] == ["far", "near"]
    assert isinstance(items[0].values["day"], str)


def test_damaged_and_foreign_parquet_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a" * 100] * 100}), path)
    path.write_bytes(path.read_bytes()[:-30])
    assert [item.reason for item in read(path, "parquet")] == ["corrupt_file"]
    pq.write_table(pa.table({"body": ["a"]}), path)
    (only,) = read(path, "parquet")
    assert only.reason == "bad_record"
    assert "body" in only.detail


def test_parquet_strings_that_are_not_utf8_are_listed_by_row(tmp_path: Path) -> None:
    data = pa.array([b"good", b"\xff\xfe", b"also good"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, data.buffers())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": text}), path)
    items = read(path, "parquet")
    assert [item.text for item in documents(items)] == ["good", "also good"]
    assert reasons(items) == [("bad_encoding", 2)]


def test_a_damaged_row_group_is_counted_row_by_row_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rng = random.Random(0)
    texts = ["".join(rng.choice("abcdefgh ") for _ in range(200)) for _ in range(30)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=10, compression="zstd")
    column = pq.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start + 60 : start + 120] = bytes(60)
    path.write_bytes(data)
    items = read(path, "parquet")
    assert reasons(items) == [("corrupt_file", position) for position in range(11, 21)]
    assert [item.text for item in documents(items)] == texts[:10] + texts[20:]


def test_parquet_text_without_its_note_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [b"caf\xc3\xa9", b"caf\xe9", None]}), path)
    items = read(path, "parquet")
    assert [item.text for item in documents(items)] == ["café"]
    assert reasons(items) == [("bad_encoding", 2), ("empty_text", 3)]
    assert len(documents(read(path, "parquet", encodings=["utf-8", "cp1252"]))) == 2


def test_wide_rows_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    sizes = []
    whole = tables._columns

    def measured(batches: Any) -> Any:
        for num_rows, columns in whole(batches):
            sizes.append(num_rows)
            yield num_rows, columns

    monkeypatch.setattr(tables, "_columns", measured)
    pq.write_table(
        pa.table(
            {"text": ["".join(random.Random(i).choices("abcd", k=200_000)) for i in range(40)]}
        ),
        path,
        use_dictionary=False,
    )
    assert len(documents(read(path, "parquet"))) == 40
    assert max(sizes) * 200_000 <= 8 << 20


def test_saved_datasets_are_read_from_their_arrow_files(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    path = folder / "data-00000-of-00001.arrow"
    table = pa.table({"text": ["a", "b"], "available_at": ["2016-01-01", "2016-01-02"]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert [item.text for item in read(path, "hf_dataset")] == ["a", "b"]
    path.write_bytes(path.read_bytes()[:200])
    assert [item.reason for item in read(path, "hf_dataset")] == ["corrupt_file"]


def test_fineweb_dumps_bound_a_missing_date(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "a", "dump": "CC-MAIN-2013-20", "date": "2013-05-18T10:00:00Z"}]
    rows.append({"text": "b", "dump": "CC-MAIN-2013-20"})
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read(path, "fineweb")
    assert first.values["date"] == "2013-05-18T10:00:00Z"
    assert second.values["dump_end"] == date(2013, 5, 19).replace(month=7, day=3)
    assert dump_end("CC-MAIN-2013-99") is None
    assert dump_end("elsewhere") is None


CHANGELOG = b"""mill (1.2-1) unstable; urgency=low

  * Grind finer.
  * Text of K\xf6ln.

 -- A Miller <a@mill.example>  Mon, 05 Feb 2007 01:12:01 -0500

mill (1.1-1) unstable; urgency=low

  * No trailer follows.

mill (1.0-1) stable testing; urgency=high

  * First.

 -- A Miller <a@mill.example>  Sun, 04 Feb 2007 01:12:01 +0000

Old text that belongs to no entry
and goes on.

# a comment
"""


def test_changelog_entries_and_what_stands_between(tmp_path: Path) -> None:
    path = tmp_path / "changelog.gz"
    path.write_bytes(gzip.compress(CHANGELOG))
    items = read(path, "debian_changelog")
    first, second = documents(items)
    assert first.doc_id == "mill_1.2-1"
    assert "Köln" in first.text
    assert "a@mill.example" not in first.text
    assert first.values["date"] == "Mon, 05 Feb 2007 01:12:01 -0500"
    assert second.doc_id == "mill_1.0-1"
    assert reasons(items) == [("bad_record", 2), ("bad_record", 4)]


EDGAR = """<SEC-DOCUMENT>0000000001-17-000009.txt : 20170802
<SEC-HEADER>0000000001-17-000009.hdr.sgml : 20170802
<ACCEPTANCE-DATETIME>20170802183622
ACCESSION NUMBER:		0000000001-17-000009
CONFORMED SUBMISSION TYPE:	10-Q/A
CONFORMED PERIOD OF REPORT:	20170701
FILER:
	COMPANY DATA:
		COMPANY CONFORMED NAME:			MILL & CO
		CENTRAL INDEX KEY:			0000000001
</SEC-HEADER>
<DOCUMENT>
<TYPE>10-Q/A
<FILENAME>q.htm
<TEXT>
<html><head><title>x</title><style>p{}</style></head><body><p>Wheat &amp; rye</p>
<table><tr><td>Price</td><td>7</td></tr></table></body></html>
</TEXT>
</DOCUMENT>
<DOCUMENT>
<TYPE>EX-31
<TEXT>
I certify.
</TEXT>
</DOCUMENT>
<DOCUMENT>
<TYPE>GRAPHIC
<TEXT>
begin 644 x.jpg
</TEXT>
</DOCUMENT>
</SEC-DOCUMENT>
"""


def test_edgar_submissions(tmp_path: Path) -> None:
    path = tmp_path / "0000000001-17-000009.txt"
    path.write_text(EDGAR)
    (main,) = read(path, "edgar")
    assert main.text == "Wheat & rye\nPrice 7"
    assert main.doc_id == "0000000001-17-000009"
    assert main.values["acceptance_datetime"] == "20170802183622"
    assert main.revision_key == "0000000001/10-Q/20170701"
    both = read(path, "edgar", documents="all")
    assert [item.text for item in both] == ["Wheat & rye\nPrice 7", "I certify."]
    assert read(path, "edgar", forms=["8-K"])[0].reason == "empty_file"
    assert documents(read(path, "edgar", forms=["10-Q"]))
    path.write_text(EDGAR[: EDGAR.index("</table>")])
    assert [item.reason for item in read(path, "edgar")] == ["truncated_file"]
    path.write_text("no header\n")
    assert [item.reason for item in read(path, "edgar")] == ["bad_record"]


def test_edgar_feed_files_with_tagged_headers(tmp_path: Path) -> None:
    path = tmp_path / "0000000001-17-000009.nc"
    path.write_text(
        "<SUBMISSION>\n<ACCESSION-NUMBER>0000000001-17-000009\n<TYPE>10-Q\n<PERIOD>20170701\n"
        "<ACCEPTANCE-DATETIME>20170802183622\n<FILER>\n<CONFORMED-NAME>MILL INC\n"
        "<CIK>0000000001\n</FILER>\n<DOCUMENT>\n<TYPE>10-Q\n<TEXT>\nWheat.\n</TEXT>\n"
        "</DOCUMENT>\n</SUBMISSION>\n"
    )
    (main,) = read(path, "edgar")
    assert main.text == "Wheat."
    assert main.values["acceptance_datetime"] == "20170802183622"
    assert main.revision_key == "0000000001/10-Q/20170701"


def test_mailboxes(tmp_path: Path) -> None:
    path = tmp_path / "list.mbox"
    box = mailbox.mbox(str(path))
    for number in range(2):
        message = EmailMessage()
        message["Subject"] = f"Number {number} über"
        message["Date"] = f"Mon, 0{number + 1} May 2006 10:00:00 +0000"
        message["Message-ID"] = f"<{number}@mill.example>"
        message["Received"] = "from a by b; Tue, 02 May 2006 10:00:05 +0200"
        message.set_content("Hello\n\nFrom here on, text.\n")
        if number:
            message.add_alternative("<p>Hello</p>", subtype="html")
        box.add(message)
    box.flush()
    box.close()
    first, second = read(path, "mbox")
    assert first.text == "Number 0 über\n\nHello\n\nFrom here on, text."
    assert second.text.startswith("Number 1 über\n\nHello")
    assert "<p>" not in second.text
    assert first.doc_id == "0@mill.example"
    assert first.values["received"] == "Tue, 02 May 2006 10:00:05 +0200"


def test_single_messages_and_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "one.eml"
    path.write_bytes(b"Subject: s\nDate: Mon, 01 May 2006 10:00:00 +0000\n\nbody caf\xe9\n")
    (only,) = read(path, "mbox")
    assert only.text == "s\n\nbody café"
    path.write_bytes(b"\x00\x01 nothing like mail")
    assert [item.reason for item in read(path, "mbox")] == ["bad_record"]


def warc_record(kind: str, body: bytes, **headers: str) -> bytes:
    lines = [f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Length: {len(body)}\r\n"]
    lines += [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    return "".join(lines).encode() + b"\r\n" + body + b"\r\n\r\n"


def test_warc_responses(tmp_path: Path) -> None:
    page = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=latin-1\r\n\r\n"
        b"<html><head><title>T\xf6</title></head><body><p>caf\xe9</p></body></html>"
    )
    image = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\nPNG"
    data = warc_record("warcinfo", b"info") + warc_record(
        "response", page, WARC_Date="2016-08-26T10:00:00Z",
        WARC_Target_URI="https://mill.example/a", WARC_Record_ID="<urn:1>",
    )  # fmt: skip
    data += warc_record("response", image)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(gzip.compress(data))
    (only,) = read(path, "warc")
    assert only.text == "café"
    assert only.values == {"warc_date": "2016-08-26T10:00:00Z"}
    assert only.metadata == {"url": "https://mill.example/a", "title": "Tö"}
    path.write_bytes(gzip.compress(data[:-20]))
    assert read(path, "warc")[-1].reason == "truncated_file"
    path.write_bytes(gzip.compress(data + b"junk\r\n"))
    assert read(path, "warc")[-1].reason == "corrupt_file"


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)", "a/2016-05-04.txt", "2016-05-04"),
        (r"(?P<year>\d{4})/(?P<month>[a-z]+)/(?P<day>\d+)", "2016/may/4/x.txt", "2016-05-04"),
        (r"(?P<year>\d{4})_(?P<month>\d+)", "2016_5.txt", "2016-05"),
        (r"(?P<year>\d{4})-", "1819-Monroe-1.txt", "1819"),
        (r"(?P<year>\d{4})-", "undated.txt", None),
    ],
)
def test_dates_in_paths(pattern: str, name: str, expected: str | None) -> None:
    assert date_from_path(re.compile(pattern), name) == expected


def test_folders_by_path_by_table_and_by_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "1819-Monroe-1.txt"
    path.write_bytes(b"\xef\xbb\xbfOne.\n\n\nTwo,\ntwo.\n")
    index = tmp_path / "index.csv"
    index.write_text("fileid,when\n1819-Monroe-1,1819-12-07\n")
    (whole,) = read(path, "folder", date_pattern=r"(?P<year>\d{4})-")
    assert whole.text == "One.\n\n\nTwo,\ntwo."
    assert whole.values == {"date": "1819"}
    table = {"index": str(index), "index_file_field": "fileid", "index_date_field": "when"}
    items = read(path, "folder", split_paragraphs=True, **table)
    assert [item.text for item in items] == ["One.", "Two,\ntwo."]
    assert items[1].values == {"date": "1819-12-07"}
    assert [item.byte for item in items] == [0, 10]
    with pytest.raises(ConfigError, match="when"):
        read(path, "folder", index=str(index), index_file_field="fileid")
    with pytest.raises(ConfigError, match="year"):
        read(path, "folder", date_pattern=r"\d{4}")


def test_globs() -> None:
    assert glob_expression("**/*.txt").fullmatch("a/b/c.txt")
    assert glob_expression("**/*.txt").fullmatch("c.txt")
    assert not glob_expression("*.txt").fullmatch("a/c.txt")
    assert glob_expression("*.{json,jsonl}").fullmatch("a.jsonl")


def test_files_are_listed_once_and_missing_ones_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.jsonl").write_text("{}")
    (folder / "link.jsonl").symlink_to(folder / "deep" / "a.jsonl")
    (folder / ".hidden.jsonl").write_text("{}")

    def names(path: str) -> list[str]:
        values = {
            "output_dir": "x",
            "cutoff": "2016",
            "sources": [{"name": "s", "type": "jsonl", "path": path}],
        }
        return [name for name, _ in list_files(config_from(values).sources[0])]

    assert len(names(str(folder))) == 1
    with pytest.raises(ConfigError, match="does not exist"):
        names(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no installed package"):
        names("package:no_such_package_here/data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file matches"):
        names(str(tmp_path / "empty"))


def test_a_file_added_to_a_folder_moves_few_units(tmp_path: Path) -> None:
    def keys(names: list[str]) -> set[str]:
        files = [
            InputFile(path=tmp_path / name, name=name, num_bytes=1 << 20, sha256=name)
            for name in sorted(names)
        ]
        values = {
            "output_dir": "x",
            "cutoff": "2016",
            "sources": [{"name": "s", "type": "jsonl", "path": "x"}],
        }
        source = config_from(values).sources[0]
        units = plan_units(source, files, lambda file: [(0, -1, file.num_bytes)])
        assert sum(len(unit.parts) for unit in units) == len(names)
        return {unit.content_key() for unit in units}

    names = [f"file-{i:04d}" for i in range(400)]
    before, after = keys(names), keys([*names, "file-0200-new"])
    assert len(before) > 10
    assert len(before - after) <= 3


@pytest.fixture
def streamed(tmp_path: Path) -> Any:
    """A source that the datasets package streams from a local file."""
    pytest.importorskip("datasets")
    rows = [{"text": f"row {i}", "available_at": "2016-01-01", "n": i} for i in range(25)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {
        "output_dir": "x", "cutoff": "2016",
        "sources": [{"name": "s", "type": "hf_dataset", "dataset": "json",
                     "data_files": str(tmp_path / "rows.jsonl"), "max_records": 23}],
    }  # fmt: skip
    return config_from(values).sources[0]


# The packages' own leavings at exit (temporary folders, unclosed files) are theirs.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_streamed_data_set_is_kept_and_a_killed_download_goes_on(
    streamed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.corpus.sources.spool.PIECE_RECORDS", 10)
    fields = ("text", "available_at")

    class KilledError(Exception):
        pass

    def kill(num_records: int) -> None:
        if num_records == 10:
            raise KilledError

    with pytest.raises(KilledError):
        spool(streamed, fields, tmp_path / "spool", kill)
    folder = spool(streamed, fields, tmp_path / "spool")
    names = [path.name for path in sorted(folder.glob("*.parquet"))]
    assert names == [f"part-{i:06d}.parquet" for i in range(3)]
    table = pq.read_table(folder)
    assert table.column_names == ["text", "available_at"]
    assert table.column("text").to_pylist() == [f"row {i}" for i in range(23)]
    # Kept: the file can go.
    (tmp_path / "rows.jsonl").unlink()
    assert spool(streamed, fields, tmp_path / "spool") == folder
    with pytest.raises((ConfigError, DataError)):
        spool(streamed, ("text",), tmp_path / "spool")
