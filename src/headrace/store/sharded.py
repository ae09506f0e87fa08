"""Reads a folder of ``torch.distributed.checkpoint``: one tensor at a time, in one process.

Such a folder holds ``.metadata``, a pickle that says which piece of which tensor lies where, and
``__{rank}_{n}.distcp`` files of pieces, each as ``torch.save`` writes it. Invariants: the pickle is
never run (:mod:`headrace.store.plain_pickle`); sizes are checked against the files before memory is
taken; a tensor is whole or refused; memory grows by the tensor and one piece. No process group is
made and nothing is written.

Formats: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` of torch 2.2 to 2.13.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import CheckpointError
from headrace.store.plain_pickle import Name, Record, read_pickle
from headrace.store.torch_files import read_tensor
from headrace.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

METADATA = ".metadata"
_MOST_METADATA = 512 * MIB
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        "bfloat16", "float16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32",
        "int64", "float8_e4m3fn", "float8_e5m2",
    )
}  # fmt: skip
_KNOWN = {
    f"{_CHECKPOINT}.metadata.Metadata": "Metadata",
    f"{_CHECKPOINT}.metadata.MetadataIndex": "MetadataIndex",
    f"{_CHECKPOINT}.metadata.TensorStorageMetadata": "TensorStorageMetadata",
    f"{_CHECKPOINT}.metadata.BytesStorageMetadata": "BytesStorageMetadata",
    f"{_CHECKPOINT}.metadata.ChunkStorageMetadata": "ChunkStorageMetadata",
    f"{_CHECKPOINT}.metadata.TensorProperties": "TensorProperties",
    f"{_CHECKPOINT}.metadata.StorageMeta": "StorageMeta",
    f"{_CHECKPOINT}.metadata._MEM_FORMAT_ENCODING": "memory_format",
    f"{_CHECKPOINT}.filesystem._StorageInfo": "StorageInfo",
    f"{_SHARDED}.TensorProperties": "TensorProperties",  # before torch 2.3
    f"{_SHARDED}.MEM_FORMAT_ENCODING": "memory_format",
    "torch.Size": "Size",
    "torch.serialization._get_layout": "layout",
    "builtins.getattr": "getattr",  # by which Python 3.11.2 names a member of an enumeration
    "pathlib.PosixPath": "path",
    "pathlib._local.PosixPath": "path",  # of Python 3.13
    "pathlib.WindowsPath": "path",
    **{name: name for name in _DTYPES},
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of a tensor in a file.

    Attributes:
        offsets: its first element along every dimension.
        sizes: of the block.
        file: where it lies.
        start: first byte.
        length: in bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int

    def read(self, name: str) -> torch.Tensor:
        """The block of the tensor ``name``.

        Raises:
            CheckpointError: the file holds something else there.
        """
        return read_tensor(self.file, self.start, self.length, name)


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """One tensor and where its pieces lie.

    Attributes:
        path: its place in the nested state dict that was saved.
        dtype: of the elements.
        shape: of the whole.
        pieces: disjoint, and together the whole.
    """

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


class ShardedCheckpoint:
    """The tensors of a folder.

    Attributes:
        folder: where they lie.
        tensors: by their flat name.
    """

    def __init__(self, folder: Path) -> None:
        """Read ``.metadata`` and compare it with the files.

        Raises:
            CheckpointError: a save that was not finished, a damaged file, or contents that no
                tensor needs; nothing of them was run.
        """
        self.folder = folder
        metadata = _read_metadata(folder)
        self.tensors: dict[str, ShardedTensor] = {}
        try:
            self._describe(metadata)
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            raise _damaged(
                folder, f"{METADATA} has another layout than torch 2.2 to 2.13 write ({error})"
            ) from error

    def _describe(self, metadata: Record) -> None:
        folder = self.folder
        described = _dictionary(metadata.field("state_dict_metadata"), folder)
        places = _dictionary(metadata.field("planner_data") or {}, folder)
        stored = _stored(metadata, folder)
        for name, value in described.items():
            if isinstance(value, Record) and value.kind == "TensorStorageMetadata":
                path = places.get(name, (name,))
                self.tensors[name] = self._tensor(name, value, path, stored)
        files = {piece.file for piece in stored.values()}
        if sum(t.num_bytes for t in self.tensors.values()) > sum(f.stat().st_size for f in files):
            raise _damaged(folder, f"{METADATA} describes more bytes than there are")

    def _tensor(
        self, name: str, record: Record, path: Any, stored: dict[tuple[Any, ...], Piece]
    ) -> ShardedTensor:
        shape = _size(record.field("size"), name)
        pieces = []
        for chunk in record.field("chunks") or ():
            offsets = _size(chunk.field("offsets"), name)
            key = (name, offsets)
            if key not in stored:
                raise _damaged(self.folder, f"a piece of {name} at {offsets} is in no file")
            place = stored[key]
            sizes = _size(chunk.field("sizes"), name)
            pieces.append(
                Piece(
                    offsets=offsets,
                    sizes=sizes,
                    file=place.file,
                    start=place.start,
                    length=place.length,
                )
            )
        tensor = ShardedTensor(
            path=tuple(str(part) for part in path),
            dtype=_dtype(record.field("properties"), name, self.folder),
            shape=shape,
            pieces=tuple(pieces),
        )
        _check_whole(name, tensor, self.folder)
        return tensor

    def read(self, name: str) -> torch.Tensor:
        """One tensor, put together from its pieces.

        Raises:
            CheckpointError: a piece is not what the metadata says.
        """
        tensor = self.tensors[name]
        out = torch.empty(tensor.shape if len(tensor.pieces) > 1 else 0, dtype=tensor.dtype)
        for piece in tensor.pieces:
            value = piece.read(name)
            if value.dtype != tensor.dtype or tuple(value.shape) != piece.sizes:
                raise _damaged(
                    self.folder,
                    f"a piece of {name} is {value.dtype} {tuple(value.shape)}, and should be "
                    f"{tensor.dtype} {piece.sizes}",
                )
            if piece.sizes == tensor.shape:
                return value
            block = tuple(
                slice(start, start + size)
                for start, size in zip(piece.offsets, piece.sizes, strict=True)
            )
            out[block].copy_(value)
        return out

    def same(self, a: str, b: str) -> bool:
        """Two tensors are bitwise equal; compared piece by piece where they are cut alike.

        Raises:
            CheckpointError: a piece is not what the metadata says.
        """
        first, second = self.tensors[a], self.tensors[b]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        others = {(piece.offsets, piece.sizes): piece for piece in second.pieces}
        if others.keys() != {(piece.offsets, piece.sizes) for piece in first.pieces}:
            return torch.equal(self.read(a), self.read(b))
        return all(
            torch.equal(piece.read(a), others[piece.offsets, piece.sizes].read(b))
            for piece in first.pieces
        )


def _read_metadata(folder: Path) -> Record:
    file = folder / METADATA
    try:
        size = file.stat().st_size
        if size > _MOST_METADATA:
            raise _damaged(folder, f"{METADATA} has {format_bytes(size)}")
        data = file.read_bytes()
    except FileNotFoundError as error:
        pieces = sorted(folder.glob("*.distcp"))
        raise CheckpointError(
            f"{folder} has no {METADATA}"
            + (f" beside its {len(pieces)} .distcp files" if pieces else ""),
            remedy="it is written last: this save was not finished, take an earlier checkpoint"
            if pieces
            else "give a folder that torch.distributed.checkpoint has saved",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror or error}",
            remedy="make it readable, or copy it again",
        ) from error
    metadata = read_pickle(data, _KNOWN, str(file))
    if not isinstance(metadata, Record) or metadata.kind != "Metadata":
        raise _damaged(folder, f"{METADATA} holds no metadata of a checkpoint")
    return metadata


def _stored(metadata: Record, folder: Path) -> dict[tuple[Any, ...], Piece]:
    """Where every piece lies, by the tensor's name and the piece's offsets."""
    found: dict[tuple[Any, ...], Piece] = {}
    sizes: dict[Path, int] = {}
    for index, info in _dictionary(metadata.field("storage_data"), folder).items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise _damaged(folder, f"{METADATA} has another layout than torch 2.2 to 2.13 write")
        if index.field("offset") is None:
            continue  # an object that is no tensor; it is never read
        name = index.field("fqn")
        if info.field("transform_descriptors"):
            raise CheckpointError(
                f"{name} in {folder} is compressed or encrypted by an extension of its writer",
                remedy="save it again without extensions (FileSystemWriter's _extensions)",
            )
        file = _inside(folder, info.field("relative_path"))
        start, length = info.field("offset"), info.field("length")
        if file not in sizes:
            sizes[file] = file.stat().st_size if file.is_file() else -1
        if sizes[file] < 0:
            raise _damaged(folder, f"{file.name} is missing")
        if not _count(start) or not _count(length) or start + length > sizes[file]:
            raise _damaged(folder, f"{file.name} ends before the data of {name}")
        offsets = _size(index.field("offset"), str(name))
        found[name, offsets] = Piece(
            offsets=offsets, sizes=(), file=file, start=start, length=length
        )
    return found


def _check_whole(name: str, tensor: ShardedTensor, folder: Path) -> None:
    """The pieces lie within the tensor, do not overlap, and leave nothing out."""
    for piece in tensor.pieces:
        inside = len(piece.offsets) == len(piece.sizes) == len(tensor.shape) and all(
            offset + size <= whole
            for offset, size, whole in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
        )
        num_bytes = math.prod(piece.sizes) * tensor.dtype.itemsize
        if not inside or num_bytes > piece.length:
            raise _damaged(folder, f"a piece of {name} does not fit into it, or into its file")
    covered = sum(math.prod(piece.sizes) for piece in tensor.pieces)
    filled = [piece for piece in tensor.pieces if math.prod(piece.sizes)]
    overlap = any(_overlap(a, b) for a, b in itertools.combinations(filled, 2))
    if covered != math.prod(tensor.shape) or overlap:
        raise _damaged(
            folder, f"the pieces of {name} hold {covered} of {math.prod(tensor.shape)} elements"
        )


def _overlap(a: Piece, b: Piece) -> bool:
    return all(
        max(i, j) < min(i + m, j + n)
        for i, m, j, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _inside(folder: Path, relative: Any) -> Path:
    """A file of the folder; a path that leads out of it is refused."""
    path = PurePosixPath(str(relative))
    if path.is_absolute() or ".." in path.parts or not isinstance(relative, str):
        raise _damaged(folder, f"{METADATA} names a file outside of it: {relative!r}")
    return folder / path


def _dictionary(value: Any, folder: Path) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _damaged(folder, f"{METADATA} has another layout than torch 2.2 to 2.13 write")
    return value


def _size(value: Any, name: str) -> tuple[int, ...]:
    """A ``torch.Size``."""
    inner = value.arguments[0] if isinstance(value, Record) and value.arguments else ()
    if not isinstance(value, Record) or value.kind != "Size" or not all(map(_count, inner)):
        raise CheckpointError(
            f"the metadata of {name} has no usable sizes", remedy="copy the checkpoint again"
        )
    return tuple(inner)


def _count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _dtype(properties: Any, name: str, folder: Path) -> torch.dtype:
    """The first of a tensor's properties."""
    state = properties.state if isinstance(properties, Record) else None
    if isinstance(state, dict):
        state = (state.get("dtype"),)
    kind = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(kind, Name) or kind.kind not in _DTYPES:
        raise _damaged(folder, f"{name} has a type that headrace does not know")
    dtype: torch.dtype = _DTYPES[kind.kind]
    return dtype


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is not a whole checkpoint: {what}",
        remedy="copy it again, or take an earlier one",
    )


def find_folders(source: Path) -> Iterator[Path]:
    """The sharded folders of a trainer's checkpoint: ``source``, or its direct subfolders."""
    if (source / METADATA).is_file() or any(source.glob("*.distcp")):
        yield source
        return
    for path in sorted(source.iterdir()):
        if path.is_dir() and ((path / METADATA).is_file() or any(path.glob("*.distcp"))):
            yield path
