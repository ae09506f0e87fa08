"""The optimizer update on the host against torch's and against the memory's own limit.

Compared, on the same parameters, the same memory (huge pages, already backed) and the same number
of threads, in interleaved rounds:

* ours: bf16 gradient in, split master (its ``hi`` is the bf16 weight), fp32 moments: 26 bytes
  moved a parameter (14 read, 12 written), 28 when the gradient is scanned first because its norm
  is not known;
* torch: ``AdamW(fused=True)`` in fp32 on one flat tensor, its best case, plus the two casts that
  a bf16 trainer needs around it (gradient to fp32, weight to bf16).

Invariant: every figure is a median over rounds of one run; nothing is carried over from another.
"""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace import kernels
from headrace.bench.dram import DramRate, DramSweep
from headrace.errors import ConfigError
from headrace.kernels.headroom import Headroom
from headrace.store.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.kernels.calls import HostKernels

BYTES_MOVED = 26
"""A parameter: reads hi, lo, two moments, bf16 gradient (14); writes all but the gradient (12)."""
BYTES_SCANNED = 2
_LEARNING_RATE, _BETAS, _EPS, _WEIGHT_DECAY = 1e-5, (0.9, 0.999), 1e-8, 0.1


@dataclass(frozen=True, kw_only=True)
class UpdateFigures:
    """What one run measured. Rates count 1e9; ratios above 1 mean that headrace is faster."""

    num_parameters: int
    num_threads: int
    num_rounds: int
    processor: str
    instruction_set: str
    torch_version: str
    gparameters_per_second: float
    """The update with the gradient's norm known, as the engine calls it."""
    gigabytes_per_second: float
    """Bytes it really moves, read plus written."""
    fraction_of_dram: float
    """Of the best read + write rate in this run."""
    ratio_to_torch: float
    """Torch's seconds, casts included, over ours."""
    gparameters_per_second_with_scan: float
    """The same with the gradient scanned for non-finite values first."""
    ratio_to_torch_with_scan: float
    gparameters_per_second_dry_run: float
    """The first update of a range, evaluated as a whole before it is stored."""
    torch_gparameters_per_second: float
    torch_seconds: dict[str, float]
    """Gradient cast, update, weight cast."""
    headrace_seconds: dict[str, list[float]]
    """Fastest, median and slowest round."""
    dram: list[DramRate]
    """The sweep, fastest first."""


class _Torch:
    """Fused fp32 AdamW on one flat tensor, with a bf16 trainer's casts around it."""

    def __init__(self, arena: Arena, offset: int, grad: torch.Tensor, num: int) -> None:
        def take(index: int) -> torch.Tensor:
            return arena.tensor(offset + 4 * num * index, num, torch.float32)

        self.weight, self.grad, exp_avg, exp_avg_sq = take(0), take(1), take(2), take(3)
        self._working = arena.tensor(offset + 16 * num, num, torch.bfloat16)
        self._source = grad
        parameter = torch.nn.Parameter(self.weight)
        parameter.grad = self.grad
        self._optimizer = torch.optim.AdamW(
            [parameter],
            lr=_LEARNING_RATE,
            betas=_BETAS,
            eps=_EPS,
            weight_decay=_WEIGHT_DECAY,
            fused=True,
        )
        self._optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }

    def step(self) -> dict[str, float]:
        times = [time.perf_counter()]
        self.grad.copy_(self._source)
        times.append(time.perf_counter())
        self._optimizer.step()
        times.append(time.perf_counter())
        self._working.copy_(self.weight)
        times.append(time.perf_counter())
        names = ("gradient_cast", "update", "weight_cast")
        return {name: times[i + 1] - times[i] for i, name in enumerate(names)}


