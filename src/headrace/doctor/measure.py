"""Short measurements on a CUDA card: transfers in both directions, attention by backend.

A few seconds and half a GiB a card. Figures are for orientation; ``headrace bench`` measures
with ceilings and repetitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headrace.policy.timing import Copies

if TYPE_CHECKING:
    from collections.abc import Callable

_BYTES = 256 << 20
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Rates of one card.

    Attributes:
        h2d: host to device alone, GB/s, pinned memory.
        d2h: device to host alone, GB/s.
        duplex: each way while both run, GB/s.
        attention: TFLOP/s by backend, None where it does not run.
    """

    h2d: float
    d2h: float
    duplex: float
    attention: dict[str, float | None]


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The best of a few repetitions, by events."""
    work()
    torch.cuda.synchronize(device)
    best = float("inf")
    for _ in range(_REPEATS):
        # torch does not type the constructors of events and streams.
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        work()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    return best


def _attention(device: torch.device) -> dict[str, float | None]:
    length, heads, groups, width = 8192, 32, 8, 128
    query = torch.randn(1, heads, length, width, device=device, dtype=torch.bfloat16)
    key, value = (
        torch.randn(1, groups, length, width, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    for tensor in (query, key, value):
        tensor.requires_grad_()
    upstream = torch.randn_like(query)
    rates: dict[str, float | None] = {}
    for name, backend in (
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("FlashAttention", SDPBackend.FLASH_ATTENTION),
    ):

        def work(backend: SDPBackend = backend) -> None:
            with sdpa_kernel([backend]):
                out = scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                )
            torch.autograd.grad(out, [query, key, value], upstream)

        try:
            # 6 x length x length x heads x width: forward and backward of a causal square.
            rates[name] = 6 * length * length * heads * width / _seconds(work, device) / 1e12
        except RuntimeError:  # this build or card has no such kernel
            rates[name] = None
    return rates


def measure_card(index: int) -> Transfers:
    """Transfers and attention of one CUDA card."""
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        copies = Copies(device, _BYTES)
        giga = _BYTES / 1e9
        return Transfers(
            h2d=giga / _seconds(copies.to_device, device),
            d2h=giga / _seconds(copies.to_host, device),
            duplex=giga / _seconds(copies.both, device),
            attention=_attention(device),
        )
