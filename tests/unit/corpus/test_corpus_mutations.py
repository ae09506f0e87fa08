"""Damaged files of every source type: each record ends as a document or under a reason."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.corpus.config import config_from
from headrace.corpus.document import REASONS
from headrace.corpus.rejections import read_stats
from headrace.corpus.sources import split_file
from headrace.corpus.sources.units import InputFile, plan_units
from headrace.corpus.unit_files import read_index
from headrace.corpus.unit_pass import UnitPass

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [f"The mill number {i} ground wheat and rye in the winter of 2014." for i in range(12)]
ROWS = [{"id": f"r{i}", "text": text, "date": "2015-03-04"} for i, text in enumerate(TEXTS)]
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def parquet(**columns: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, row_group_size=5)
    return out.getvalue()


def warc() -> bytes:
    out = b""
    for number in range(4):
        body = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n<p>Page %d</p>"
        body %= number
        head = b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Date: 2015-03-04T10:00:00Z\r\n"
        out += head + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"\r\n\r\n"
    return out


EDGAR = b"""<SEC-DOCUMENT>a.txt : 20150304
<SEC-HEADER>a.hdr.sgml : 20150304
<ACCEPTANCE-DATETIME>20150304173001
ACCESSION NUMBER:\t\t0000000001-15-000009
CONFORMED SUBMISSION TYPE:\t10-K
</SEC-HEADER>
<DOCUMENT>
<TYPE>10-K
<TEXT>
<html><body><p>Wheat &amp; rye</p></body></html>
</TEXT>
</DOCUMENT>
"""
MAIL = b"".join(
    b"From a@b Wed Mar  4 10:00:00 2015\nSubject: =?utf-8?q?n=C3=BC?= %d\nMessage-ID: <%d@x>\n"
    b"Date: Wed, 04 Mar 2015 10:00:00 +0000\nContent-Type: text/plain; charset=utf-8\n\n"
    b"Hello number %d\n>From here.\n\n" % (i, i, i)
    for i in range(4)
)
CHANGELOG = b"".join(
    b"mill (1.%d-1) unstable; urgency=low\n\n  * Grind finer.\n\n"
    b" -- A B <a@b>  Wed, 04 Mar 2015 10:00:0%d +0000\n\n" % (i, i)
    for i in range(4)
)
PARQUET = parquet(
    id=list(range(12)), text=TEXTS, date=["2015-03-04"] * 12, dump=["CC-MAIN-2015-11"] * 12
)
SAMPLES: dict[str, tuple[dict[str, Any], bytes]] = {
    "jsonl": ({"type": "jsonl", "available_at": "date"}, JSONL),
    "gzip": ({"type": "jsonl", "available_at": "date"}, gzip.compress(JSONL)),
    "zstd": ({"type": "jsonl", "available_at": "date"}, zstandard.compress(JSONL)),
    "bzip2": ({"type": "jsonl", "available_at": "date"}, bz2.compress(JSONL)),
    "xz": ({"type": "jsonl", "available_at": "date"}, lzma.compress(JSONL)),
    "parquet": ({"type": "parquet", "available_at": "date"}, PARQUET),
    "fineweb": ({"type": "fineweb"}, PARQUET),
    "cc_news": ({"type": "cc_news"}, JSONL),
    "warc": ({"type": "warc"}, warc()),
    "edgar": ({"type": "edgar", "documents": "all"}, EDGAR),
    "mbox": ({"type": "mbox"}, MAIL),
    "changelog": ({"type": "debian_changelog"}, CHANGELOG),
    "folder": ({"type": "folder", "date_pattern": r"(?P<year>\d{4})"}, b"Some text.\n\nMore.\n"),
}

places = st.floats(0, 1, exclude_max=True)
pieces = st.binary(min_size=1, max_size=6) | st.sampled_from(
    [b"\n", b"\r\n", b"\0" * 9, b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800", b"9" * 30, b"From ",
     b"WARC/1.0\r\n", b"<TEXT>\n", b"PAR1", b"charset=idna", b"charset=undefined", b"2999-01-01"]
)  # fmt: skip
changes = st.lists(
    st.tuples(st.sampled_from(["insert", "replace", "delete", "cut", "repeat"]), places, pieces),
    min_size=1,
    max_size=4,
)


def changed(data: bytes, steps: list[tuple[str, float, bytes]]) -> bytes:
    for what, place, piece in steps:
        at = int(place * len(data))
        if what == "insert":
            data = data[:at] + piece + data[at:]
        elif what == "replace":
            data = data[:at] + piece + data[at + len(piece) :]
        elif what == "delete":
            data = data[:at] + data[at + len(piece) :]
        elif what == "cut":
            data = data[:at]
        else:
            data += data[at:]
    return data


def account(folder: Path, keys: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Pass over one file; the unit's counts, which must agree with each other."""
    path = folder / "2015.bin"
    path.write_bytes(data)
    source = {"name": "s", "path": str(path), **keys}
    config = config_from({"output_dir": "unused", "cutoff": "2019-12-31", "sources": [source]})
    file = InputFile(path=path, name=path.name, num_bytes=len(data), sha256="")
    (unit,) = plan_units(config.sources[0], [file], lambda f: split_file(config.sources[0], f))
    place = folder / "unit"
    UnitPass(config, config.sources[0]).run(unit, place)
    stats = read_stats(place)
    rejected = pq.read_table(place / "rejected.parquet").to_pylist()
    assert stats["num_records"] == stats["num_documents"] + len(rejected)
    assert {row["reason"] for row in rejected} <= REASONS.keys()
    assert read_index(place).size == stats["num_rows"]
    return stats


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_sound(name: str, tmp_path: Path) -> None:
    stats = account(tmp_path, *SAMPLES[name])
    assert stats["num_documents"] == stats["num_records"] > 0


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=changes)
def test_damage_is_counted_and_never_raised(
    name: str, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, float, bytes]]
) -> None:
    keys, data = SAMPLES[name]
    stats = account(tmp_path_factory.mktemp("damaged"), keys, changed(data, steps))
    assert stats["num_records"] > 0


@pytest.mark.parametrize("charset", ["idna", "undefined", "rot13", "unicode_escape", "x\\0y", "é"])
def test_a_charset_that_is_none_falls_back_to_the_source_s(tmp_path: Path, charset: str) -> None:
    mail = MAIL.replace(b"charset=utf-8", b'charset="%s"' % charset.encode())
    assert account(tmp_path, {"type": "mbox"}, mail)["num_documents"] == 4
    page = warc().replace(b"charset=utf-8", b"charset=%-5s" % charset.encode()[:5])
    assert account(tmp_path / "..", {"type": "warc"}, page)["num_records"] > 0


def test_mail_that_the_library_stumbles_over_is_listed(tmp_path: Path) -> None:
    nested = b"".join(
        b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (i, i) for i in range(3000)
    )
    data = MAIL.replace(b"=?utf-8?q?n=C3=BC?= 1", b"=?\xe9tf-8?q?n=C3=BC?= 1")
    stats = account(tmp_path, {"type": "mbox"}, data + b"From a@b x\n" + nested + b"\n\n" + MAIL)
    assert stats["num_documents"] == 8
    assert sum(stats["reasons"].values()) == 1
