"""What a GPU did while work was queued: time by kind of kernel, and time in which no kernel ran.

Times come from the same back-to-back repetitions that are timed without a profiler, so that clocks
are as low as sustained work makes them: one repetition on a cool card ends several percent earlier.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from benchmarks.cases.common import default_device, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# What the names of kernels have in common, by kind, the first match counts. The names of compiled
# kernels tell what they were fused from, other kinds among it.
KINDS = (
    ("compiled pointwise and reductions", ("triton_poi", "triton_red", "triton_per")),
    ("grouped products", ("grouped", "groupproblem", "group_problem")),
    ("attention", ("sdpa", "flash", "fmha", "attention", "cudnn::fusion")),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "splitk", "matmul")),
    ("sort and top-k", ("sort", "topk", "radix", "scan", "bitonic")),
    ("copies and fills", ("copy", "memcpy", "memset", "fill", "foreach", "multi_tensor")),
    ("gather and scatter", ("index", "gather", "scatter")),
)

Interval = tuple[float, float, str]  # from, to, and what ran


def profile(
    work: Callable[[], None], num_layers: int, *, repeats: int = 1, most: int = 30
) -> dict[str, Any]:
    """Milliseconds a layer on the GPU: by kind, the costliest kernels, and what lies between them.

    Args:
        work: what is queued.
        num_layers: that it passes through.
        repeats: how often it is queued, with no synchronisation between.
        most: kernels to list.

    Returns:
        ``kernel_milliseconds`` by kind; ``busy_milliseconds``, in which any kernel ran;
        ``idle_milliseconds`` between the first and the last, in which none did; ``launches``;
        ``longest_gaps``, each in milliseconds with the kernels around it; ``kernels`` as names,
        milliseconds and launches.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    device = default_device()
    synchronize(device)
    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            work()
        synchronize(device)
    passes = num_layers * repeats
    ran = [
        (event.time_range.start / 1e3, event.time_range.end / 1e3, event.name)
        for event in seen.events()
        if event.device_type == DeviceType.CUDA
    ]
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    kinds: dict[str, float] = defaultdict(float)
    for begin, end, name in ran:
        kernels[name][0] += (end - begin) / passes
        kernels[name][1] += 1 / passes
        kinds[kind_of(name)] += (end - begin) / passes
    order = sorted(kernels, key=lambda name: -kernels[name][0])[:most]
    for name in order:
        milliseconds, count = kernels[name]
        print(f"{milliseconds:8.3f} ms {count:6.1f} x  {name[:140]}", file=sys.stderr)
    busy, gaps = occupancy(ran)
    return {
        "kernel_milliseconds": dict(sorted(kinds.items(), key=lambda pair: -pair[1])),
        "busy_milliseconds": busy / passes,
        "idle_milliseconds": sum(gap for gap, _, _ in gaps) / passes,
        "launches": len(ran) / passes,
        "longest_gaps": [[gap, before[:80], after[:80]] for gap, before, after in gaps[:8]],
        "kernels": [[name[:140], *kernels[name]] for name in order],
    }


def occupancy(intervals: Iterable[Interval]) -> tuple[float, list[tuple[float, str, str]]]:
    """Time that intervals cover, and the gaps between them, the longest first, with both sides."""
    busy, gaps = 0.0, []
    last: Interval | None = None
    for interval in sorted(intervals):
        begin, end, name = interval
        if last is None:
            busy, last = end - begin, interval
            continue
        if begin > last[1]:
            gaps.append((begin - last[1], last[2], name))
        if end > last[1]:
            busy += end - max(begin, last[1])
            last = interval
    return busy, sorted(gaps, key=lambda gap: -gap[0])


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    lower = kernel.lower()
    return next((kind for kind, parts in KINDS if any(p in lower for p in parts)), "other")
