"""The rates of this machine, measured in seconds.

Invariant: nothing of the model is allocated, and what the measurements take is given back; each
figure is a mean over a stretch of time, for a card at its power limit slows down within a fraction
of a second. Transfers and the host's update are measured while they disturb each other, as in a
step. The CPU has no transfers: copies inside its memory stand for them.

Shape legend: N tokens, I inputs, O outputs, B rows, T positions, H heads, K key heads, E head size.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from headrace import kernels
from headrace.kernels import device as device_kernels
from headrace.kernels.coefficients import coefficients
from headrace.kernels.headroom import Headroom
from headrace.models.attention import attention, pinned_backend
from headrace.models.flops import head_sizes
from headrace.policy.steptime import Rates
from headrace.policy.timing import Copies, Timer
from headrace.store.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.models.spec import ModelSpec
    from headrace.policy.budget import Workload

LAYER_SHARE = 615 / 661
"""Model FLOPs a second of a layer over those of its matrix products alone, what lies between them
included: both measured on one H200 (docs/performance.md)."""
_OPTIMIZER: dict[str, Any] = {
    "learning_rate": 1e-5,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much a measurement takes.

    Attributes:
        seconds: of each figure; a third of it goes before and does not count.
        tokens: rows of the matrix products, and positions of attention, at most.
        parameters: that are updated; below some tens of millions caches answer.
        copy_bytes: of one transfer.
    """

    seconds: float = 0.9
    tokens: int = 16384
    parameters: int = 1 << 26
    copy_bytes: int = 1 << 28


CPU_EFFORT = Effort(seconds=0.4, tokens=512, parameters=1 << 24, copy_bytes=1 << 26)


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """What was measured.

    Attributes:
        rates: as the step-time model takes them.
        figures: everything that was timed, by name with its unit.
    """

    rates: Rates
    figures: dict[str, float]


def measure_rates(
    spec: ModelSpec,
    workload: Workload,
    *,
    device: torch.device,
    num_threads: int,
    effort: Effort | None = None,
) -> MeasuredRates:
    """Measure what a step of ``spec`` is made of.

    Args:
        spec: the model, for its shapes.
        workload: the tokens of a step.
        device: where compute runs.
        num_threads: of the host's update.
        effort: what it may take; some seconds and 2 GiB on CUDA, less on the CPU.
    """
    if device.type != "cuda":
        return _measured(spec, workload, effort or CPU_EFFORT, device, num_threads)
    with torch.cuda.device(device):  # kernels are launched where this points
        found = _measured(spec, workload, effort or Effort(), device, num_threads)
    torch.cuda.empty_cache()
    return found


