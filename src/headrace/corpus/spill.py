"""Fixed-width records in buckets, on disk once they outgrow a small memory.

Everything that compares documents with each other (duplicates, sampling) goes through here:
records are put into buckets by key, and one bucket at a time is read back and sorted. Memory
is bounded by ``memory_bytes`` and the largest bucket, whatever the number of documents.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

BUCKET_BYTES = 24 << 20
_MAX_BUCKETS = 1024


def num_buckets_for(num_records: int, dtype: np.dtype[np.void]) -> int:
    """A power of two that makes buckets of about ``BUCKET_BYTES``."""
    wanted = max(1, -(-num_records * dtype.itemsize // BUCKET_BYTES))
    return min(_MAX_BUCKETS, 1 << (wanted - 1).bit_length())


def bucket_of(keys: NDArray[np.uint64], num_buckets: int) -> NDArray[np.int64]:
    """The bucket of 64-bit keys by their top bits; ``num_buckets`` is a power of two."""
    if num_buckets == 1:
        return np.zeros(keys.shape, dtype=np.int64)
    shift = np.uint64(64 - (num_buckets.bit_length() - 1))
    return (keys >> shift).astype(np.int64)


class Spill:
    """Buckets of records of one type; append, then read each bucket."""

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[np.void],
        num_buckets: int,
        *,
        memory_bytes: int = 32 << 20,
    ) -> None:
        """Use ``folder`` for what outgrows ``memory_bytes``; what an earlier run left goes."""
        self.dtype = dtype
        self.num_buckets = num_buckets
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._held: dict[int, list[NDArray[np.void]]] = {}
        self._held_bytes = 0
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, buckets: NDArray[np.int64], records: NDArray[np.void]) -> None:
        """Append records; ``buckets`` gives each one's place."""
        if records.size == 0:
            return
        order = np.argsort(buckets, kind="stable")
        sorted_buckets, sorted_records = buckets[order], records[order]
        edges = np.flatnonzero(np.diff(sorted_buckets)) + 1
        starts = np.concatenate([[0], edges])
        for start, piece in zip(starts, np.split(sorted_records, edges), strict=True):
            self._held.setdefault(int(sorted_buckets[start]), []).append(piece)
        self._held_bytes += records.nbytes
        if self._held_bytes > self._memory_bytes:
            self._flush()

    def _flush(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for bucket, pieces in self._held.items():
            with (self._folder / f"{bucket}.bin").open("ab") as file:
                for piece in pieces:
                    file.write(piece.tobytes())
        self._held.clear()
        self._held_bytes = 0

    def bucket(self, number: int) -> NDArray[np.void]:
        """All records of a bucket, in the order they came."""
        pieces = self._held.get(number, [])
        path = self._folder / f"{number}.bin"
        if path.exists():
            pieces = [np.fromfile(path, dtype=self.dtype), *pieces]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=self.dtype)

    def __iter__(self) -> Iterator[NDArray[np.void]]:
        """Buckets in order, the empty ones too."""
        for number in range(self.num_buckets):
            yield self.bucket(number)

    def close(self) -> None:
        """Forget everything and remove the files."""
        self._held.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
