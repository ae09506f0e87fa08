"""The best rate at which this machine's memory can be read and written at once.

Invariant: counts only bytes that must cross the memory bus. The streaming copy writes past the
caches, so its target is not read first; the negation works in place. Does not judge anyone: the
update's rate is compared with this one in ``update.py``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class DramRate:
    """One point of the sweep."""

    kernel: str
    """``copy`` (streaming stores) or ``in place``."""
    num_threads: int
    gigabytes_per_second: float
    """Read plus written, 1e9 bytes a second, median of the rounds."""


class DramSweep:
    """Streams over two buffers, with each kernel and several numbers of threads.

    Args:
        source: float32 ``(n,)``, much larger than the caches.
        target: float32 ``(n,)``.
        instruction_set: Of the native kernels.
        num_threads: The most threads to try; halves of it are tried too.
    """

    def __init__(
        self,
        source: NDArray[np.float32],
        target: NDArray[np.float32],
        *,
        instruction_set: str,
        num_threads: int,
    ) -> None:
        from headrace.kernels import _native, native  # noqa: PLC0415  may not be built

        self._native = _native
        self._isa = instruction_set
        self._source, self._target = source, target
        counts = {num_threads >> shift for shift in range(3)} | {num_threads * 3 // 4}
        self._pools = [native.Pool(count) for count in sorted(counts) if count >= 1]
        self._seconds: dict[tuple[str, int], list[float]] = {}

    def run_round(self) -> None:
        """Measure every point once."""
        for pool in self._pools:
            self._time("copy", pool)
            self._time("in place", pool)

    def _time(self, kernel: str, pool: Any) -> None:
        start = time.perf_counter()
        if kernel == "copy":
            self._native.copy_streaming(self._isa, self._source, self._target, pool)
        else:
            self._native.negate(self._isa, self._target, pool)
        seconds = time.perf_counter() - start
        self._seconds.setdefault((kernel, pool.num_threads), []).append(seconds)

    def rates(self) -> list[DramRate]:
        """All points, fastest first."""
        num_bytes = self._source.nbytes + self._target.nbytes
        points = [
            DramRate(
                kernel=kernel,
                num_threads=num_threads,
                gigabytes_per_second=num_bytes / median(seconds) / 1e9,
            )
            for (kernel, num_threads), seconds in self._seconds.items()
        ]
        return sorted(points, key=lambda point: -point.gigabytes_per_second)

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools:
            pool.close()
