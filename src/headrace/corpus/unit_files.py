"""The files of a unit's folder: their schemas, and writing them in a stream.

``documents.parquet``  sound documents available by the latest cutoff
``index.bin``          a row for every sound document, later ones too (they are needed to see
                       near-duplicates across the cutoff, and can never displace an earlier one)
``signatures.bin``     MinHash signatures of the same rows, uint32
``ids.bin``            ids of the same rows as UTF-8, one after the other; ``id_ends.bin`` their
                       ends, int64: what duplicates are called is looked up row by row
``rejected.parquet``   everything else, with reason and position

Row groups are batches; nothing is held longer than one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.corpus.files import canonical_json
from headrace.corpus.fingerprints import short_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.corpus.cutoff import Dated
    from headrace.corpus.document import RawDocument
    from headrace.corpus.signing import Fingerprints

UNIT_VERSION = 1
"""Changes whenever a unit's folder holds other files for the same results."""

INDEX = np.dtype(
    [
        ("text_key", "<u8", (2,)),  # exact key of the folded text
        ("id_key", "<u8"),
        ("revision_key", "<u8"),  # 0: none
        ("available_at", "<i8"),
        ("row", "<i8"),  # in documents.parquet; -1 - row of rejected.parquet for later ones
        ("num_bytes", "<i8"),
        ("upper_bound", "u1"),
    ]
)

_INSTANT = pa.timestamp("us", "UTC")
_MENTION = pa.struct(
    [
        ("day", pa.int32()),
        ("kind", pa.int8()),
        ("setting", pa.int8()),
        ("offset", pa.int32()),
    ]
)
DOCUMENTS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("source", pa.string()),
        ("text", pa.large_string()),
        ("event_time", _INSTANT),
        ("published_at", _INSTANT),
        ("available_at", _INSTANT),
        ("collected_at", _INSTANT),
        ("available_at_rule", pa.string()),
        ("upper_bound", pa.bool_()),
        ("language", pa.string()),
        ("boilerplate_share", pa.float32()),
        ("revision_key", pa.string()),
        ("metadata", pa.string()),
        ("file", pa.string()),
        ("position", pa.int64()),
    ]
)
UNIT_DOCUMENTS = DOCUMENTS.append(pa.field("mentions", pa.list_(_MENTION)))
REPEATED = ("source", "available_at_rule", "language", "file")
"""Columns worth a dictionary; building one of texts only costs time."""
REJECTED = pa.schema(
    [
        ("source", pa.string()),
        ("file", pa.string()),
        ("position", pa.int64()),
        ("byte", pa.int64()),
        ("doc_id", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("available_at", _INSTANT),
    ]
)


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A dated document on its way through the checks."""

    raw: RawDocument
    doc_id: str
    file: str
    part: int
    dated: Dated
    encoded: bytes
    language: str = "und"
    boilerplate: float = 0.0


class UnitWriter:
    """Streams the unit's files; row groups are batches."""

    def __init__(self, folder: Path, *, signed: bool) -> None:
        """Open the files; ``signed`` where near-duplicates are sought."""
        self._documents = pq.ParquetWriter(
            folder / "documents.parquet",
            UNIT_DOCUMENTS,
            compression="zstd",
            compression_level=1,
            use_dictionary=list(REPEATED),
        )
        self._rejected = pq.ParquetWriter(
            folder / "rejected.parquet",
            REJECTED.append(pa.field("part", pa.int32())),
            compression="zstd",
        )
        self._index = (folder / "index.bin").open("wb")
        self._ids = (folder / "ids.bin").open("wb")
        self._id_ends = (folder / "id_ends.bin").open("wb")
        self._num_id_bytes = 0
        self._signatures = (folder / "signatures.bin").open("wb") if signed else None
        self.num_documents = 0
        self.num_rejected = 0
        self.num_rows = 0

    def add_rejected(self, rows: list[dict[str, Any]]) -> None:
        """Rows of :data:`REJECTED` and the number of the part they come from."""
        if rows:
            schema = REJECTED.append(pa.field("part", pa.int32()))
            self._rejected.write_table(pa.Table.from_pylist(rows, schema=schema))
            self.num_rejected += len(rows)

    def add_later(
        self, items: list[Candidate], marks: Fingerprints, rejected_rows: list[int]
    ) -> None:
        """Index rows of documents after the latest cutoff, which are rows of the rejected."""
        if items:
            self._add_rows(items, marks, [-1 - row for row in rejected_rows])

    def add_documents(
        self,
        source: str,
        items: list[Candidate],
        texts: pa.Array,
        marks: Fingerprints,
        mentions: list[list[dict[str, int]]],
    ) -> None:
        """Documents of one batch: texts as an array, fingerprints, mentions."""
        if not items:
            return
        rows = range(self.num_documents, self.num_documents + len(items))
        self._add_rows(items, marks, list(rows))
        self.num_documents += len(items)
        dated = [item.dated for item in items]
        columns = {
            "doc_id": [printable(item.doc_id) for item in items],
            "source": [source] * len(items),
            "text": texts,
            "event_time": [d.event_time for d in dated],
            "published_at": [d.published_at for d in dated],
            "available_at": [d.available_at for d in dated],
            "collected_at": [d.collected_at for d in dated],
            "available_at_rule": [d.rule for d in dated],
            "upper_bound": [d.upper_bound for d in dated],
            "language": [item.language for item in items],
            "boilerplate_share": [item.boilerplate for item in items],
            "revision_key": [item.raw.revision_key for item in items],
            "metadata": [
                None if item.raw.metadata is None else canonical_json(item.raw.metadata)
                for item in items
            ],
            "file": [item.file for item in items],
            "position": [item.raw.position for item in items],
            "mentions": mentions,
        }
        arrays = [
            column
            if isinstance(column, pa.Array)
            else pa.array(column, UNIT_DOCUMENTS.field(n).type)
            for n, column in columns.items()
        ]
        self._documents.write_table(pa.Table.from_arrays(arrays, schema=UNIT_DOCUMENTS))

    def _add_rows(self, items: list[Candidate], marks: Fingerprints, rows: list[int]) -> None:
        index = np.zeros(len(items), dtype=INDEX)
        index["text_key"] = marks.keys
        index["id_key"] = [short_key(item.doc_id) for item in items]
        index["revision_key"] = [
            0 if item.raw.revision_key is None else short_key(item.raw.revision_key)
            for item in items
        ]
        index["available_at"] = [item.dated.available_at for item in items]
        index["row"] = rows
        index["num_bytes"] = [len(item.encoded) for item in items]
        index["upper_bound"] = [item.dated.upper_bound for item in items]
        self._index.write(index.tobytes())
        ids = [printable(item.doc_id).encode() for item in items]
        ends = np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids))) + self._num_id_bytes
        self._ids.write(b"".join(ids))
        self._id_ends.write(ends.tobytes())
        self._num_id_bytes = int(ends[-1])
        self.num_rows += len(items)
        if self._signatures is not None and marks.signatures is not None:
            self._signatures.write(marks.signatures.tobytes())

    def close(self) -> None:
        """Finish the files."""
        self._documents.close()
        self._rejected.close()
        self._index.close()
        self._ids.close()
        self._id_ends.close()
        if self._signatures is not None:
            self._signatures.close()