def _measured(
    spec: ModelSpec, workload: Workload, effort: Effort, device: torch.device, num_threads: int
) -> MeasuredRates:
    cuda = device.type == "cuda"
    timer = Timer(device)
    tokens = min(workload.tokens, effort.tokens)
    products = _product_rate(spec, tokens, timer, effort.seconds)
    flops = products * LAYER_SHARE
    length = min(workload.sequence_length, tokens)
    attended = _attention_rate(spec, max(1, tokens // length), length, timer, effort.seconds)
    figures = {"products_tflops": products / 1e12, "attention_tflops": attended / 1e12}
    with _HostUpdate(effort.parameters, num_threads) as update:
        alone = update.rate(effort.seconds)
        figures["update_gparameters"] = alone / 1e9
        if cuda:
            moved = _transfers(update, effort, timer)
            on_device = _device_update_rate(effort, timer)
        else:
            copied = _copy_rate(effort, timer)
            moved = {"h2d": copied, "d2h": copied, "update": alone, "inside": 2 * copied}
            on_device = alone
    if cuda:
        figures |= {
            "h2d_loaded_gbps": moved["h2d"] / 1e9,
            "d2h_loaded_gbps": moved["d2h"] / 1e9,
            "update_loaded_gparameters": moved["update"] / 1e9,
            "device_update_gparameters": on_device / 1e9,
        }
    figures["memory_gbps"] = moved["inside"] / 1e9
    return MeasuredRates(
        rates=Rates(
            flops=flops,
            h2d_bytes=moved["h2d"],
            d2h_bytes=moved["d2h"],
            update_parameters=moved["update"],
            device_update_parameters=on_device,
            device_bytes=moved["inside"],
            attention=attended / flops,
        ),
        figures=figures,
    )


def _product_rate(spec: ModelSpec, tokens: int, timer: Timer, seconds: float) -> float:
    """FLOPs a second of the products of the largest layer's matrices, one after another."""
    layer = max(spec.units[1:-1], key=lambda unit: unit.size)
    shapes = [param.shape[-2:] for param in layer.params if len(param.shape) >= 2]
    options: dict[str, Any] = {"device": timer.device, "dtype": timer.dtype}
    inputs = {size: torch.randn(tokens, size, **options) for size in {s[1] for s in shapes}}
    weights = {shape: torch.randn(shape, **options) for shape in set(shapes)}

    def work() -> None:
        for shape in shapes:
            torch.mm(inputs[shape[1]], weights[shape].T)

    return 2.0 * tokens * sum(o * i for o, i in shapes) * timer.rate(work, seconds)


class _Caller(torch.nn.Module):
    is_causal = True


def _attention_rate(spec: ModelSpec, rows: int, length: int, timer: Timer, seconds: float) -> float:
    """Model FLOPs a second of causal attention, forward and backward."""
    config = spec.config
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    scores, values = head_sizes(spec)
    inputs = [
        torch.randn(rows, n, length, size, device=timer.device, dtype=timer.dtype)
        .requires_grad_()
        for n, size in ((heads, scores), (shared, scores), (shared, values))
    ]  # fmt: skip
    query, key, value = inputs
    caller = _Caller()

    def work() -> None:
        with torch.enable_grad():
            out_BTHE, _ = attention(caller, query, key, value, None)
        torch.autograd.grad(out_BTHE, inputs, out_BTHE.detach())

    with pinned_backend(deterministic=False):
        # As models.flops counts: half of the full square.
        return 3.0 * heads * (scores + values) * length**2 * rows * timer.rate(work, seconds)


class _HostUpdate:
    """AdamW on split masters in memory of its own, by as many threads as the run has."""

    def __init__(self, num_parameters: int, num_threads: int) -> None:
        self._kernels = kernels.load()
        self._num = num_parameters
        self._arena = Arena(14 * num_parameters, name="measurement of the update")
        take = self._arena.numpy
        self._planes = (
            take(8 * num_parameters, num_parameters, np.uint16),
            take(10 * num_parameters, num_parameters, np.int16),
            take(0, num_parameters, np.float32),
            take(4 * num_parameters, num_parameters, np.float32),
            take(12 * num_parameters, num_parameters, np.uint16),
        )
        self._planes[0][:] = 0x3C00  # bf16 of 0.0078
        self._planes[4][:] = 0x3A00
        self._pool = self._kernels.Pool(num_threads)
        self._headroom = Headroom()
        self._step = 0

    def __enter__(self) -> Self:
        self.run()  # from here on the headroom is known
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        self._planes = ()  # type: ignore[assignment]  # views of what is unmapped next
        self._arena.close()

    def run(self) -> None:
        """One update of everything."""
        self._step += 1
        applied = self._kernels.adamw_split(
            *self._planes, step=self._step, pool=self._pool, headroom=self._headroom,
            largest_grad=1.0, **_OPTIMIZER,
        )  # fmt: skip
        assert applied

    def rate(self, seconds: float) -> float:
        """Parameters a second over about ``seconds``."""
        count, started = 0, time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds or not count:
            self.run()
            count += 1
        return count * self._num / passed if passed >= seconds else 0.0

    @contextlib.contextmanager
    def running(self, into: dict[str, float]) -> Iterator[None]:
        """Update in a thread meanwhile; its rate is ``into["update"]`` afterwards."""
        stop = threading.Event()
        failures: list[BaseException] = []

        def loop() -> None:
            count, started = 0, time.perf_counter()
            try:
                while not stop.is_set() or not count:
                    self.run()
                    count += 1
            except BaseException as error:  # noqa: BLE001 - raised where it is joined
                failures.append(error)
            into["update"] = count * self._num / (time.perf_counter() - started)

        thread = threading.Thread(target=loop, name="headrace-measured-update")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]


def _transfers(update: _HostUpdate, effort: Effort, timer: Timer) -> dict[str, float]:
    """Bytes a second each way while both run and the host updates, its rate, and the device's."""
    copies, size = Copies(timer.device, effort.copy_bytes), effort.copy_bytes
    found: dict[str, float] = {}
    with update.running(found):
        each_way = size * timer.rate(copies.both, effort.seconds)
    inside = 2 * size * timer.rate(copies.inside, effort.seconds)
    return {**found, "h2d": each_way, "d2h": each_way, "inside": inside}


def _copy_rate(effort: Effort, timer: Timer) -> float:
    source, target = (torch.zeros(effort.copy_bytes, dtype=torch.uint8) for _ in range(2))
    return effort.copy_bytes * timer.rate(lambda: target.copy_(source), effort.seconds)


def _device_update_rate(effort: Effort, timer: Timer) -> float:
    """Parameters a second that the device updates."""
    num = effort.parameters
    options: dict[str, Any] = {"device": timer.device}
    hi, gradient = (torch.full((num,), 1e-2, dtype=torch.bfloat16, **options) for _ in range(2))
    lo = torch.zeros(num, dtype=torch.int16, **options)
    exp_avg, exp_avg_sq = (torch.zeros(num, **options) for _ in range(2))
    factors = coefficients(step=10, **_OPTIMIZER)
    return num * timer.rate(
        lambda: device_kernels.adamw_split(hi, lo, exp_avg, exp_avg_sq, gradient, c=factors),
        effort.seconds,
    )
