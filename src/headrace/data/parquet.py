"""Text and token rows of Parquet files, a record batch at a time.

Checks whole columns at once and names the row at fault. Reads only the columns it needs.
Does not choose files and does not tokenise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.batch import IGNORE_INDEX
from headrace.data.rows import MAX_ID, TokenChunk, bad_row, check_ignored, check_label_count
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

CHUNK_ROWS = 1024


def _batches(file: Path, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """``(first row, record batch)``; only columns that the file has are read."""
    try:
        with pq.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            if columns[0] not in names:
                have = ", ".join(map(repr, names))
                raise DataError(
                    f"{file} has no column {columns[0]!r} (it has {have})",
                    remedy="set type: and text_field: of this dataset to what the file holds",
                )
            wanted = [name for name in columns if name in names]
            if twice := [name for name in wanted if names.count(name) > 1]:
                raise DataError(
                    f"{file} has {names.count(twice[0])} columns named {twice[0]!r}",
                    remedy="keep one of them",
                )
            first = 0
            for batch in parquet.iter_batches(batch_size=CHUNK_ROWS, columns=wanted):
                yield first, batch
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:  # damaged pages are an OSError
        raise DataError(
            f"{file} cannot be read as Parquet ({error})", remedy="write the file again"
        ) from error


def _first_null(column: Any) -> int:
    return int(column.is_null().to_numpy(zero_copy_only=False).argmax())


def parquet_texts(file: Path, field: str) -> Iterator[list[str]]:
    """Chunks of the texts of one file.

    Raises:
        DataError: naming the column or row at fault.
    """
    for first, batch in _batches(file, [field]):
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
        yield texts


def parquet_tokens(file: Path) -> Iterator[TokenChunk]:
    """Chunks of the token rows of one file.

    Raises:
        DataError: naming the column or row at fault.
    """
    for first, batch in _batches(file, ["input_ids", "labels"]):
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
        yield TokenChunk(input_ids=ids, lengths=lengths, labels=labels)


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
