"""What model FLOP/s are held against: the matmul rate of this run, and the data sheet.

Utilisation is a share of one of two peaks, and says of which: ``mfu`` of the rate that a large
matrix product reaches on this device in this process, ``mfu_data_sheet`` of what the vendor
states for the card. FLOPs are counted by :mod:`headrace.models.flops`.
"""

from __future__ import annotations

import torch

from headrace.errors import ConfigError
from headrace.plan.machine import find_card
from headrace.policy.timing import Timer

_REPEATS = 5
_SIZE = {"cuda": 8192, "cpu": 512}


def peaks(device: torch.device) -> dict[str, float]:
    """FLOP/s by the name of the share: ``mfu`` measured, ``mfu_data_sheet`` where it is known."""
    found = {"mfu": measure_matmul(device)}
    if device.type == "cuda" and (stated := _stated(torch.cuda.get_device_name(device))):
        found["mfu_data_sheet"] = stated
    return found


def measure_matmul(device: torch.device) -> float:
    """FLOP/s of a square matrix product, bf16 on CUDA and float32 on the CPU; the best of five.

    A few milliseconds, and 400 MB on a card; give them before the state is placed.
    """
    size = _SIZE[device.type]
    seconds = _product_seconds(size, Timer(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2.0 * size**3 / seconds


def _product_seconds(size: int, timer: Timer) -> float:
    left, right = (
        torch.randn(size, size, device=timer.device, dtype=timer.dtype) for _ in range(2)
    )
    out = torch.empty_like(left)
    return timer.best(lambda: torch.mm(left, right, out=out), _REPEATS)


def _stated(name: str) -> float | None:
    try:
        peak = find_card(name)[1].get("peak_tflops")
    except ConfigError:
        return None
    return None if peak is None else float(peak[0]) * 1e12
