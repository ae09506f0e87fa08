"""Pieces of a dataset that are read on their own, and the rows in them.

Owns the cutting of files into parts of some megabytes, from sizes and footers alone, and the
reading of a part's rows with their places. The invariant: the parts of a dataset depend on
its files and on nothing else, and every row is in exactly one. So parts can be read by several
processes, in any order, or again after a stop. Does not judge what a row holds.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.data.files import file_format, parse_split, resolve_files
from headrace.data.rows import Place, bad_row
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.data.sources import DatasetSource

PART_BYTES = 8 << 20
LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a file.

    Attributes:
        file: which.
        start: first byte of a file of lines, first row group of Parquet, first record batch of
            Arrow; a line belongs to the part in which it begins.
        stop: the end of the same, exclusive.
        rows: which of the rows found there count, or ``None`` for all.
    """

    file: str
    start: int = 0
    stop: int = 1
    rows: tuple[int, int] | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.file)

    @property
    def format(self) -> str:
        """Its format, one of ``SUFFIXES``."""
        return file_format(self.path) or ""


@dataclass(frozen=True)
class Line:
    """The line that begins at byte ``at``; its number is counted only when it is asked for."""

    file: str
    at: int

    def __str__(self) -> str:
        number, left = 1, self.at
        with Path(self.file).open("rb") as lines:
            while left > 0 and (block := lines.read(min(left, PART_BYTES))):
                number += block.count(b"\n")
                left -= len(block)
        return f"{self.file}:{number}"


def plan_parts(source: DatasetSource, part_bytes: int = PART_BYTES) -> list[Part]:
    """The parts of a dataset, in order.

    Raises:
        DataError: files are missing or damaged.
    """
    files = resolve_files(source.path, source.split)
    parts = [part for file in files for part in _parts_of(file, part_bytes)]
    _, first, last = parse_split(source.split)
    if not (first or last or source.max_samples):
        return parts
    counts = [count_rows(part) for part in parts]
    total = sum(counts)
    begin = _bound(first, total, 0)
    end = _bound(last, total, total)
    if source.max_samples is not None:
        end = min(end, begin + source.max_samples)
    return list(_sliced(parts, counts, begin, end))


def _bound(text: str, total: int, default: int) -> int:
    if not text:
        return default
    if text.endswith("%"):
        return round(int(text[:-1]) * total / 100)
    return min(int(text), total)


def _sliced(parts: Sequence[Part], counts: Sequence[int], begin: int, end: int) -> Iterator[Part]:
    at = 0
    for part, count in zip(parts, counts, strict=True):
        first, last = max(begin - at, 0), min(end - at, count)
        if first < last:
            yield part if (first, last) == (0, count) else replace(part, rows=(first, last))
        at += count


def _parts_of(file: Path, part_bytes: int) -> Iterator[Part]:
    kind = file_format(file)
    if kind in LINES:
        size = file.stat().st_size
        for start in range(0, size, part_bytes):
            yield Part(file=str(file), start=start, stop=min(start + part_bytes, size))
    elif kind == ".parquet":
        with _reading(file, "Parquet"), pq.ParquetFile(file) as parquet:
            sizes = [
                parquet.metadata.row_group(index).total_byte_size
                for index in range(parquet.num_row_groups)
            ]
        yield from _grouped(file, sizes, part_bytes)
    elif kind == ".arrow":
        yield from _grouped(file, [batch.nbytes for batch in _arrow_batches(file)], part_bytes)
    else:
        yield Part(file=str(file))


def _grouped(file: Path, sizes: Sequence[int], part_bytes: int) -> Iterator[Part]:
    start, held = 0, 0
    for index, size in enumerate(sizes):
        held += size
        if held >= part_bytes or index == len(sizes) - 1:
            yield Part(file=str(file), start=start, stop=index + 1)
            start, held = index + 1, 0


@contextlib.contextmanager
def _reading(file: Path, kind: str) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into a :class:`DataError`."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowException, OSError) as error:  # damaged pages are an OSError
        raise DataError(
            f"{file} cannot be read as {kind} ({error})", remedy="write the file again"
        ) from error


def _arrow_batches(file: Path) -> list[Any]:
    """Record batches of an Arrow file, mapped and not read."""
    batches: list[Any] = []
    with _reading(file, "Arrow"):
        source = pa.memory_map(str(file))
        try:
            batches += pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            whole = pa.ipc.open_file(source)
            batches += [whole.get_batch(index) for index in range(whole.num_record_batches)]
    return batches


def parquet_batches(
    part: Part, columns: Sequence[str] | None, batch_size: int
) -> Iterator[tuple[int, Any]]:
    """``(first row in the file, record batch)`` of a Parquet part; the rows that count only."""
    with _reading(part.path, "Parquet"), pq.ParquetFile(part.path) as parquet:
        before = sum(parquet.metadata.row_group(index).num_rows for index in range(part.start))
        batches = parquet.iter_batches(
            batch_size=batch_size,
            row_groups=list(range(part.start, min(part.stop, parquet.num_row_groups))),
            columns=None if columns is None else list(columns),
        )
        yield from _counted(batches, part, before)


