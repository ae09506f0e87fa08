"""Digests of what a checkpoint holds, so that a changed bit is found and named.

Owns ``digests.json``: for every safetensors file a digest of its header and one of each tensor, for
every other file one of the whole. They are made from the bytes that are written and compared with
the bytes that are read, in the same pass, a tensor at a time. Invariant: what is read from a folder
that has digests is what was written, or an error names it. Protects from faults, not from people:
xxh3 is no signature. Knows no model.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import xxhash

from headrace.errors import DamagedCheckpointError
from headrace.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

DIGESTS = "digests.json"
_ALGORITHM = "xxh3_128"
_CHUNK = MIB  # stays in a core's cache between hashing and writing

Hasher = xxhash.xxh3_128


def digest(data: bytes | memoryview) -> str:
    """Of bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def json_digest(value: Mapping[str, Any]) -> str:
    """Of an object's contents, however its JSON is laid out."""
    stored = json.loads(json.dumps(value))  # keys become strings before they are sorted
    return digest(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode())


def chunks(data: memoryview) -> Iterator[memoryview]:
    """Pieces to be hashed and written one after the other."""
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor as a file holds them; a contiguous one is not copied."""
    import torch  # noqa: PLC0415 - the digests of files need none

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_digests(folder: Path, weights: Mapping[str, Mapping[str, Any]]) -> str:
    """Write ``digests.json`` of a folder that has all its other files but the record.

    Args:
        folder: is read, but for the files in ``weights``.
        weights: by name of a safetensors file: ``header`` and ``tensors``.

    Returns:
        The digest of ``digests.json``.
    """
    files: dict[str, Mapping[str, Any]] = dict(weights)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files:
            files[name] = {"whole": digest(path.read_bytes())}
    text = json.dumps({"algorithm": _ALGORITHM, "files": files}, indent=0, sort_keys=True)
    (folder / DIGESTS).write_text(text + "\n", encoding="utf-8")
    return digest((folder / DIGESTS).read_bytes())


class Digests:
    """What ``digests.json`` of a folder says.

    Attributes:
        files: by name: ``whole``, or ``header`` and ``tensors``.
    """

    def __init__(self, folder: Path, files: dict[str, Any]) -> None:
        self._folder = folder
        self.files = files

    @classmethod
    def of(cls, folder: Path) -> Digests | None:
        """Those of a folder; None when it has none.

        Raises:
            DamagedCheckpointError: they are not readable.
        """
        try:
            text = (folder / DIGESTS).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(f"{folder / DIGESTS}: {error}", folder=folder) from error
        try:
            found = json.loads(text)
            if found["algorithm"] != _ALGORITHM:
                raise DamagedCheckpointError(
                    f"{folder / DIGESTS} has digests of the kind {found['algorithm']!r}, this "
                    f"headrace makes {_ALGORITHM}",
                    folder=folder,
                )
            return cls(folder, dict(found["files"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{folder / DIGESTS} is damaged: {error!r}", folder=folder
            ) from error

    def find_problem(self) -> str | None:
        """What differs in anything but the tensors' data, or None: small files and headers."""
        for name, entry in self.files.items():
            path = self._folder / name
            try:
                if "whole" in entry:
                    same = digest(path.read_bytes()) == entry["whole"]
                else:
                    with path.open("rb") as file:
                        length = file.read(8)
                        header = file.read(min(int.from_bytes(length, "little"), 100 * MIB))
                    same = digest(length + header) == entry["header"]
            except (OSError, KeyError, TypeError) as error:
                return f"{name}: {error}"
            if not same:
                what = "it" if "whole" in entry else "its header"
                return f"{name} has changed since it was saved: {what} has another digest"
        return None

    def header(self, path: Path) -> str | None:
        """The digest of a safetensors file's header; None of any other file."""
        found = self.files.get(path.name)
        return found.get("header") if isinstance(found, dict) else None

    def check(self, path: Path, name: str, found: str) -> None:
        """Compare a tensor's digest with what was saved.

        Raises:
            DamagedCheckpointError: it is another one, or there is none.
        """
        try:
            wanted = self.files[path.name]["tensors"][name]
        except (KeyError, TypeError):
            wanted = None
        if found != wanted:
            raise changed(path, name)


def changed(path: Path, name: str) -> DamagedCheckpointError:
    """The error for a tensor whose bits are not those that were saved."""
    return DamagedCheckpointError(
        f"{name} in {path} has changed since it was saved: its digest is another one",
        folder=path.parent,
    )


def copy_checked(source: Path, target: Path, digests: Digests | None) -> None:
    """Copy a file and flush it; tensors are compared with their digests on the way.

    Small files and headers are those :meth:`Digests.find_problem` has found whole.

    Raises:
        DamagedCheckpointError: naming the first tensor that differs.
        OSError: the target cannot be written.
    """
    if digests is None or digests.header(source) is None:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
        return
    buffer = memoryview(bytearray(_CHUNK))
    with source.open("rb") as reader, target.open("wb") as writer:
        length = reader.read(8)
        header = reader.read(int.from_bytes(length, "little"))
        writer.write(length + header)
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            left, hasher = end - begin, Hasher()
            while left > 0:
                count = reader.readinto(buffer[: min(left, _CHUNK)])
                if not count:
                    raise changed(source, name)
                hasher.update(buffer[:count])
                writer.write(buffer[:count])
                left -= count
            digests.check(source, name, hasher.hexdigest())
        writer.flush()
        os.fsync(writer.fileno())