def measure_update(
    *, num_parameters: int = 100_000_000, num_threads: int | None = None, num_rounds: int = 9
) -> UpdateFigures:
    """Measure the host update. Takes 32 bytes a parameter of host memory.

    Args:
        num_parameters: At least a million; below some tens of millions the caches answer.
        num_threads: Of every contender; by default all processors this process may use.
        num_rounds: Rounds that count; one more goes before them.

    Raises:
        ConfigError: A count is out of range.
        HeadraceError: The compiled kernels are not there.
        CapacityError: Too little memory.
    """
    if num_parameters < 1_000_000:
        raise ConfigError(
            f"num_parameters is {num_parameters}; fewer than 1,000,000 measure nothing but calls",
            remedy="--num-parameters 100M",
        )
    if num_rounds < 1:
        raise ConfigError(f"num_rounds is {num_rounds}; at least 1 is needed", remedy="--rounds 9")
    num_threads = num_threads or kernels.num_usable_cores()
    backend = kernels.load("native")
    num = -(-num_parameters // 64) * 64  # every plane starts at a cache line
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with Arena(32 * num, name="benchmark of the update") as arena:
            return _measure(backend, arena, num, num_threads, num_rounds)
    finally:
        torch.set_num_threads(threads_before)


def _measure(
    backend: HostKernels, arena: Arena, num: int, num_threads: int, num_rounds: int
) -> UpdateFigures:
    exp_avg = arena.numpy(0, num, np.float32)
    exp_avg_sq = arena.numpy(4 * num, num, np.float32)
    hi = arena.numpy(8 * num, num, np.uint16)
    lo = arena.numpy(10 * num, num, np.int16)
    grad = arena.tensor(12 * num, num, torch.bfloat16)
    grad_bits = arena.numpy(12 * num, num, np.uint16)

    generator = torch.Generator().manual_seed(0)
    contender = _Torch(arena, 14 * num, grad, num)
    contender.grad.normal_(0, 1e-3, generator=generator)
    grad.copy_(contender.grad)
    contender.weight.normal_(0, 0.02, generator=generator)
    pool = backend.Pool(num_threads)
    assert backend.split_float32(contender.weight.numpy(), hi, lo, pool=pool)
    sweep = DramSweep(
        contender.grad.numpy(),
        arena.numpy(14 * num + 8 * num, num, np.float32),  # torch's first moment: values are free
        instruction_set=backend.backend.instruction_set,
        num_threads=num_threads,
    )
    norm = float(torch.linalg.vector_norm(contender.grad))
    headroom = Headroom()
    step = 0

    def update(**known: Any) -> float:
        nonlocal step
        step += 1
        start = time.perf_counter()
        applied = backend.adamw_split(
            hi, lo, exp_avg, exp_avg_sq, grad_bits,
            step=step, learning_rate=_LEARNING_RATE, beta1=_BETAS[0], beta2=_BETAS[1], eps=_EPS,
            weight_decay=_WEIGHT_DECAY, pool=pool, **known,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        assert applied
        return seconds

    contenders: dict[str, Callable[[], float]] = {
        "update": lambda: update(headroom=headroom, largest_grad=norm),
        "update_with_scan": lambda: update(headroom=headroom),
        "update_with_dry_run": update,
    }
    ours: dict[str, list[float]] = {name: [] for name in contenders}
    theirs: list[dict[str, float]] = []
    try:
        update(headroom=headroom)  # from here on the headroom is known
        for number in range(-1, num_rounds):
            torch_seconds = contender.step()
            seconds = {name: call() for name, call in contenders.items()}
            if number >= 0:
                theirs.append(torch_seconds)
                for name, rounds in ours.items():
                    rounds.append(seconds[name])
                sweep.run_round()
    finally:
        sweep.close()
        pool.close()
    return _figures(
        num, num_threads, backend.backend.instruction_set, ours=ours, theirs=theirs,
        dram=sweep.rates(),
    )  # fmt: skip


def _figures(
    num: int,
    num_threads: int,
    instruction_set: str,
    *,
    ours: dict[str, list[float]],
    theirs: list[dict[str, float]],
    dram: list[DramRate],
) -> UpdateFigures:
    medians = {name: median(seconds) for name, seconds in ours.items()}
    torch_total = median(sum(parts.values()) for parts in theirs)
    moved = BYTES_MOVED * num / medians["update"] / 1e9
    return UpdateFigures(
        num_parameters=num,
        num_threads=num_threads,
        num_rounds=len(theirs),
        processor=_processor(),
        instruction_set=instruction_set,
        torch_version=torch.__version__,
        gparameters_per_second=num / medians["update"] / 1e9,
        gigabytes_per_second=moved,
        fraction_of_dram=moved / dram[0].gigabytes_per_second,
        ratio_to_torch=torch_total / medians["update"],
        gparameters_per_second_with_scan=num / medians["update_with_scan"] / 1e9,
        ratio_to_torch_with_scan=torch_total / medians["update_with_scan"],
        gparameters_per_second_dry_run=num / medians["update_with_dry_run"] / 1e9,
        torch_gparameters_per_second=num / torch_total / 1e9,
        torch_seconds={name: median(parts[name] for parts in theirs) for name in theirs[0]},
        headrace_seconds={
            name: [min(seconds), median(seconds), max(seconds)] for name, seconds in ours.items()
        },
        dram=dram,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def describe(figures: UpdateFigures) -> str:
    """The figures as a short text."""
    best = figures.dram[0]

    def row(name: str, gparameters: float, rest: str = "") -> str:
        return f"  {name:<32}{gparameters:6.2f} Gparam/s{rest}"

    rates = f", {figures.gigabytes_per_second:.1f} GB/s moved"
    rates += f", {figures.fraction_of_dram:.0%} of the best memory rate"
    memory = f"{best.gigabytes_per_second:.1f} GB/s read + written"
    setting = f"{figures.processor}, {figures.instruction_set}, {figures.num_threads} threads"
    ratio = f"Ratio to torch: {figures.ratio_to_torch:.2f}"
    with_scan = f"with the scan {figures.ratio_to_torch_with_scan:.2f}"
    return "\n".join((
        f"Host update of {figures.num_parameters / 1e6:.0f}M parameters",
        f"  {setting}; medians of {figures.num_rounds} interleaved rounds",
        "",
        row("headrace", figures.gparameters_per_second, rates),
        row("  and the gradient scanned", figures.gparameters_per_second_with_scan),
        row("  and a dry run before", figures.gparameters_per_second_dry_run),
        row(f"torch {figures.torch_version}, with casts", figures.torch_gparameters_per_second),
        f"  {'memory':<32}{memory} ({best.kernel}, {best.num_threads} threads)",
        "",
        f"{ratio}, {with_scan}",
    ))  # fmt: skip
