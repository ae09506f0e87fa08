"""Writing and reading safetensors files without a second copy of the data.

The library's own writer takes every tensor of a file as bytes at once; this one writes a header
and then streams each tensor from where it lies, so that saving needs no memory of the model's
size. Every file is flushed to the disk before the function returns.

Format: 8 bytes little-endian header length, a JSON header, the raw little-endian data
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.store.digests import Digests, Hasher, chunks, digest, tensor_bytes
from headrace.store.pulse import Pulse
from headrace.store.read_ahead import ReadAhead

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_COPY_AGAIN = "copy or download it again"
_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write CPU tensors and flush them to the disk; contiguous ones are not copied.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    with StreamWriter(path, tensors, metadata) as writer:
        for tensor in tensors.values():
            writer.write(tensor)


class StreamWriter:
    """Writes the tensors of one file one after another, as they are made.

    The file is flushed to the disk when the block ends well.

    Attributes:
        name: of the file.
        digests: of its header and of the tensors written so far.
    """

    def __init__(
        self,
        path: Path,
        described: Mapping[str, torch.Tensor],
        metadata: dict[str, str],
        *,
        pulse: Pulse | None = None,
    ) -> None:
        """Open the file and write its header.

        Args:
            path: the file.
            described: types and shapes by name, in order; the data may be on the meta device.
            metadata: of the header.
            pulse: told of every piece.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        self._pulse = pulse or Pulse()
        self._pulse.at(path)
        header: dict[str, object] = {"__metadata__": metadata}
        offset = 0
        for name, tensor in described.items():
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.nbytes],
            }
            offset += tensor.nbytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # data starts at a multiple of 8 bytes
        self._path = path
        self._num_bytes = offset
        self._wanted = list(described.values())[::-1]
        start = len(encoded).to_bytes(8, "little") + encoded
        self._names = list(described)[::-1]
        self.name = path.name
        self.digests: dict[str, Any] = {"header": digest(start), "tensors": {}}
        with self._writing():
            self._file = path.open("wb")
        try:
            with self._writing():
                self._file.write(start)
        except CheckpointError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        self.close()

    def write(self, tensor: torch.Tensor) -> None:
        """Write the next tensor.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        wanted = self._wanted.pop()
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
        hasher = Hasher()
        with self._writing():
            for piece in chunks(tensor_bytes(tensor.cpu())):
                hasher.update(piece)
                self._pulse.at(self._path)
                self._file.write(piece)
        self.digests["tensors"][self._names.pop()] = hasher.hexdigest()

    def finish(self) -> None:
        """Flush the file, which must have all its tensors, to the disk and close it.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        assert not self._wanted, "tensors are missing"
        self._pulse.at(self._path, flushes=self._num_bytes)
        with self._writing(), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file as it is."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"could not write {self._path}: {error.strerror}; {self._num_bytes} bytes were to "
                "be written",
                remedy="free space or choose another output_dir; earlier checkpoints are untouched",
            ) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, keys sorted."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    path.write_text(text + "\n")


def sync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_index(path: Path) -> dict[str, Path]:
    """Tensor name to file, for a folder that holds ``model.safetensors`` or an index.

    Raises:
        CheckpointError: there are no safetensors weights, or they are not whole.
    """
    single = path / "model.safetensors"
    if single.is_file():  # before an index, which may be left from an older save: as transformers
        return dict.fromkeys(tensor_names(single), single)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return read_weight_map(index)
    pickled = sorted(p.name for p in path.glob("*.bin"))
    found = f"; found {pickled[0]}, which is pickle and is never read" if pickled else ""
    raise CheckpointError(
        f"no safetensors weights in {path}{found}",
        remedy="save the model with safe_serialization (transformers' default)",
    )


def read_weight_map(index: Path) -> dict[str, Path]:
    """Tensor name to file, as an index in Hugging Face's format says.

    Raises:
        CheckpointError: it is not such an index, or names missing files.
    """
    try:
        files = {
            n: index.parent / file
            for n, file in json.loads(index.read_text())["weight_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is not an index of safetensors files: {error}", remedy=_COPY_AGAIN
        ) from error
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(
            f"{index} names files that are not there: {', '.join(missing)}", remedy=_COPY_AGAIN
        )
    return files


def tensor_names(path: Path) -> list[str]:
    """The tensors of one file.

    Raises:
        CheckpointError: it is not a whole safetensors file.
    """
    with _readable(path), safe_open(path, framework="pt") as file:
        return list(file.keys())


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file: {error}",
            remedy=_COPY_AGAIN,
        ) from error


def describe_tensors(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Types and shapes of some tensors of a file, on the meta device; no data is read.

    Raises:
        CheckpointError: the file is not whole, lacks one, or has one of an unknown type.
    """
    types = {code: dtype for dtype, code in _DTYPES.items()}
    found = {}
    with _readable(path), safe_open(path, framework="pt") as file:
        for name in names:
            piece = file.get_slice(name)
            code = piece.get_dtype()
            if code not in types:
                raise CheckpointError(
                    f"{name} in {path} has the unknown type {code}",
                    remedy="save it in bfloat16 or float32",
                )
            found[name] = torch.empty(piece.get_shape(), dtype=types[code], device="meta")
    return found


class SafetensorsReader:
    """Keeps safetensors files open while their tensors are read.

    What lies in a folder with digests is compared with them.
    """

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._digests: dict[Path, Digests | None] = {}
        self._ahead: ReadAhead | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read_ahead(self, wanted: Iterable[tuple[Path, str]]) -> None:
        """Say, once, which tensors will be asked for, in order: files and names.

        Raises:
            CheckpointError: a file is not whole.
        """
        assert self._ahead is None
        wanted = list(wanted)
        for path in dict.fromkeys(path for path, _ in wanted):
            self.open(path)
        self._ahead = ReadAhead(wanted)
        self._stack.callback(self._ahead.close)

    def get(self, path: Path, name: str) -> torch.Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: the file is not whole, or has no such tensor.
            DamagedCheckpointError: its folder has digests, and the tensor has another one.
        """
        self.open(path)
        if self._ahead is not None:
            self._ahead.reached(path, name)
        with _readable(path):
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        digests = self._digests[path.parent]
        if digests is not None:
            digests.check(path, name, digest(tensor_bytes(tensor)))
        return tensor

    def open(self, path: Path) -> None:
        """Open a file before its first tensor is asked for; its data outlives its name.

        Raises:
            CheckpointError: the file is not whole.
        """
        with _readable(path):
            if path not in self._open:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        if path.parent not in self._digests:
            self._digests[path.parent] = Digests.of(path.parent)
