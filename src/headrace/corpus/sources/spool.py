"""Streamed data sets, kept on the disk as they come, so that a build can be repeated.

A stream has no file to hash: its records are written to Parquet pieces first, and from then on
they are inputs like any other, with hashes in the manifest. The invariant: a piece is whole or
absent, and a download that was killed goes on after its last whole piece. What is kept is used
again until it is deleted, so pin ``revision`` to say what it is.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.corpus.files import canonical_json, hash_of, sync_file, write_text
from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from headrace.corpus.source_config import HfDatasetSource

PIECE_RECORDS = 20_000
_DONE = "_complete"  # readers of folders pass over names with an underscore


def spool_folder(source: HfDatasetSource, fields: tuple[str, ...], root: Path) -> Path:
    """Where a streamed source's records are kept."""
    key = hash_of(
        [
            source.dataset,
            source.config_name,
            source.split,
            source.revision,
            source.data_files,
            source.max_records,
            list(fields),
        ]
    )
    return root / f"{source.name}-{key[:16]}"


def spool(
    source: HfDatasetSource,
    fields: tuple[str, ...],
    root: Path,
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Bring a streamed source to the disk, or go on with it; its folder.

    Args:
        source: with ``dataset`` set.
        fields: columns to keep.
        root: the work folder's place for spools.
        progress: told the number of records after every piece.

    Raises:
        ConfigError: the package or the data set is not there.
        DataError: the stream has none of the wanted fields.
    """
    folder = spool_folder(source, fields, root)
    if (folder / _DONE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    pieces = sorted(folder.glob("part-*.parquet"))
    num_records = sum(pq.ParquetFile(piece).metadata.num_rows for piece in pieces)
    number = len(pieces)
    records = islice(_open(source, num_records), _left(source, num_records))
    while batch := list(islice(records, PIECE_RECORDS)):
        _write_piece(folder / f"part-{number:06d}.parquet", batch, fields, source)
        number += 1
        num_records += len(batch)
        progress(num_records)
    write_text(folder / _DONE, json.dumps({"records": num_records}))
    return folder


def _left(source: HfDatasetSource, num_records: int) -> int | None:
    return None if source.max_records is None else max(0, source.max_records - num_records)


def _open(source: HfDatasetSource, skip: int) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"source {source.name!r} is streamed and needs the package datasets",
            remedy="pip install 'headrace[scale]'",
        ) from error
    files = source.data_files
    try:
        stream = datasets.load_dataset(
            source.dataset,
            source.config_name,
            split=source.split,
            revision=source.revision,
            data_files=list(files) if isinstance(files, tuple) else files,
            streaming=True,
        )
        return iter(stream.skip(skip) if skip else stream)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"source {source.name!r}: data set {source.dataset!r} cannot be opened: {error}",
            remedy="check dataset, config_name, split, revision and the network",
        ) from error


def _write_piece(
    path: Path,
    batch: Iterable[Mapping[str, Any]],
    fields: tuple[str, ...],
    source: HfDatasetSource,
) -> None:
    rows = [{name: row[name] for name in fields if name in row} for row in batch]
    if not any(source.text_field in row for row in rows):
        raise DataError(
            f"source {source.name!r}: the stream has no field {source.text_field!r}",
            remedy="set text_field to one of the data set's columns",
        )
    temporary = path.with_name(f".tmp-{path.name}")
    pq.write_table(_table(rows, fields), temporary, compression="zstd")
    sync_file(temporary)
    temporary.replace(path)


def _table(rows: list[dict[str, Any]], fields: tuple[str, ...]) -> pa.Table:
    columns: dict[str, pa.Array] = {}
    for name in fields:
        values = [row.get(name) for row in rows]
        if all(value is None for value in values):
            continue
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            # Rows of different types: the reader will judge each one by its JSON.
            columns[name] = pa.array(
                [value if isinstance(value, str) else canonical_json(value) for value in values]
            )
    return pa.table(columns)
