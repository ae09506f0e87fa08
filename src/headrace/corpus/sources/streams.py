"""Bytes of input files: decompressed by their magic number, in bounded pieces, with offsets.

The invariant: a stream that ends before its end marker is reported, after everything that
could be read from it has been handed out. Memory stays at a few pieces whatever the file.

Offsets count decompressed bytes.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_READ_BYTES = 1 << 20
_COMPRESSED_BYTES = 1 << 16  # copied on for every member that begins in it
_MAGIC_BYTES = 6
_PIECE_BYTES = 4 << 20
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
_SKIPPABLE = b"\x2a\x4d\x18"  # after 0x50 to 0x5f: frames of other tools' notes, RFC 8878
UTF8_BOM = b"\xef\xbb\xbf"
_OTHER_FILES = {
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "Parquet; use type: parquet",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
    b"SQLite format 3": "an SQLite database",
    b"ARROW1": "an Arrow file",
}
_OTHER_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


class BrokenStreamError(Exception):
    """The stream cannot be read on; ``reason`` is one of the bad reasons."""

    def __init__(self, reason: str, detail: str, offset: int) -> None:
        """Keep where it broke, in decompressed bytes."""
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.offset = offset


def _kind_of(head: bytes) -> str | None:
    if head[1:4] == _SKIPPABLE and head[0] >> 4 == 5:
        return "zstd"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def compression_of(path: Path) -> str | None:
    """``gzip``, ``zstd``, ``bzip2``, ``xz`` or ``None``, by the first bytes and not the name."""
    with path.open("rb") as file:
        return _kind_of(file.read(_MAGIC_BYTES))


def foreign_file(path: Path) -> tuple[str, str] | None:
    """Reason and detail where a file is plainly not UTF-8 lines: other encodings, archives."""
    try:
        head = next(read_pieces(path), b"")
    except BrokenStreamError:
        return None  # reported where it is read
    for magic, name in _OTHER_FILES.items():
        if head.startswith(magic):
            return "corrupt_file", f"the file is {name}"
    for bom, name in _OTHER_BOMS.items():
        if head.startswith(bom):
            return "bad_encoding", f"the file is {name}; convert it to UTF-8"
    return None


def _decompressor(kind: str) -> Any:
    if kind == "gzip":
        return zlib.decompressobj(wbits=31)
    if kind == "bzip2":
        return bz2.BZ2Decompressor()
    if kind == "xz":
        return lzma.LZMADecompressor()
    try:
        import zstandard  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError(
            "a .zst input needs the package zstandard", remedy="pip install 'headrace[corpus]'"
        ) from error
    return zstandard.ZstdDecompressor().decompressobj()


def read_pieces(path: Path, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """The decompressed content in pieces of a few MiB at most.

    Args:
        path: the file.
        start: first byte; only for files that are not compressed.
        stop: end; may be exceeded by a piece.

    Raises:
        BrokenStreamError: after the last good piece.
    """
    kind = compression_of(path)
    if kind is None:
        with path.open("rb") as file:
            file.seek(start)
            position = start
            while (stop is None or position < stop) and (piece := file.read(_READ_BYTES)):
                position += len(piece)
                yield piece
        return
    assert start == 0, "a compressed file is read from its start"
    yield from _decompressed(path, kind)


def _decompressed(path: Path, kind: str) -> Iterator[bytes]:
    # zstd's object has no output limit. Four bytes can stand for a block of 128 KiB, so that
    # a small input keeps a bomb's burst small.
    step = 1 << 11 if kind == "zstd" else _COMPRESSED_BYTES
    offset = 0
    broken: tuple[type[Exception], ...] = (zlib.error, OSError, lzma.LZMAError, EOFError)
    if kind == "zstd":
        import zstandard  # noqa: PLC0415 - optional

        broken = (*broken, zstandard.ZstdError)
    with path.open("rb") as file:
        engine = _decompressor(kind)
        pending = file.read(step)
        while pending:
            try:
                for piece in _feed(engine, pending, kind):
                    offset += len(piece)
                    yield piece
            except broken as error:
                raise BrokenStreamError("corrupt_file", f"{kind}: {error}", offset) from error
            if not engine.eof:
                pending = file.read(step)
                continue
            # A crawl's file has a member a page: no more is read than tells what comes next.
            pending = (engine.unused_data or b"").lstrip(b"\0")
            while len(pending) < _MAGIC_BYTES and (more := file.read(step)):
                pending = (pending + more).lstrip(b"\0")
            if pending and _kind_of(pending) != kind:
                raise BrokenStreamError("corrupt_file", f"{kind}: bytes after the end", offset)
            engine = _decompressor(kind)
            if not pending:
                return
    raise BrokenStreamError("truncated_file", f"{kind}: the stream ends too early", offset)


def _feed(engine: Any, data: bytes, kind: str) -> Iterator[bytes]:
    if kind == "zstd":
        if piece := engine.decompress(data):
            yield piece
        return
    if kind == "gzip":
        while data and not engine.eof:
            if piece := engine.decompress(data, _PIECE_BYTES):
                yield piece
            data = engine.unconsumed_tail
        return
    while True:
        if piece := engine.decompress(data, _PIECE_BYTES):
            yield piece
        data = b""
        if engine.eof or engine.needs_input:
            return


@dataclass(slots=True)
class Line:
    """One line without its end; ``content`` is ``None`` where it is longer than the limit."""

    offset: int
    content: bytes | None
    length: int


def read_lines(
    path: Path, *, limit: int, start: int = 0, stop: int | None = None
) -> Iterator[Line]:
    r"""Lines (``\n``) of a file; those that begin in ``[start, stop)`` when a range is given.

    A line longer than ``limit`` bytes is measured and passed over without being held.

    Raises:
        BrokenStreamError: after the last line that could be read; an unfinished last line of a
            broken stream is handed out first.
    """
    # The byte before the range tells whether a line begins exactly at its start.
    begin = max(start - 1, 0)
    skipping = start > 0
    offset, held_length = begin, 0
    held: list[bytes] = []
    too_long = False

    def finish() -> Line:
        content = None if too_long else b"".join(held)
        return Line(offset, content, held_length)

    try:
        for piece in read_pieces(path, start=begin, stop=None):
            parts = piece.split(b"\n")
            for index, part in enumerate(parts):
                if index:
                    if not skipping:
                        yield finish()
                    skipping = False
                    offset += held_length + 1
                    held, held_length, too_long = [], 0, False
                    if stop is not None and offset >= stop:
                        return
                held_length += len(part)
                too_long = too_long or held_length > limit
                if skipping or too_long:
                    held = []
                elif part:
                    held.append(part)
    except BrokenStreamError:
        if held_length and not skipping:
            yield finish()
        raise
    if held_length and not skipping:
        yield finish()