def _counted(batches: Any, part: Part, before: int) -> Iterator[tuple[int, Any]]:
    at = 0
    for batch in batches:
        first, last = 0, batch.num_rows
        if part.rows is not None:
            first, last = max(part.rows[0] - at, 0), min(part.rows[1] - at, batch.num_rows)
        if first < last:
            yield before + at + first, batch.slice(first, last - first)
        at += batch.num_rows


def parquet_columns(file: Path) -> list[str]:
    """Names of the columns of a Parquet file."""
    names: list[str] = []
    with _reading(file, "Parquet"):
        names += pq.read_schema(file).names
    return names


def count_rows(part: Part) -> int:
    """Rows of a whole part."""
    if part.format == ".parquet":
        with pq.ParquetFile(part.path) as parquet:
            groups = range(part.start, min(part.stop, parquet.num_row_groups))
            return sum(parquet.metadata.row_group(index).num_rows for index in groups)
    if part.format == ".arrow":
        return sum(batch.num_rows for batch in _arrow_batches(part.path)[part.start : part.stop])
    return sum(1 for _ in read_rows(replace(part, rows=None)))


def read_rows(part: Part) -> Iterator[tuple[Place, dict[str, Any]]]:
    """``(place, row)`` of every row of a part that counts.

    Raises:
        DataError: naming the line or row that is no row.
    """
    rows = _every_row(part)
    if part.rows is None or part.format in {".parquet", ".arrow"}:
        yield from rows
        return
    for number, row in enumerate(rows):
        if number >= part.rows[1]:
            return
        if number >= part.rows[0]:
            yield row


def _every_row(part: Part) -> Iterator[tuple[Place, dict[str, Any]]]:
    if part.format == ".parquet":
        yield from _rows_of(part, parquet_batches(part, None, 256))
    elif part.format == ".arrow":
        batches = _arrow_batches(part.path)
        before = sum(batch.num_rows for batch in batches[: part.start])
        yield from _rows_of(part, _counted(batches[part.start : part.stop], part, before))
    elif part.format == ".json" and _is_array(part.path):
        yield from _array_rows(part.path)
    else:
        yield from _line_rows(part)


def _rows_of(
    part: Part, batches: Iterator[tuple[int, Any]]
) -> Iterator[tuple[Place, dict[str, Any]]]:
    for first, batch in batches:
        names = batch.schema.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError(
                f"{part.file} has {names.count(twice[0])} columns named {twice[0]!r}",
                remedy="keep one of them",
            )
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{part.file}: rows from {first} hold bytes that are not UTF-8 ({error})",
                remedy="write the file again with text in UTF-8",
            ) from error
        for number, row in enumerate(rows, first):
            yield f"{part.file}: row {number}", row


def _is_array(file: Path) -> bool:
    with file.open("rb") as content:
        while block := content.read(4096):
            if text := block.lstrip(b"\xef\xbb\xbf \t\r\n"):
                return text[:1] == b"["
    return False


def _array_rows(file: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    try:
        rows = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise bad_row(str(file), f"not a JSON array ({error})", "write it again") from error
    for number, row in enumerate(rows):
        place = f"{file}: item {number}"
        if not isinstance(row, dict):
            raise bad_row(place, f"a {type(row).__name__}, not a JSON object", "write objects")
        yield place, row


def _open_lines(file: Path) -> IO[bytes]:
    if file.name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(file, "rb"))
    return file.open("rb")


def _line_rows(part: Part) -> Iterator[tuple[Place, dict[str, Any]]]:
    number, at = 0, 0
    whole = part.format not in LINES  # compressed, or JSON lines under another name
    try:
        with _open_lines(part.path) as lines:
            if not whole and part.start:
                lines.seek(part.start - 1)
                # The line that holds this byte began before: it is the earlier part's.
                at = part.start - 1 + len(lines.readline())
            for number, line in enumerate(lines, start=1):
                if not whole and at >= part.stop:
                    return
                place: Place = f"{part.file}:{number}" if whole else Line(part.file, at)
                at += len(line)
                if not line.isspace():
                    yield place, _json_object(place, line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise bad_row(
            f"{part.file}:{number + 1}",
            f"the compressed file breaks off ({error})",
            "copy it again",
        ) from error


def _json_object(place: Place, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        # Besides broken JSON and wrong encodings: endless numbers, endless nesting.
        raise bad_row(
            place, f"not a JSON object ({error})", "write one JSON object a line"
        ) from error
    if not isinstance(row, dict):
        raise bad_row(
            place, f"a {type(row).__name__}, not a JSON object", "write one JSON object a line"
        )
    return row
