"""What the machine can do in this run: matrix products, copies, both directions at once, DRAM.

Absolute figures move from machine to machine; every ratio is against a ceiling of the same run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.cases.common import SHAPES, default_device

if TYPE_CHECKING:
    import torch

    from headrace.policy.timing import Timer

_QUEUED = 20  # products between two synchronisations

DATA_SHEET_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0,
                     "NVIDIA A100-SXM4-80GB": 312.0}  # fmt: skip
"""Dense bf16, from NVIDIA's data sheets."""


def ceilings_case(
    *, models: tuple[str, ...] = ("4b", "8b"), tokens: int = 16384, size: int = 8192,
    copy_bytes: int = 1 << 30,
) -> dict[str, Any]:  # fmt: skip
    """Rates of this run; what a CPU has no counterpart for is left out there."""
    import torch

    from headrace.policy.timing import Timer

    device = default_device()
    timed = Timer(device)
    square = product_rate(timed, device, size, size, size)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "matmul_tflops": square / 1e12,
        "shapes_tflops": {name: shape_rates(timed, device, name, tokens) for name in models},
    }
    result["data_sheet_tflops"] = DATA_SHEET_TFLOPS.get(result["device"])
    if device.type == "cuda":
        result["matmul_sustained_tflops"] = sustained_rate(timed, device, size) / 1e12
        result |= copy_rates(timed, device, copy_bytes)
    return result


def product_rate(timed: Timer, device: torch.device, m: int, k: int, n: int) -> float:
    """FLOPs a second of a bf16 product ``(m, k) x (k, n)`` of normal numbers."""
    import torch

    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    flops = 2.0 * m * k * n
    repeats = max(3, min(50, int(2e13 / flops))) if device.type == "cuda" else 1
    return flops / timed.mean(lambda: torch.mm(a, b, out=out), repeats)


def sustained_rate(timed: Timer, device: torch.device, size: int, seconds: float = 4.5) -> float:
    """FLOPs a second of the same product, many at a time, over ``seconds``; see ``Timer.rate``."""
    import torch

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(_QUEUED):
            torch.mm(a, b, out=out)

    return 2.0 * size**3 * _QUEUED * timed.rate(work, seconds)


def layer_products(name: str) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a model's matrices; ``all`` of a layer weigh by their FLOPs."""
    shape = SHAPES[name]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, shared = shape["num_attention_heads"], shape["num_key_value_heads"]
    size = shape["head_dim"]
    return {
        "q": (hidden, heads * size),
        "k and v": (hidden, shared * size),
        "o": (heads * size, hidden),
        "gate and up": (hidden, inner),
        "down": (inner, hidden),
        "head": (hidden, shape["vocab_size"]),
    }


def shape_rates(timed: Timer, device: torch.device, name: str, tokens: int) -> dict[str, float]:
    """TFLOP/s at a model's shapes, and of a layer's products one after another."""
    count = {"k and v": 2, "gate and up": 2}
    rates, seconds, total = {}, 0.0, 0.0
    for part, (inputs, outputs) in layer_products(name).items():
        rows = min(tokens, 4096) if part == "head" else tokens
        rate = product_rate(timed, device, rows, inputs, outputs)
        rates[part] = rate / 1e12
        if part != "head":
            flops = 2.0 * rows * inputs * outputs * count.get(part, 1)
            seconds += flops / rate
            total += flops
    rates["layer"] = total / seconds / 1e12
    return rates


def copy_rates(timed: Timer, device: torch.device, num_bytes: int) -> dict[str, float]:
    """GB/s to the device, to the host, each way at once, and inside the device."""
    from headrace.policy.timing import Copies

    copies = Copies(device, num_bytes)
    h2d, d2h = timed.mean(copies.to_device, 4), timed.mean(copies.to_host, 4)
    inside, duplex = timed.mean(copies.inside, 20), timed.mean(copies.both, 4)
    return {
        "h2d_gbps": num_bytes / h2d / 1e9,
        "d2h_gbps": num_bytes / d2h / 1e9,
        "duplex_each_way_gbps": num_bytes / duplex / 1e9,
        "device_read_write_gbps": 2 * num_bytes / inside / 1e9,
    }
