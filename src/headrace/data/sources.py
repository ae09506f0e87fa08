"""Rows of data files, in a fixed order, with their place in every complaint.

Owns which files a ``path`` means and how a row is checked. Files are taken in the order of
their names and rows in the order of the file, so the same input always gives the same
documents. A row that cannot be used stops the reading and is named by file and line (row for
Parquet); nothing is skipped in silence. Does not tokenise and keeps at most one chunk of rows
in memory.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import numpy as np

from headrace.data.parquet import parquet_texts, parquet_tokens
from headrace.data.rows import TokenChunk, bad_row, checked_ids, checked_labels
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".parquet")
CHUNK_ROWS = 1024
_CHUNK_CHARACTERS = 8 << 20


@dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """One entry of ``datasets:``.

    Attributes:
        path: a file, a folder (searched with its subfolders) or a glob pattern.
        type: ``text`` rows hold a string, ``tokens`` rows hold ``input_ids`` and, if they like,
            ``labels`` (aligned with ``input_ids`` as in Hugging Face, -100 for no supervision).
        weight: share of the tokens of the mixture; either all entries have one or none.
        text_field: the column that holds the string of a ``text`` row.
        name: how reports call it; the path by default.
    """

    path: str
    type: Literal["text", "tokens"] = "text"
    weight: float | None = None
    text_field: str = "text"
    name: str | None = None

    @property
    def label(self) -> str:
        """What reports and messages call this dataset."""
        return self.name or self.path


def file_format(path: Path) -> str | None:
    """Which of :data:`SUFFIXES` a file has."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def resolve_files(path: str) -> list[Path]:
    """The data files that ``path`` means, sorted by name.

    Raises:
        DataError: when nothing is there, or what is there has no readable format.
    """
    known = ", ".join(SUFFIXES)
    if not path:
        raise DataError("a dataset has an empty path", remedy="name a file, a folder or a pattern")
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"dataset {path!r}: {error}", remedy="write the home directory out"
        ) from error
    if expanded.is_file():
        if file_format(expanded) is None:
            raise DataError(
                f"dataset {path!r} has no readable format", remedy=f"headrace reads {known}"
            )
        return [expanded]
    if expanded.is_dir():
        found = expanded.rglob("*")
    elif glob.has_magic(path):
        found = (
            Path(match)
            for match in glob.iglob(str(expanded), recursive=True)  # noqa: PTH207 - absolute patterns too
        )
    else:
        raise DataError(
            f"dataset {path!r} does not exist (looked from {Path.cwd()})",
            remedy="correct the path under datasets:",
        )
    files = sorted(
        file
        for file in found
        if file.is_file() and file_format(file) and not file.name.startswith(".")
    )
    if not files:
        raise DataError(f"dataset {path!r} holds no data files", remedy=f"headrace reads {known}")
    return files


def _open_lines(file: Path) -> IO[bytes]:
    if file.name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(file, "rb"))
    return file.open("rb")


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(place, row)`` of every line that is not blank."""
    number = 0
    try:
        with _open_lines(file) as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                place = f"{file}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    # Besides broken JSON and wrong encodings: endless numbers, endless nesting.
                    raise bad_row(
                        place, f"not a JSON object ({error})", "write one JSON object a line"
                    ) from error
                if not isinstance(row, dict):
                    kind = type(row).__name__
                    raise bad_row(
                        place, f"a {kind}, not a JSON object", "write one JSON object a line"
                    )
                yield place, row
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise bad_row(
            f"{file}:{number + 1}", f"the compressed file breaks off ({error})", "copy it again"
        ) from error


def _checked_text(place: str, row: dict[str, Any], field: str) -> str:
    if field not in row:
        have = ", ".join(map(repr, row)) or "nothing"
        raise bad_row(
            place,
            f"the row has no {field!r} (it has {have})",
            "set text_field: of this dataset to the column that holds the text",
        )
    text = row[field]
    if not isinstance(text, str):
        raise bad_row(
            place,
            f"{field!r} is {type(text).__name__}, not text",
            "write a string, or drop the row",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_row(
            place,
            f"{field!r} holds half a character, \\u{ord(text[error.start]):04x} "
            f"(character {error.start})",
            "write the text again, with whole characters",
        ) from error
    return text


def iter_texts(files: list[Path], field: str) -> Iterator[list[str]]:
    """Chunks of texts, in file order.

    Raises:
        DataError: naming file and line (or row) of the first row without usable text.
    """
    for file in files:
        if file_format(file) == ".parquet":
            yield from parquet_texts(file, field)
            continue
        texts: list[str] = []
        size = 0
        for place, row in _json_rows(file):
            texts.append(_checked_text(place, row, field))
            size += len(texts[-1])
            if len(texts) >= CHUNK_ROWS or size >= _CHUNK_CHARACTERS:
                yield texts
                texts, size = [], 0
        if texts:
            yield texts


def iter_tokens(files: list[Path]) -> Iterator[TokenChunk]:
    """Chunks of token rows, in file order.

    Raises:
        DataError: naming file and line (or row) of the first unusable row.
    """
    for file in files:
        if file_format(file) == ".parquet":
            yield from parquet_tokens(file)
            continue
        rows: list[npt.NDArray[np.int32]] = []
        labels: list[npt.NDArray[np.int32] | None] = []
        size = 0
        for place, row in _json_rows(file):
            ids = checked_ids(place, "input_ids", row.get("input_ids"), lowest=0)
            rows.append(ids)
            size += len(ids)
            labels.append(None)
            if row.get("labels") is not None:
                labels[-1] = checked_labels(place, row["labels"], len(ids))
            if len(rows) >= CHUNK_ROWS or size >= _CHUNK_CHARACTERS:
                yield _chunk(rows, labels)
                rows, labels, size = [], [], 0
        if rows:
            yield _chunk(rows, labels)


def _chunk(
    rows: list[npt.NDArray[np.int32]], labels: list[npt.NDArray[np.int32] | None]
) -> TokenChunk:
    filled = None
    if any(label is not None for label in labels):
        # A row without labels beside rows with them supervises all of its tokens.
        filled = np.concatenate(
            [ids if label is None else label for ids, label in zip(rows, labels, strict=True)]
        )
    return TokenChunk(
        input_ids=np.concatenate(rows),
        lengths=np.array([len(ids) for ids in rows], np.int64),
        labels=filled,
    )
