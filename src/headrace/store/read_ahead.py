"""Brings what will be read soon from the disk into the page cache, several blocks at a time.

Files are mapped: whoever touches a page that is not in memory waits for that page alone, and a disk
that is asked for one piece at a time gives a part of its speed. Invariant: this only reads; what a
caller gets, and its errors, are those of its own reading, also where a file was replaced or no
thread can be started. At most ``WINDOW`` bytes are ahead.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

WINDOW = 1 << 30
_BLOCK = 16 << 20  # what a thread takes at a time, in order
_STEP = 1 << 19  # and reads at once: this is all the memory that a thread needs
_THREADS = 4


class ReadAhead:
    """Reads tensors of safetensors files in the order in which they will be asked for."""

    def __init__(self, wanted: Iterable[tuple[Path, str]], *, window: int = WINDOW) -> None:
        """Start reading.

        Args:
            wanted: file and name of each tensor, in order.
            window: bytes that may be ahead of what :meth:`reached` said.
        """
        self._window = window
        self._blocks, self._ends = _blocks(wanted)
        self._turn = threading.Condition()
        self._next = 0
        self._reached = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        # Where no further thread can be had, fewer read ahead, or none does.
        with contextlib.suppress(RuntimeError, MemoryError):
            for number in range(min(_THREADS, len(self._blocks))):
                thread = threading.Thread(
                    target=self._read, name=f"read-ahead-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def reached(self, path: Path, name: str) -> None:
        """The tensor is in use: reading may go on as far beyond it as the window is wide."""
        end = self._ends.get((path, name), 0)
        with self._turn:
            if end > self._reached:
                self._reached = end
                self._turn.notify_all()

    def close(self) -> None:
        """Stop reading, and wait until no thread does."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        # A file that cannot be read is its reader's to complain about.
        with contextlib.suppress(OSError, MemoryError):
            buffer = memoryview(bytearray(_STEP))
            while (block := self._take()) is not None:
                path, start, size = block
                # Opened again for each block: a model may have more files than a process may open.
                with path.open("rb", buffering=0) as file:
                    for offset in range(start, start + size, _STEP):
                        wanted = min(_STEP, start + size - offset)
                        os.preadv(file.fileno(), [buffer[:wanted]], offset)

    def _take(self) -> tuple[Path, int, int] | None:
        """The next block, when it may be read; None when there is none, or reading is over."""
        with self._turn:
            while not self._closed and self._next < len(self._blocks):
                path, start, size, before = self._blocks[self._next]
                if before < self._reached + self._window:
                    self._next += 1
                    return path, start, size
                self._turn.wait()
        return None


def _blocks(
    wanted: Iterable[tuple[Path, str]],
) -> tuple[list[tuple[Path, int, int, int]], dict[tuple[Path, str], int]]:
    """What to read, ``(file, offset, bytes, bytes before it)``, and where each tensor ends."""
    ranges: dict[Path, dict[str, tuple[int, int]]] = {}
    blocks: list[tuple[Path, int, int, int]] = []
    ends: dict[tuple[Path, str], int] = {}
    before = 0
    for path, name in wanted:
        if path not in ranges:
            ranges[path] = _ranges(path)
        start, stop = ranges[path].get(name, (0, 0))
        if blocks and start < stop:  # small tensors that lie side by side are read together
            file, at, size, passed = blocks[-1]
            if file == path and at + size == start and size < _BLOCK:
                more = min(_BLOCK - size, stop - start)
                blocks[-1] = (file, at, size + more, passed)
                start, before = start + more, before + more
        for offset in range(start, stop, _BLOCK):
            size = min(_BLOCK, stop - offset)
            blocks.append((path, offset, size, before))
            before += size
        ends[path, name] = before
    return blocks, ends


def _ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file lies; empty if it cannot be told.

    The file may be another one by now than its reader opened, or one that is being written.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            base = 8 + int.from_bytes(file.read(8), "little")
            if base > size:
                return {}
            header = json.loads(file.read(base - 8))
        return {
            name: _inside(entry["data_offsets"], base, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
    ):
        return {}


def _inside(offsets: Any, base: int, size: int) -> tuple[int, int]:
    """Those bytes of the data, which begins at ``base``, that a file of ``size`` bytes has.

    Raises:
        TypeError: the offsets are not numbers of bytes.
        ValueError: they are not two.
    """
    start, stop = offsets
    if not isinstance(start, int) or not isinstance(stop, int):
        raise TypeError("a tensor lies between two whole numbers of bytes")
    first = min(max(base + start, base), size)
    return first, min(max(base + stop, first), size)
