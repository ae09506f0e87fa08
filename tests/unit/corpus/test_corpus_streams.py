"""Bytes: broken streams are reported after what was good, ranges share lines out exactly."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.corpus.sources.streams import (
    BrokenStreamError,
    compression_of,
    read_lines,
    read_pieces,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
TEXT = b"".join(
    b"line %d of some text that does not compress to nothing\n" % i for i in range(9000)
)


def content(path: Path) -> bytes:
    return b"".join(read_pieces(path))


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_files_are_told_by_their_content(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(COMPRESS[kind](TEXT))
    assert compression_of(path) == kind
    assert content(path) == TEXT


@pytest.mark.parametrize("kind", COMPRESS)
def test_several_members_are_one_stream(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(COMPRESS[kind](TEXT) + COMPRESS[kind](b"more\n"))
    assert content(path) == TEXT + b"more\n"


def test_frames_that_zstd_skips_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    note = bytes.fromhex("5f2a4d18") + (4).to_bytes(4, "little") + b"note"
    frame = COMPRESS["zstd"]
    path.write_bytes(note + frame(TEXT) + note + frame(b"more\n") + note)
    assert compression_of(path) == "zstd"
    assert content(path) == TEXT + b"more\n"


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "zstd"])  # xz makes a window for each
def test_a_file_of_many_members_is_read_in_bounded_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    members = [random.Random(i).randbytes(9000) for i in range(1000)]
    path.write_bytes(b"".join(map(COMPRESS[kind], members)))
    tracemalloc.start()
    try:
        number = 0
        held = b""
        for piece in read_pieces(path):
            held += piece
            while len(held) >= 9000:
                assert held[:9000] == members[number]
                held, number = held[9000:], number + 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert number == 1000
    assert peak < 2 << 20


@pytest.mark.parametrize(
    ("kind", "size", "largest"),
    [("gzip", 16, 4), ("bzip2", 16, 4), ("xz", 16, 4), ("zstd", 160, 64)],
)
def test_a_bomb_comes_in_pieces(tmp_path: Path, kind: str, size: int, largest: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(COMPRESS[kind](bytes(size << 20)))
    sizes = [len(piece) for piece in read_pieces(path)]
    assert sum(sizes) == size << 20
    assert max(sizes) <= largest << 20


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("cut", [1, 100, 2000])
def test_a_truncated_stream_is_reported_after_what_was_good(
    tmp_path: Path, kind: str, cut: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(COMPRESS[kind](TEXT)[:-cut])
    read = []
    with pytest.raises(BrokenStreamError) as caught:
        read.extend(read_pieces(path))
    assert caught.value.reason == "truncated_file"
    assert TEXT.startswith(b"".join(read))
    assert caught.value.offset == len(b"".join(read))


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz"])
def test_a_damaged_stream_is_reported(tmp_path: Path, kind: str) -> None:
    data = bytearray(COMPRESS[kind](TEXT))
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(byte ^ 0xA5 for byte in data[middle : middle + 40])
    path = tmp_path / "file"
    path.write_bytes(bytes(data))
    with pytest.raises(BrokenStreamError) as caught:
        content(path)
    assert caught.value.reason == "corrupt_file"


def test_bytes_after_a_gzip_member_are_reported_and_padding_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(TEXT) + bytes(512))
    assert content(path) == TEXT
    path.write_bytes(gzip.compress(TEXT) + b"junk")
    with pytest.raises(BrokenStreamError, match="after the end"):
        content(path)


def test_the_unfinished_line_of_a_broken_stream_is_handed_out(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(TEXT)[:-2000])
    lines = []
    with pytest.raises(BrokenStreamError):
        lines.extend(line.content for line in read_lines(path, limit=1 << 20))
    assert b"\n".join(lines) == TEXT[: len(b"\n".join(lines))]


def test_a_line_of_100_mb_is_measured_and_not_held(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.write(b"first\n")
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b"\nlast\n")
    tracemalloc.start()
    lines = list(read_lines(path, limit=1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line.content for line in lines] == [b"first", None, b"last"]
    assert lines[1].length == 100_000_000
    assert [line.offset for line in lines] == [0, 6, 100_000_007]
    assert peak < 12 << 20


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    st.booleans(),
    st.lists(st.integers(0, 160), max_size=4),
)
def test_ranges_share_the_lines_out(tmp_path_factory, lines, ends, cuts) -> None:
    path = tmp_path_factory.mktemp("ranges") / "file"
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    path.write_bytes(b"plain " + data)  # never a magic number
    whole = [(line.offset, line.content) for line in read_lines(path, limit=100)]
    size = path.stat().st_size
    bounds = sorted({0, size, *(min(cut, size) for cut in cuts)})
    parts = [
        (line.offset, line.content)
        for start, stop in itertools.pairwise(bounds)
        for line in read_lines(path, limit=100, start=start, stop=stop)
    ]
    assert parts == whole
    assert b"\n".join(content for _, content in whole) == (b"plain " + data).removesuffix(b"\n")
