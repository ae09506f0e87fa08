"""Parquet files and Arrow streams (saved Hugging Face datasets), in small record batches.

Rows are numbered through the file from one. Dates keep the precision that their type has:
``date32`` is a day, a timestamp without zone is a wall-clock time.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.sources.rows import (
    dating_fields,
    dotted_names,
    flat_row,
    row_document,
    wanted_fields,
)
from headrace.corpus.sources.units import InputFile, Part, unit_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.corpus.source_config import RowSource
    from headrace.corpus.sources.context import ReadContext

_BATCH_ROWS = 256
# What the library raises on damage, besides its own: names that are no text, sizes that are none.
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, TypeError, KeyError)
_FOOTED = b"ARROW1"
_READ_BYTES = 1 << 20
_BATCH_BYTES = 4 << 20  # of columns as the file states their size; a batch is held as objects too


def split_parquet(file: InputFile) -> Iterator[tuple[int, int, int]]:
    """Runs of row groups of about a unit's size; a file that cannot be read is one range."""
    try:
        metadata = pq.read_metadata(file.path)
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    except _DAMAGE:
        yield 0, -1, file.num_bytes
        return
    wanted = unit_bytes(sum(sizes))
    if sum(sizes) < 2 * wanted or len(sizes) < 2:
        yield 0, -1, file.num_bytes
        return
    start, held = 0, 0
    for index, size in enumerate(sizes):
        held += size
        if held >= wanted or index == len(sizes) - 1:
            yield start, index + 1, held
            start, held = index + 1, 0


def read_parquet(
    source: RowSource, part: Part, context: ReadContext
) -> Iterator[RawDocument | Rejection]:
    """Rows of a Parquet part."""
    context.num_positions = 0  # rows are numbered through the file
    try:
        # With a buffer a column is read as it goes, not in whole row groups.
        file = pq.ParquetFile(part.file.path, buffer_size=_READ_BYTES)
        names = file.schema_arrow.names
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    except _DAMAGE as error:
        yield Rejection(reason="corrupt_file", detail=f"not a whole Parquet file: {error}")
        return
    with file:
        columns = _present(source, context, names)
        missing = _missing_text(source, names)
        if missing is not None:
            yield missing
            return
        stop = len(groups) if part.stop == -1 else part.stop
        first = sum(group.num_rows for group in groups[: part.start])
        for number in range(part.start, stop):
            num_rows = groups[number].num_rows
            if num_rows == 0:
                continue
            fitting = _BATCH_BYTES * num_rows // max(groups[number].total_byte_size, 1)
            batches = file.iter_batches(
                max(1, min(_BATCH_ROWS, fitting)), row_groups=[number], columns=columns
            )
            # A damaged count is not believed beyond a row a byte.
            last = first + min(num_rows, part.file.num_bytes)
            yield from _rows(source, batches, context, first, last)
            first += num_rows


def read_arrow(
    source: RowSource, part: Part, context: ReadContext
) -> Iterator[RawDocument | Rejection]:
    """Rows of an Arrow file: a stream as ``datasets.save_to_disk`` writes it, or Feather."""
    try:
        with pa.memory_map(str(part.file.path)) as mapped, _opened(mapped) as stream:
            missing = _missing_text(source, stream.schema.names)
            if missing is not None:
                yield missing
                return
            columns = _present(source, context, stream.schema.names)
            batches = (
                batch.slice(start, _BATCH_ROWS).select(columns)
                for batch in _record_batches(stream)
                for start in range(0, batch.num_rows, _BATCH_ROWS)
            )
            yield from _rows(source, batches, context, 0, None)
    except _DAMAGE as error:
        yield Rejection(reason="corrupt_file", detail=f"not a whole Arrow file: {error}")
    context.num_positions = 0


def _opened(mapped: pa.MemoryMappedFile) -> Any:
    """A stream, or a file with a footer (Feather), by its first bytes."""
    is_file = mapped.read(len(_FOOTED)) == _FOOTED
    mapped.seek(0)
    return pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)


def _record_batches(opened: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(opened, pa.RecordBatchFileReader):
        return (opened.get_batch(number) for number in range(opened.num_record_batches))
    return iter(opened)


def _present(source: RowSource, context: ReadContext, names: list[str]) -> list[str]:
    """Wanted columns of those there are; of dotted names the record that holds the field."""
    wanted = (
        name if name in names else name.partition(".")[0] for name in wanted_fields(source, context)
    )
    return [name for name in dict.fromkeys(wanted) if name in names]


def _missing_text(source: RowSource, names: list[str]) -> Rejection | None:
    if source.text_field in names or source.text_field.partition(".")[0] in names:
        return None
    return Rejection(
        reason="bad_record",
        detail=f"no column {source.text_field!r}; the file has {', '.join(names[:20])}",
    )


def _rows(
    source: RowSource,
    batches: Iterator[pa.RecordBatch],
    context: ReadContext,
    first: int,
    last: int | None,
) -> Iterator[RawDocument | Rejection]:
    """Rows ``first + 1`` to ``last``; those that cannot be reached are rejected one by one."""
    position = first
    fields = dating_fields(source, context)
    dotted = dotted_names(source, context)
    read = _columns(batches)
    while True:
        try:
            num_rows, columns = next(read)
        except StopIteration:
            return
        except _DAMAGE as error:
            for lost in range(position, max(position + 1, last or 0)):
                yield Rejection(
                    reason="corrupt_file",
                    detail=f"unreadable after row {position}: {error}",
                    position=lost + 1,
                )
            return
        for index in range(num_rows):
            position += 1
            row: Mapping[str, Any] = {name: values[index] for name, values in columns.items()}
            if dotted:
                row = flat_row(row, dotted)
            text = row.get(source.text_field)
            if isinstance(text, UnicodeDecodeError):
                yield Rejection(reason="bad_encoding", detail=str(text), position=position)
            elif isinstance(text, str | bytes) and len(text) > context.max_bytes:
                yield Rejection(
                    reason="too_long",
                    detail=f"{len(text)} characters; max_document_bytes is {context.max_bytes}",
                    position=position,
                )
            else:
                yield row_document(source, row, fields, position=position, byte=None)


def _columns(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    for batch in batches:
        yield (
            batch.num_rows,
            {
                name: _values(column)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            },
        )


def _values(column: pa.Array) -> list[Any]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        return _timestamps(column)
    if pa.types.is_date(kind):
        days = column.cast(pa.date32()).cast(pa.int32()).to_pylist()
        return [None if day is None else _day(day) for day in days]
    try:
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped
    except UnicodeDecodeError:
        return [_one(item) for item in column]


def _one(item: Any) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError as error:
        return error


def _day(days: int) -> date | str:
    try:
        return date(1970, 1, 1) + timedelta(days=days)
    except OverflowError:
        return f"day {days} of the epoch"  # not an instant: rejected where dates are read


def _timestamps(column: pa.Array) -> list[Any]:
    zone = column.type.tz
    instants = column.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64()).to_pylist()
    epoch = datetime(1970, 1, 1, tzinfo=UTC if zone else None)

    def moment(value: int) -> datetime | str:
        try:
            return epoch + timedelta(microseconds=value)
        except OverflowError:
            return f"microsecond {value} of the epoch"

    return [None if value is None else moment(value) for value in instants]
