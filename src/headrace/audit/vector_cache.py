"""Vectors on disk: a cache of prompts, and files that carry their stack.

Owns two Parquet layouts. *Cache*: a folder a key (weights, template, pooling, layer and every
part of the stack), of parts with columns ``prompt`` (SHA-256 of the text) and ``vector``. *File*:
one row for each embedded panel row, column ``vector``, with the key in the schema's metadata.
The invariant: a part is written under a temporary name and renamed, so a killed run leaves
whole parts, and what they hold is found again only under exactly the key that made it.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_PART_ROWS = 4096
_META = b"headrace"


def cache_key(parts: dict[str, str]) -> str:
    """Sixteen hex digits of everything that shapes a vector."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class VectorCache:
    """Vectors of one key, appended to part by part."""

    def __init__(self, folder: Path, parts: dict[str, str]) -> None:
        """Open ``folder``/KEY; nothing is created before the first part."""
        self.parts = dict(parts)
        self.folder = folder / cache_key(parts)
        self._keys: list[bytes] = []
        self._vectors: list[NDArray[np.float32]] = []

    def load(self) -> dict[bytes, NDArray[np.float32]]:
        """Everything kept so far, by the prompt's SHA-256.

        Raises:
            DataError: a part that is not one of ours.
        """
        found: dict[bytes, NDArray[np.float32]] = {}
        for path in sorted(self.folder.glob("part-*.parquet")):
            try:
                table = pq.read_table(path)
                keys = table.column("prompt").to_pylist()
                vectors = _matrix(table)
            except (pa.ArrowException, KeyError, ValueError) as error:
                raise DataError(
                    f"{path} is not a part of an embedding cache ({error})",
                    remedy="delete it; its vectors are computed again",
                ) from error
            found.update(zip(keys, vectors, strict=True))
        return found

    def add(self, keys: Sequence[bytes], vectors: NDArray[np.float32]) -> None:
        """Keep vectors; written once a part is full."""
        self._keys += keys
        self._vectors.append(vectors)
        if len(self._keys) >= _PART_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is held as a part."""
        if not self._keys:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(b"".join(self._keys)).hexdigest()[:16]
        vectors = np.concatenate(self._vectors)
        table = pa.table(
            {"prompt": pa.array(self._keys, pa.binary(32)), "vector": _column(vectors)}
        )
        _write(table, self.folder / f"part-{name}.parquet", {"key": self.parts})
        self._keys, self._vectors = [], []


def write_vectors(path: Path, vectors: NDArray[np.floating], key: dict[str, Any]) -> None:
    """Write one vector a row, with what made them.

    Args:
        path: ``.parquet`` file.
        vectors: ``(n, D)``, in the order of the panel's embedded rows.
        key: JSON-ready: weights, template, pooling, layer, stack, source, panel.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(pa.table({"vector": _column(np.asarray(vectors, dtype=np.float32))}), path, key)


def read_key(path: Path) -> dict[str, Any]:
    """What made the vectors of a file that :func:`write_vectors` wrote.

    Raises:
        DataError: the file is missing or of another kind.
    """
    try:
        key: dict[str, Any] = json.loads((pq.read_schema(path).metadata or {})[_META])
    except FileNotFoundError as error:
        raise DataError(
            f"no vectors at {path}", remedy="check the path; headrace embed makes such files"
        ) from error
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise DataError(
            f"{path} was not written by headrace embed: it does not say what made its vectors",
            remedy="give an .npy array, or the file that headrace embed wrote",
        ) from error
    return key


def read_vectors(path: Path) -> NDArray[np.float32]:
    """``(n, D)`` of a file that :func:`write_vectors` wrote."""
    return _matrix(pq.read_table(path, columns=["vector"]))


def _column(vectors: NDArray[np.float32]) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


def _matrix(table: pa.Table) -> NDArray[np.float32]:
    chunks = [chunk.flatten().to_numpy() for chunk in table.column("vector").chunks]
    flat = np.concatenate(chunks) if chunks else np.zeros(0)
    matrix: NDArray[np.float32] = np.asarray(flat, dtype=np.float32).reshape(len(table), -1)
    return matrix


def _write(table: pa.Table, path: Path, key: dict[str, Any]) -> None:
    metadata = {_META: json.dumps(key, sort_keys=True).encode()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(table.replace_schema_metadata(metadata), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
