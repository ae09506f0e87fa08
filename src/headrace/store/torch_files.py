"""One tensor out of a range of a file that ``torch.save`` wrote.

Invariant: the pickle in it is read with torch's own restricted reader (``weights_only``), which
runs nothing, and what is no plain tensor is refused. The file is read where the tensor lies.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from headrace.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def read_tensor(path: Path, start: int, length: int, name: str) -> torch.Tensor:
    """The tensor that a range of a file holds.

    Args:
        path: the file.
        start: first byte of the range.
        length: in bytes.
        name: of the tensor, for messages.

    Raises:
        CheckpointError: it holds something else; nothing of it was run.
    """
    try:
        with path.open("rb") as file, _Part(file, start, length) as part:
            value = torch.load(
                cast("IO[bytes]", part), map_location="cpu", weights_only=True
            )  # runs no pickle
    except (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{path} does not hold a plain tensor where {name} should be: {first}",
            remedy="copy the checkpoint again, or take an earlier one",
        ) from error
    if type(value) is not torch.Tensor:
        raise CheckpointError(
            f"{name} in {path} is a {type(value).__name__}, and no plain tensor",
            remedy="save it from a model with plain weights",
        )
    return value


class _Part(io.RawIOBase):
    """A range of an open file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), max(0, self._length - self._at))
        self._file.seek(self._start + self._at)
        target = view[:wanted]
        read = self._file.readinto(target)  # type: ignore[attr-defined]  # of every binary file
        self._at += int(read)
        return int(read)
