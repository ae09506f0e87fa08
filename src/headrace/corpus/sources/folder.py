"""Text files dated by their path or by a table beside them.

The table (CSV with a header) is an input like the files: its hash is part of the unit's key.
"""

from __future__ import annotations

import csv
import functools
import re
from typing import TYPE_CHECKING

from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.sources.context import ReadContext, decode
from headrace.corpus.sources.streams import UTF8_BOM, read_lines
from headrace.corpus.sources.units import Part, resolve_path
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from headrace.corpus.source_config import FolderSource

_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            "jan january", "feb february", "mar march", "apr april", "may", "jun june",
            "jul july", "aug august", "sep sept september", "oct october", "nov november",
            "dec december",
        ),
        start=1,
    )
    for name in names.split()
}  # fmt: skip


@functools.lru_cache(maxsize=8)
def read_index(path: Path, file_field: str, date_field: str) -> Mapping[str, str]:
    """File name (with or without ending) to date, from a CSV table.

    Raises:
        ConfigError: unreadable, or without the columns.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            names = rows.fieldnames or []
            for field in (file_field, date_field):
                if field not in names:
                    raise ConfigError(
                        f"index {path} has no column {field!r}; it has {', '.join(names)}",
                        remedy="set index_file_field and index_date_field",
                    )
            dates: dict[str, str] = {}
            for row in rows:
                name, given = row[file_field], row[date_field]
                if dates.setdefault(name, given) != given:
                    dates[name] += f" or {given}"  # no date: which one counts is not known
            return dates
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"index {path} cannot be read: {error}",
            remedy="save it as CSV in UTF-8, with a line of column names",
        ) from error


def date_from_path(pattern: re.Pattern[str], name: str) -> str | None:
    """The date that a path names, as ISO text as fine as the pattern's groups; or ``None``."""
    match = pattern.search(name)
    if match is None:
        return None
    groups = match.groupdict()
    text = groups["year"]
    month, day = groups.get("month"), groups.get("day")
    if month:
        number = _MONTHS.get(month.lower())
        text += f"-{number or month:>02}"
        if day:
            text += f"-{day:>02}"
    return text


def read_folder(
    source: FolderSource, part: Part, context: ReadContext
) -> Iterator[RawDocument | Rejection]:
    """One document a file, or one a paragraph."""
    name = part.file.name
    if source.index is not None:
        table = read_index(
            resolve_path(source.index), source.index_file_field, source.index_date_field
        )
        stem = name.rsplit(".", 1)[0]
        base = name.rsplit("/", 1)[-1]
        keys = (name, stem, base, base.rsplit(".", 1)[0])
        dated = next((table[key] for key in keys if key in table), None)
    else:
        assert source.date_pattern is not None
        dated = date_from_path(re.compile(source.date_pattern), name)
    values = {"date": dated}
    blocks = _paragraphs if source.split_paragraphs else _whole
    for position, (byte, content, length) in enumerate(blocks(part, context.max_bytes), start=1):
        if content is None:
            yield Rejection(
                reason="too_long",
                detail=f"{length} bytes or more; max_document_bytes is {context.max_bytes}",
                position=position,
                byte=byte,
            )
            continue
        try:
            text = decode(content.removeprefix(UTF8_BOM), source.encodings)
        except UnicodeDecodeError as error:
            yield Rejection(
                reason="bad_encoding",
                detail=f"byte {byte + error.start}: {error.reason}",
                position=position,
                byte=byte,
            )
            continue
        doc_id = f"{name}#{position}" if source.split_paragraphs else name
        yield RawDocument(text=text, position=position, byte=byte, doc_id=doc_id, values=values)


def _whole(part: Part, limit: int) -> Iterator[tuple[int, bytes | None, int]]:
    held: list[bytes] = []
    size = 0
    for line in read_lines(part.file.path, limit=limit):
        size += line.length + 1
        if line.content is None or size > limit:
            yield 0, None, size
            return
        held.append(line.content)
    if size:
        yield 0, b"\n".join(held), size


def _paragraphs(part: Part, limit: int) -> Iterator[tuple[int, bytes | None, int]]:
    held: list[bytes] = []
    size, start, over = 0, 0, False
    for line in read_lines(part.file.path, limit=limit):
        content = line.content
        if content is not None and not content.strip():
            if size:
                yield start, None if over else b"\n".join(held), size
            held, size, over = [], 0, False
            continue
        if not size:
            start = line.offset
        size += line.length + 1
        over = over or content is None or size > limit
        if over:
            held = []
        elif content is not None:
            held.append(content)
    if size:
        yield start, None if over else b"\n".join(held), size
