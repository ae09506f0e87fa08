"""Prints speed and peak memory of building corpora from EDGAR filings, WARC files and mailboxes.

Run: python benchmarks/corpus_sources.py [--megabytes 300] [--kinds edgar warc mbox]

The files are made up in the layout of the real ones: EDGAR submissions with their SGML header, an
HTML main document with tables and inline XBRL, and a uuencoded exhibit; WARC files of gzipped
members as Common Crawl writes them (request, response, metadata); mailboxes of messages in plain
text, multipart HTML and base64. Their words are passages of the machine's own documents
(``benchmarks/corpus.py``). Each is built whole (dating, checks, near-duplicates) by one worker in a
process of its own, without a tokenizer. MB/s are decimal megabytes of input as it is read
(decompressed) by processor time of all processes, and by the clock.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus import CUTOFF, passages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MB = 1e6
_FILING_BYTES = 400_000
_FILE_BYTES = 64 << 20


class _Words:
    """Text and moments drawn again and again alike."""

    def __init__(self) -> None:
        self._pool = list(passages())
        self.draw = random.Random(0)  # noqa: S311 - a repeatable draw

    def text(self, num_bytes: int) -> str:
        parts: list[str] = []
        held = 0
        while held < num_bytes:
            parts.append(self.draw.choice(self._pool))
            held += len(parts[-1])
        return "".join(parts)

    def moment(self) -> datetime:
        days = self.draw.uniform(-20 * 365, 365)
        return datetime(2025, 1, 1, tzinfo=UTC) + timedelta(days=days)


def filing(words: _Words, number: int) -> bytes:
    """One EDGAR submission."""
    moment, accession = words.moment(), f"0000{number % 10**6:06d}-16-{number:06d}"
    head = (
        f"<SEC-DOCUMENT>{accession}.txt : {moment:%Y%m%d}\n"
        f"<SEC-HEADER>{accession}.hdr.sgml : {moment:%Y%m%d}\n"
        f"<ACCEPTANCE-DATETIME>{moment:%Y%m%d%H%M%S}\nACCESSION NUMBER:\t\t{accession}\n"
        f"CONFORMED SUBMISSION TYPE:\t10-K\nPUBLIC DOCUMENT COUNT:\t\t2\n"
        f"CONFORMED PERIOD OF REPORT:\t{moment:%Y}0630\nFILED AS OF DATE:\t\t{moment:%Y%m%d}\n\n"
        f"FILER:\n\n\tCOMPANY DATA:\t\n\t\tCOMPANY CONFORMED NAME:\t\t\tMILL {number}\n"
        f"\t\tCENTRAL INDEX KEY:\t\t\t{number:010d}\n</SEC-HEADER>\n"
    )
    body = ["<html><head><title>10-K</title><style>p{margin:0}</style></head><body>\n"]
    while sum(map(len, body)) < _FILING_BYTES:
        text = words.text(2000).replace("&", "&amp;").replace("<", "&lt;")
        body += [f'<p style="font:10pt Times">{part}</p>\n' for part in text.split("\n\n")]
        cells = "".join(
            f'<td style="text-align:right"><ix:nonFraction name="us-gaap:Revenues" '
            f'contextRef="c{i}" scale="6">{words.draw.randint(1, 10**6):,}</ix:nonFraction></td>'
            for i in range(4)
        )
        body.append(f"<table><tr><td>Revenues</td>{cells}</tr></table>\n")
    page = "".join(body) + "</body></html>\n"
    exhibit = base64.encodebytes(words.draw.randbytes(40_000)).decode()
    return (
        f"{head}<DOCUMENT>\n<TYPE>10-K\n<SEQUENCE>1\n<FILENAME>a.htm\n<TEXT>\n{page}</TEXT>\n"
        f"</DOCUMENT>\n<DOCUMENT>\n<TYPE>GRAPHIC\n<SEQUENCE>2\n<FILENAME>b.jpg\n<TEXT>\n"
        f"begin 644 b.jpg\n{exhibit}end\n</TEXT>\n</DOCUMENT>\n</SEC-DOCUMENT>\n"
    ).encode()


def _record(kind: str, moment: datetime, number: int, content: bytes) -> bytes:
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Date: {moment:%Y-%m-%dT%H:%M:%SZ}\r\n"
        f"WARC-Record-ID: <urn:uuid:{kind}-{number}>\r\n"
        f"WARC-Target-URI: https://news.example/{number}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"


def page_records(words: _Words, number: int) -> list[bytes]:
    """Request, response and metadata of one page."""
    moment = words.moment()
    links = "".join(f'<li><a href="/s/{i}">Section {i}</a></li>' for i in range(40))
    paragraphs = "".join(
        f"<p>{part}</p>\n" for part in words.text(6000).replace("<", "&lt;").split("\n\n")
    )
    page = (
        f"<!doctype html><html><head><title>News {number}</title><script>var a = "
        f"{json.dumps(list(range(800)))};</script></head><body><nav><ul>{links}</ul></nav>"
        f"<article><h1>News {number}</h1>{paragraphs}</article></body></html>"
    )
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page.encode()
    return [
        _record("request", moment, number, b"GET / HTTP/1.1\r\nHost: news.example\r\n\r\n"),
        _record("response", moment, number, http),
        _record("metadata", moment, number, b"fetchTimeMs: 100\r\n"),
    ]


def message(words: _Words, number: int) -> bytes:
    """One message of a mailbox."""
    moment = words.moment()
    text = words.text(3000)
    head = (
        f"From a@mill.example {moment:%a %b %d %H:%M:%S %Y}\n"
        f"Received: from x by y; {moment:%a, %d %b %Y %H:%M:%S} +0000\n"
        f"From: a@mill.example\nSubject: Wheat {number}\n"
        f"Date: {moment:%a, %d %b %Y %H:%M:%S} +0000\nMessage-ID: <{number}@mill.example>\n"
        "MIME-Version: 1.0\n"
    )
    kind = number % 4
    if kind == 0:
        body = base64.encodebytes(text.encode()).decode()
        rest = (
            "Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: base64\n\n" + body
        )
    elif kind == 1:
        rest = (
            'Content-Type: multipart/alternative; boundary="b"\n\n--b\n'
            f"Content-Type: text/plain; charset=utf-8\n\n{text}\n--b\n"
            f"Content-Type: text/html; charset=utf-8\n\n<p>{text}</p>\n--b--\n"
        )
    else:
        rest = f"Content-Type: text/plain; charset=utf-8\n\n{text}\n"
    return (head + rest.replace("\nFrom ", "\n>From ") + "\n\n").encode()


def write_edgar(folder: Path, num_bytes: int, words: _Words) -> int:
    written = number = 0
    while written < num_bytes:
        content = filing(words, number)
        (folder / f"{number:06d}.txt").write_bytes(content)
        written, number = written + len(content), number + 1
    return written


def _write_files(
    folder: Path, name: str, num_bytes: int, pieces: Iterator[list[bytes]], squeeze: bool
) -> int:
    """Files of ``_FILE_BYTES``; each piece is a gzip member of its own where ``squeeze`` is set."""
    written = number = 0
    while written < num_bytes:
        held = 0
        with (folder / name.format(number)).open("wb") as file:
            while held < min(_FILE_BYTES, num_bytes - written):
                for piece in next(pieces):
                    file.write(gzip.compress(piece, 1) if squeeze else piece)
                    held += len(piece)
        written, number = written + held, number + 1
    return written


def write_warc(folder: Path, num_bytes: int, words: _Words) -> int:
    pages = (page_records(words, number) for number in range(10**9))
    return _write_files(folder, "CC-NEWS-{:05d}.warc.gz", num_bytes, pages, squeeze=True)


def write_mbox(folder: Path, num_bytes: int, words: _Words) -> int:
    messages = ([message(words, number)] for number in range(10**9))
    return _write_files(folder, "list-{:03d}.mbox", num_bytes, messages, squeeze=False)


KINDS: dict[str, Callable[[Path, int, _Words], int]] = {
    "edgar": write_edgar,
    "warc": write_warc,
    "mbox": write_mbox,
}


def run_build(kind: str, work: Path) -> None:
    """In a process of its own: the build, its time and its peak memory."""
    from headrace.corpus.build import build_corpus
    from headrace.corpus.config import config_from

    config = config_from(
        {
            "output_dir": str(work / "out"),
            "cutoff": CUTOFF,
            "num_workers": 1,
            "sources": [{"name": kind, "type": kind, "path": str(work / "in")}],
        }
    )
    used, begun = time.process_time(), time.perf_counter()
    manifest = build_corpus(config)
    result = {
        "cpu_s": time.process_time() - used,
        "wall_s": time.perf_counter() - begun,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "records": manifest.counts["records"],
        "documents": manifest.counts["documents"],
        "text_mb": manifest.counts["bytes"] / _MB,
        "bad": manifest.counts["bad"],
    }
    print("RESULT " + json.dumps(result))


def measure(kind: str, megabytes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="headrace-sources-") as folder:
        work = Path(folder)
        (work / "in").mkdir()
        size = KINDS[kind](work / "in", int(megabytes * _MB), _Words()) / _MB
        done = subprocess.run(
            [sys.executable, __file__, "--build", kind, "--work", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not lines:
            raise SystemExit(f"{kind} failed:\n{done.stderr[-3000:]}")
        result = json.loads(lines[-1].removeprefix("RESULT "))
    return {
        "input_mb": round(size, 1),
        "mb_per_cpu_s": round(size / result["cpu_s"], 1),
        "mb_per_s": round(size / result["wall_s"], 1),
        "peak_mib": round(result["peak_mib"]),
        **{name: round(result[name], 1) for name in ("records", "documents", "bad", "text_mb")},
    }


def main() -> None:
    """Parse the words and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--build", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.build:
        run_build(given.build, given.work)
        return
    for kind in given.kinds:
        print(f"{kind:>6}: {measure(kind, given.megabytes)}", flush=True)


if __name__ == "__main__":
    main()
