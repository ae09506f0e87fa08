"""Text and token rows of Parquet parts, a record batch at a time.

Checks whole columns at once and names the row at fault. Reads only the columns it needs.
Does not choose files and does not tokenise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.batch import IGNORE_INDEX
from headrace.data.parts import parquet_batches, parquet_columns
from headrace.data.rows import (
    MAX_ID,
    TokenChunk,
    bad_row,
    check_ignored,
    check_label_count,
    month_of,
    name_the_column,
)
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from headrace.data.parts import Part

CHUNK_ROWS = 1024


def _batches(part: Part, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """``(first row, record batch)``; only columns that the file has are read."""
    names = parquet_columns(part.path)
    if columns[0] not in names:
        have = ", ".join(map(repr, names))
        tokens = "set type: of this dataset to what the file holds"
        raise DataError(
            f"{part.file} has no column {columns[0]!r} (it has {have})",
            remedy=tokens if columns[0] == "input_ids" else name_the_column("text_field", names),
        )
    wanted = [name for name in columns if name in names]
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise DataError(
            f"{part.file} has {names.count(twice[0])} columns named {twice[0]!r}",
            remedy="keep one of them",
        )
    yield from parquet_batches(part, wanted, CHUNK_ROWS)


def _first_null(column: Any) -> int:
    return int(column.is_null().to_numpy(zero_copy_only=False).argmax())


def parquet_texts(
    part: Part, field: str, date_field: str | None = None
) -> Iterator[tuple[list[str], npt.NDArray[np.int32] | None]]:
    """Chunks of the texts of a part, with the month of each where dates are asked for.

    Raises:
        DataError: naming the column or row at fault.
    """
    file = part.path
    for first, batch in _batches(part, [field, *_given(date_field)]):
        column = batch.column(field)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not any(
            is_text(kind)
            for is_text in (
                pa.types.is_string,
                pa.types.is_large_string,
                pa.types.is_string_view,
            )
        ):
            raise DataError(
                f"{file}: column {field!r} is {column.type}, not text",
                remedy="set text_field: of this dataset to the column that holds the text",
            )
        if column.null_count:
            row = first + _first_null(column)
            raise bad_row(f"{file}: row {row}", f"{field!r} is null", "drop the row")
        if not batch.num_rows:
            continue
        try:
            texts = column.to_pylist()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}: rows from {first}: {field!r} holds bytes that are not UTF-8 ({error})",
                remedy="write the file again with text in UTF-8",
            ) from error
        yield texts, _months(file, first, batch, date_field)


def _given(date_field: str | None) -> list[str]:
    return [] if date_field is None else [date_field]


def _months(
    file: Path, first: int, batch: Any, date_field: str | None
) -> npt.NDArray[np.int32] | None:
    if date_field is None:
        return None
    if date_field not in batch.schema.names:
        raise DataError(
            f"{file} has no column {date_field!r}",
            remedy="set date_field: of this dataset to the column of the date, or remove it",
        )
    values = batch.column(date_field).to_pylist()
    return np.array(
        [
            month_of(f"{file}: row {row}", date_field, value)
            for row, value in enumerate(values, first)
        ],
        np.int32,
    )


def parquet_tokens(part: Part, date_field: str | None = None) -> Iterator[TokenChunk]:
    """Chunks of the token rows of a part.

    Raises:
        DataError: naming the column or row at fault.
    """
    file = part.path
    for first, batch in _batches(part, ["input_ids", "labels", *_given(date_field)]):
        if not batch.num_rows:
            continue
        ids, lengths = _flat_lists(file, first, batch.column("input_ids"), "input_ids", lowest=0)
        labels = None
        if "labels" in batch.schema.names:
            labels, label_lengths = _flat_lists(
                file, first, batch.column("labels"), "labels", lowest=IGNORE_INDEX
            )
            unequal = label_lengths != lengths
            if unequal.any():
                row = int(unequal.argmax())
                check_label_count(
                    f"{file}: row {first + row}", int(label_lengths[row]), int(lengths[row])
                )
            check_ignored(f"{file}: rows from {first}", labels)
        yield TokenChunk(
            input_ids=ids,
            lengths=lengths,
            labels=labels,
            months=_months(file, first, batch, date_field),
        )


def _flat_lists(
    file: Path, first: int, column: Any, name: str, *, lowest: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Values and lengths of a list column, checked."""
    kind = column.type
    is_list = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise DataError(
            f"{file}: column {name!r} is {kind}, not lists of integers",
            remedy="a tokens file has input_ids: list<int32>, and labels of equal length if any",
        )
    if column.null_count:
        row = first + _first_null(column)
        raise bad_row(f"{file}: row {row}", f"{name!r} is null", "drop the row")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = column.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    wrong = np.zeros(len(values), bool)
    if flat.null_count:
        wrong = flat.is_null().to_numpy(zero_copy_only=False)
    wrong = wrong | (values < lowest) | (values > MAX_ID)
    if wrong.any():
        index = int(wrong.argmax())
        row = first + int(np.searchsorted(np.cumsum(lengths), index, side="right"))
        raise bad_row(
            f"{file}: row {row}",
            f"{name} holds {values[index]}, which is no token id",
            "token ids start at 0",
        )
    return values.astype(np.int32), lengths
