"""Whether a save still goes on: the file it is at, and since when nothing of it was written.

Owns one word that the thread that writes leaves for those that wait for it. A disk that stalls
neither fails nor returns, so only the time tells. Waits for nobody and writes nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.errors import CheckpointError
from headrace.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

SLOWEST_DISK = 4 * MIB  # bytes a second, that a flush of many bytes is waited for


class Pulse:
    """Told by one thread, asked by others."""

    def __init__(self) -> None:
        """Begin where nothing was written yet."""
        self._now: tuple[Path | None, float, float] = (None, time.monotonic(), 0.0)

    def at(self, file: Path, *, flushes: int = 0) -> None:
        """Say that the next piece of a file is written now, or that ``flushes`` bytes are."""
        self._now = (file, time.monotonic(), flushes / SLOWEST_DISK)

    def check(self, seconds: float) -> None:
        """Refuse to wait any longer for a disk that stalls.

        Args:
            seconds: a piece may take, and what is flushed as many more as on a slow disk.

        Raises:
            CheckpointError: nothing was written for longer.
        """
        file, since, more = self._now
        silence = time.monotonic() - since
        if silence > seconds + more:
            raise CheckpointError(
                f"nothing was written for {silence:.0f} s, longer than the {seconds + more:.0f} s "
                f"that a disk may take: the save stands still at {file or 'its first file'}",
                remedy="look whether the disk answers (dmesg, df); earlier checkpoints are "
                "untouched, and resume_from_checkpoint: auto goes on from the last",
            )
