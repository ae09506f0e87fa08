"""Embeddings as the audit takes them: arrays, files and loaders, matched to panel rows.

Owns the meeting of vectors and rows. The invariant: what :func:`load` returns has exactly one
finite row for every embedded panel row, in their order. It makes no embeddings
(:mod:`headrace.audit.embed` does).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.audit.panel import iso, name_rows
from headrace.audit.records import EmbeddingRecord
from headrace.audit.vector_cache import read_key, read_vectors
from headrace.errors import DataError

if TYPE_CHECKING:
    from headrace.audit.panel import Panel

Loader = Callable[[NDArray[np.intp]], NDArray[np.floating]]
UNKNOWN_STACK = {"stack": "not stated"}
_NPY = b"\x93NUMPY"
_LARGEST = 1e100


@dataclass(frozen=True, kw_only=True)
class EmbeddingSource:
    """Where a model's vectors come from.

    Attributes:
        values: an array with a row for each embedded panel row (or for every panel row), the
            path of such an ``.npy`` file, or a callable that is given embedded rows' positions
            and returns their vectors. Files and callables are read when their turn comes and
            dropped after it, so many twins need the memory of one.
        stack: what produced them: library versions, attention backend, device, dtype. Results
            of different stacks are not compared unless that is asked for.
        source: words for the report.
        weights, template, pooling, layer: as far as they are known.
        panel: hash of the panel whose rows were embedded, where it is known.
    """

    values: NDArray[np.floating] | Path | Loader
    stack: dict[str, str] = field(default_factory=lambda: dict(UNKNOWN_STACK))
    source: str = "array"
    weights: str | None = None
    template: str | None = None
    pooling: str | None = None
    layer: int | None = None
    panel: str | None = None

    def file_key(self, panel: str) -> dict[str, Any]:
        """What a file of these vectors says of them; ``panel`` is the hash of their rows."""
        return {
            "weights": self.weights,
            "template": self.template,
            "pooling": self.pooling,
            "layer": self.layer,
            "stack": self.stack,
            "source": self.source,
            "panel": panel,
        }

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits of the stack's parts."""
        text = "\n".join(f"{key}={self.stack[key]}" for key in sorted(self.stack))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def as_source(values: EmbeddingSource | NDArray[np.floating] | Path | Loader) -> EmbeddingSource:
    """Wrap a bare array, path or callable."""
    if isinstance(values, EmbeddingSource):
        return values
    if isinstance(values, Path):
        return source_from_file(values)
    return EmbeddingSource(values=values)


def source_from_file(path: Path) -> EmbeddingSource:
    """Vectors in an ``.npy`` file, whose stack is unknown, or in one that ``headrace embed`` wrote.

    Raises:
        DataError: a ``.parquet`` file that ``headrace embed`` did not write.
    """
    if path.suffix.lower() != ".parquet":
        return EmbeddingSource(values=path, source=path.name)
    key = read_key(path)
    return EmbeddingSource(
        values=path,
        stack=key["stack"],
        source=key["source"],
        weights=key["weights"],
        template=key["template"],
        pooling=key["pooling"],
        layer=key["layer"],
        panel=key.get("panel"),
    )


def load(
    name: str, source: EmbeddingSource, panel: Panel
) -> tuple[NDArray[np.floating], EmbeddingRecord]:
    """What :func:`load_vectors` gives, and its record."""
    values = load_vectors(name, source, panel)
    record = EmbeddingRecord(
        dimension=int(values.shape[1]),
        num_rows=len(values),
        source=source.source,
        sha256=hashlib.sha256(np.ascontiguousarray(values).data).hexdigest(),
        weights=source.weights,
        template=source.template,
        pooling=source.pooling,
        layer=source.layer,
    )
    return values, record


def load_vectors(name: str, source: EmbeddingSource, panel: Panel) -> NDArray[np.floating]:
    """Vectors of the embedded rows, checked.

    Raises:
        DataError: naming rows, for a wrong number of rows, values that are missing or infinite,
            vectors that are all the same, and files that are no such array.
    """
    values = source.values
    rows = panel.embedded_rows
    if isinstance(values, Path):
        values = _read(name, values)
    elif not isinstance(values, np.ndarray):
        values = values(rows)
    if values.ndim != 2 or not values.shape[1] or not np.issubdtype(values.dtype, np.floating):
        raise DataError(
            f"embedding {name!r} has shape {values.shape} and type {values.dtype}; a float array "
            "(rows, dimensions) is needed",
            remedy="save one vector a row: numpy.save(FILE, vectors.astype(numpy.float32))",
        )
    if len(values) == panel.num_rows != len(rows):
        values = values[rows]
    if len(values) != len(rows):
        turned = values.shape[1] == len(rows)
        raise DataError(
            _row_count(name, len(values), panel),
            remedy="save the transposed array: one vector a row"
            if turned
            else "embed the rows of this very panel, in its order; rows that have no vector are "
            "marked false in a column 'embedded'",
        )
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        raise DataError(
            f"embedding {name!r} is missing or infinite in panel {_panel_rows(~finite, panel)}",
            remedy="embed these rows again, or mark them false in a column 'embedded' of the panel",
        )
    size = float(np.maximum(values.max(), -values.min()))
    if size > _LARGEST:
        # Squares of huge numbers are none. A power of two rounds nothing.
        values = np.ldexp(values, -int(np.frexp(size)[1]))
    if (values.max(axis=0) == values.min(axis=0)).all():
        raise DataError(
            f"embedding {name!r} is the same vector in all {len(rows)} rows",
            remedy="check that prompts differ and that the last real token is pooled, not padding",
        )
    return values


def _panel_rows(chosen: NDArray[np.bool_], panel: Panel) -> str:
    """Words for embedded rows, as the panel counts them."""
    rows = np.zeros(panel.num_rows, dtype=bool)
    rows[panel.embedded_rows[chosen]] = True
    return name_rows(rows)


def _row_count(name: str, count: int, panel: Panel) -> str:
    rows = panel.embedded_rows
    wanted = f"{len(rows)} embedded rows" + (
        f" of {panel.num_rows}" if len(rows) < panel.num_rows else ""
    )
    text = f"embedding {name!r} has {count} rows, the panel {wanted}"
    if count < len(rows):
        row = rows[count]
        text += (
            f"; panel rows {row} ({panel.entities[panel.entity[row]]}, "
            f"{iso(panel.sessions[panel.session[row]])}) to {rows[-1]} have no vector"
        )
    else:
        text += f"; vectors {len(rows)} to {count - 1} have no panel row"
    return text


def _read(name: str, path: Path) -> NDArray[np.floating]:
    if not path.is_file():
        raise DataError(
            f"embedding {name!r}: no file at {path}",
            remedy="make it with headrace embed, or numpy.save",
        )
    if path.suffix.lower() == ".parquet":
        return read_vectors(path)
    with path.open("rb") as file:
        start = file.read(len(_NPY))
    if start != _NPY:
        kind = ", but a zip, such as .npz and .pt files" if start.startswith(b"PK") else ""
        raise DataError(
            f"embedding {name!r}: {path} is no array that numpy.save wrote{kind} (it starts with "
            f"{start!r})",
            remedy="read it with what wrote it, and save one array (rows, dimensions) a model: "
            "numpy.save(FILE, vectors)",
        )
    try:
        values: NDArray[np.floating] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"embedding {name!r}: {path} cannot be read as an .npy array: {error}",
            remedy="write it again: numpy.save(FILE, vectors.astype(numpy.float32)); an array of "
            "objects becomes one of numbers by numpy.stack(list(vectors)).astype(numpy.float32)",
        ) from error
    return values
