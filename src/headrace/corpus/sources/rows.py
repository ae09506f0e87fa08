"""Records with named fields (JSON lines, Parquet, Arrow) as documents.

A row is never repaired: a text that is no string, or an id that is no name, is a rejection with
its position. ``meta.date`` is the field ``date`` of the record in the field ``meta``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pydantic_core import from_json

from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.source_config import FineWebSource, RowSource
from headrace.corpus.sources.context import ReadContext, decode
from headrace.corpus.sources.streams import (
    UTF8_BOM,
    compression_of,
    foreign_file,
    read_lines,
)
from headrace.corpus.sources.units import InputFile, Part, byte_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

_DUMP_PREFIX = "CC-MAIN-"
_OLD_DUMP = re.compile(r"(?:\d{4}-)?(20\d\d)")  # CC-MAIN-2009-2010, CC-MAIN-2012
_BOM = "\ufeff"
_DUMP_DAYS = timedelta(days=45)  # crawls run into the weeks after the one they are named for


def wanted_fields(source: RowSource, context: ReadContext) -> tuple[str, ...]:
    """Columns a row source needs, without repeats."""
    names = [
        source.text_field,
        source.id_field,
        source.event_time_field,
        source.published_at_field,
        source.collected_at_field,
        *context.date_fields,
        *source.metadata_fields,
    ]
    if source.revision_field is not None:
        names.append(source.revision_field)
    if isinstance(source, FineWebSource):
        names.append("dump")
    return tuple(dict.fromkeys(names))


def dump_end(dump: object) -> date | None:
    """The last day a Common Crawl dump (``CC-MAIN-2013-20``, year and week) can have run to."""
    if not isinstance(dump, str) or not dump.startswith(_DUMP_PREFIX):
        return None
    if (old := _OLD_DUMP.fullmatch(dump.removeprefix(_DUMP_PREFIX))) is not None:
        return date(int(old[1]), 12, 31) + _DUMP_DAYS
    year, _, week = dump.removeprefix(_DUMP_PREFIX).partition("-")
    if not (year.isdecimal() and week.isdecimal() and len(year) == 4):
        return None
    try:
        return date.fromisocalendar(int(year), int(week), 7) + _DUMP_DAYS
    except ValueError:
        return None


def dating_fields(source: RowSource, context: ReadContext) -> tuple[tuple[str, str], ...]:
    """What dates a document: names in ``values``, each with the field of the row it is in."""
    fields = {name: name for name in context.date_fields}
    fields["event_time"] = source.event_time_field
    fields["published_at"] = source.published_at_field
    fields["collected_at"] = source.collected_at_field
    return tuple(fields.items())


def flat_row(row: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The row with fields of records inside it under their dotted names."""
    flat = dict(row)
    for name in names:
        value: Any = row
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            flat.setdefault(name, value)
    return flat


def dotted_names(source: RowSource, context: ReadContext) -> tuple[str, ...]:
    """Wanted fields that may lie inside other records."""
    return tuple(name for name in wanted_fields(source, context) if "." in name)


def row_document(
    source: RowSource,
    row: Mapping[str, Any],
    fields: tuple[tuple[str, str], ...],
    *,
    position: int,
    byte: int | None,
) -> RawDocument | Rejection:
    """One row as a document; ``fields`` are those of :func:`dating_fields`."""
    text, given_id = row.get(source.text_field), row.get(source.id_field)
    doc_id = None
    if given_id.__class__ is str and given_id:
        doc_id = given_id
    else:
        doc_id = _name_of(given_id)
        if doc_id is None and not _is_no_id(given_id):
            return Rejection(
                reason="bad_record",
                detail=f"{source.id_field} is {type(given_id).__name__}, not a string or integer",
                position=position,
                byte=byte,
            )
    if isinstance(text, bytes):  # a Parquet column without the note that it is text
        try:
            text = decode(text, source.encodings)
        except UnicodeDecodeError as error:
            return Rejection(
                reason="bad_encoding",
                detail=f"byte {error.start} of {source.text_field}: {error.reason}",
                position=position,
                byte=byte,
                doc_id=doc_id,
            )
    if not isinstance(text, str):
        missing = text is None
        return Rejection(
            reason="empty_text" if missing else "bad_record",
            detail=f"no {source.text_field}"
            if missing
            else f"{source.text_field} is {type(text).__name__}, not a string",
            position=position,
            byte=byte,
            doc_id=doc_id,
        )
    values = {name: row[field] for name, field in fields if field in row}
    if isinstance(source, FineWebSource):
        end = dump_end(row.get("dump"))
        values["dump_end"] = end
        if values.get("collected_at") is None:
            values["collected_at"] = end  # a fetch after its own crawl's end is a wrong clock
    revision = row.get(source.revision_field) if source.revision_field else None
    return RawDocument(
        text=text.removeprefix(_BOM),
        position=position,
        byte=byte,
        doc_id=doc_id,
        values=values,
        revision_key=None if revision is None else str(revision),
        metadata=_metadata(source, row) if source.metadata_fields else None,
    )


