"""How long work on a device takes: what every measurement of a rate repeats, and its copies.

Invariant: the device has nothing else to do when a time begins, and is done when it ends; a first
call never counts. Knows nothing of models, and judges no figure.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Timer:
    """Repetitions of work on one device.

    Attributes:
        device: where the work runs.
        dtype: of the matrices that are multiplied there: bfloat16 on CUDA, float32 on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Time work on ``device``."""
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rate(self, work: Callable[[], object], seconds: float) -> float:
        """Calls a second over ``seconds``, of which the first third does not count.

        A card at its power limit lowers its clock within a fraction of a second: a short
        measurement on a cool chip shows what no step can reach.
        """
        work()
        self.synchronize()
        begun = started = time.perf_counter()
        count = 0
        while True:
            work()
            count += 1
            self.synchronize()
            now = time.perf_counter()
            if now - begun >= seconds:
                return count / (now - started)
            if now - begun < seconds / 3:
                started, count = now, 0

    def mean(self, work: Callable[[], object], repeats: int) -> float:
        """Mean seconds of ``repeats`` calls, queued one behind the other."""
        work()
        return self._seconds(work, repeats) / repeats

    def best(self, work: Callable[[], object], repeats: int) -> float:
        """Seconds of the shortest of ``repeats`` calls, each alone."""
        work()
        return min(self._seconds(work, 1) for _ in range(repeats))

    def _seconds(self, work: Callable[[], object], repeats: int) -> float:
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        self.synchronize()
        return time.perf_counter() - begun


class Copies:
    """Copies of ``num_bytes`` between pinned host memory and a CUDA device, as work to be timed."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Take two buffers on either side."""
        byte = torch.uint8
        self._hosts = [torch.empty(num_bytes, dtype=byte, pin_memory=True) for _ in range(2)]
        self._devices = [torch.empty(num_bytes, dtype=byte, device=device) for _ in range(2)]
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch

    def to_device(self) -> None:
        """Host to device."""
        self._devices[0].copy_(self._hosts[0], non_blocking=True)

    def to_host(self) -> None:
        """Device to host."""
        self._hosts[1].copy_(self._devices[1], non_blocking=True)

    def both(self) -> None:
        """Either way at once; the current stream waits for both."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self.to_host()
        self.to_device()
        current.wait_stream(self._side)

    def inside(self) -> None:
        """Within the device's memory, which is read and written."""
        self._devices[0].copy_(self._devices[1])