def row_groups(
    path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Row groups of a file of this package, each with the number of its first row.

    They are the batches in which it was written, so that one is always small enough to hold.
    """
    first = 0
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            for batch in file.read_row_group(number, columns=columns).combine_chunks().to_batches():
                yield first, batch
                first += batch.num_rows


def document_bytes(place: Path) -> NDArray[np.int64]:
    """UTF-8 bytes of a unit's documents, in the order of their rows."""
    index = read_index(place)
    sizes: NDArray[np.int64] = index["num_bytes"][index["row"] >= 0].astype(np.int64)
    return sizes


def read_index(place: Path) -> NDArray[np.void]:
    """The index rows of a unit's folder."""
    return np.fromfile(place / "index.bin", dtype=INDEX)


class UnitIds:
    """Ids of a unit's index rows, read from the disk one by one."""

    def __init__(self, place: Path) -> None:
        """Map the files; a unit without rows has none to map."""
        self._ids = np.memmap(place / "ids.bin", dtype=np.uint8, mode="r")
        self._ends = np.memmap(place / "id_ends.bin", dtype=np.int64, mode="r")

    def of(self, row: int) -> str:
        """The id of one row."""
        start = int(self._ends[row - 1]) if row else 0
        return self._ids[start : int(self._ends[row])].tobytes().decode()


def printable(text: str) -> str:
    """The text on one line, control characters escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]