def _name_of(given: object) -> str | None:
    """An id that is no string, as one: integers, also as columns with gaps hold them; bytes."""
    if isinstance(given, bool):
        return None
    if isinstance(given, float) and given.is_integer():
        return str(int(given))
    if isinstance(given, bytes) and given:
        try:
            return given.decode()
        except UnicodeDecodeError:
            return given.hex()
    return str(given) if isinstance(given, (int, UUID)) else None


def _is_no_id(given: object) -> bool:
    return given is None or given in ("", b"") or given != given  # noqa: PLR0124 - NaN


def _metadata(source: RowSource, row: Mapping[str, Any]) -> dict[str, Any] | None:
    names = source.metadata_fields
    return {name: _plain(row[name]) for name in names if row.get(name) is not None} or None


def _plain(value: object) -> object:
    if isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).isoformat()
    return str(value)


def read_jsonl(
    source: RowSource, part: Part, context: ReadContext
) -> Iterator[RawDocument | Rejection]:
    """JSON lines of a part; blank lines are no records."""
    position = 0
    path = part.file.path
    if part.start == 0 and (foreign := foreign_file(path)) is not None:
        yield Rejection(reason=foreign[0], detail=foreign[1], byte=0)
        return
    fields = dating_fields(source, context)
    utf8_only = source.encodings == ("utf-8",)
    dotted = dotted_names(source, context)
    quoted = tuple({f'"{name.rpartition(".")[2]}"'.encode() for name in context.date_fields})
    stop = None if part.stop == -1 else part.stop
    for line in read_lines(path, limit=context.max_bytes, start=part.start, stop=stop):
        position += 1
        if line.content is None:
            yield Rejection(
                reason="too_long",
                detail=f"a line of {line.length} bytes; max_document_bytes is {context.max_bytes}",
                position=position,
                byte=line.offset,
            )
            continue
        content = line.content.removeprefix(UTF8_BOM)
        if not content or content.isspace():
            continue
        try:
            row = from_json(content if utf8_only else decode(content, source.encodings))
        except ValueError as error:
            yield _unreadable(content, source, str(error), position, line.offset)
            continue
        if not isinstance(row, dict):
            yield Rejection(
                reason="bad_json",
                detail=f"the line is a {type(row).__name__}; JSON lines hold one object a line",
                position=position,
                byte=line.offset,
            )
            continue
        for name in quoted:
            if content.count(name) > 1 and (twice := _key_given_twice(content, name)):
                detail = f"the key {twice} comes twice: which date counts is not known"
                yield Rejection(
                    reason="bad_json", detail=detail, position=position, byte=line.offset
                )
                break
        else:
            if dotted:
                row = flat_row(row, dotted)
            yield row_document(source, row, fields, position=position, byte=line.offset)
    context.num_positions = position


def _key_given_twice(content: bytes, name: bytes) -> str | None:
    """The key of a date, where one object of the line has it twice."""
    wanted = name.decode().strip('"')
    found: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> None:
        if sum(key == wanted for key, _ in items) > 1:
            found.append(wanted)

    try:
        json.loads(content, object_pairs_hook=pairs)
    except ValueError:  # the reader is more lenient, and has been content
        return None
    return found[0] if found else None


def _unreadable(
    content: bytes, source: RowSource, message: str, position: int, byte: int
) -> Rejection:
    try:
        decode(content, source.encodings)
    except UnicodeDecodeError as error:
        reason, detail = "bad_encoding", f"byte {error.start} of the line: {error.reason}"
    else:
        reason, detail = "bad_json", message
        if 4 * content.count(0) > len(content):
            reason, detail = "bad_encoding", "a quarter of the bytes are zero, as in UTF-16"
    return Rejection(reason=reason, detail=detail, position=position, byte=byte)


def split_jsonl(file: InputFile) -> Iterator[tuple[int, int, int]]:
    """Byte ranges for plain files; a compressed file is one range."""
    if compression_of(file.path) is None:
        yield from byte_ranges(file.num_bytes)
    else:
        yield 0, -1, file.num_bytes
