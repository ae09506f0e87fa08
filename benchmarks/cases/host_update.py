"""The host update alone and while both copy engines are busy, against torch and against DRAM.

Under load every contender of the comparison runs beside the same copies: torch's fused AdamW, its
casts, the memory sweep and headrace's kernel.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from benchmarks.cases.common import default_device

if TYPE_CHECKING:
    import torch


def host_update_case(
    *, num_parameters: int = 200_000_000, num_threads: int | None = None, num_rounds: int = 9
) -> dict[str, Any]:
    """Figures of ``headrace bench update``, and on a GPU the same under DMA in both directions."""
    from headrace.bench.update import measure_update

    settings: dict[str, Any] = {
        "num_parameters": num_parameters, "num_threads": num_threads, "num_rounds": num_rounds,
    }  # fmt: skip
    result: dict[str, Any] = {"alone": asdict(measure_update(**settings))}
    device = default_device()
    if device.type == "cuda":
        with Traffic(device) as traffic:
            loaded = asdict(measure_update(**settings))
        result["under_dma"] = {**loaded, **traffic.rates()}
    return result


class Traffic:
    """Copies pinned memory to the device and back without pause until it is left."""

    def __init__(self, device: torch.device, num_bytes: int = 256 << 20) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._ended = threading.Event()
        self._copied = {"h2d": 0, "d2h": 0}
        self._threads = [
            threading.Thread(target=self._copy, args=(way,), daemon=True) for way in self._copied
        ]
        self._begun = self._seconds = 0.0

    def __enter__(self) -> Self:
        self._begun = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._begun
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _copy(self, way: str) -> None:
        import torch

        host = torch.zeros(self._num_bytes, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        target, source = (device, host) if way == "h2d" else (host, device)
        stream = torch.cuda.Stream(self._device)
        # Two in flight, so that the engine never waits for this thread.
        events = [torch.cuda.Event(blocking=True) for _ in range(2)]
        with torch.cuda.stream(stream):
            number = 0
            while not self._ended.is_set():
                event = events[number % 2]
                if number >= 2:
                    event.synchronize()
                    self._copied[way] += self._num_bytes
                target.copy_(source, non_blocking=True)
                event.record()
                number += 1
        stream.synchronize()

    def rates(self) -> dict[str, float]:
        """GB/s each way over the whole time."""
        return {f"{way}_gbps": count / self._seconds / 1e9 for way, count in self._copied.items()}
