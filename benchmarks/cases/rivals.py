"""Time a rival: every micro-batch size it is given, whole steps, the best one counts.

Invariant: what is timed is forward, backward, clipping and the optimizer, from a synchronised
device to a synchronised device. Running out of memory is a result: the sizes measured before it
stand. Sizes rise, because no rival promises to go on after it ran out.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks.cases.common import (
    SEQUENCE,
    WARM_UP,
    MemoryMeter,
    default_device,
    qwen3_config,
    report,
    speed,
    step_tokens,
    synchronize,
)
from benchmarks.cases.rival_model import RivalOptions

RIVALS = ("fsdp2", "fsdp2-offload", "zero-offload")


def rival_case(
    *,
    rival: str,
    model: str,
    tokens: int,
    rows: list[int],
    options: dict[str, Any] | None = None,
    precision: str | None = None,
    stage: int = 2,
    steps: int = 3,
    sequence: int = SEQUENCE,
) -> dict[str, Any]:
    """Train ``model`` with ``rival`` and report its best micro-batch size.

    Args:
        rival: one of :data:`RIVALS`.
        model: a name in :data:`benchmarks.cases.common.SHAPES`.
        tokens: of a step.
        rows: sequences of a micro-batch, in rising order.
        options: of :class:`RivalOptions`.
        precision: of FSDP2; ``mixed`` on a GPU, ``float32`` on a CPU.
        stage: of ZeRO.
        steps: timed ones a size, after the warm-up.
        sequence: tokens of a sequence.
    """
    from headrace.models.spec import ModelSpec

    device = default_device()
    config = qwen3_config(model)
    spec = ModelSpec(config)
    chosen = RivalOptions(**options or {})
    described = {"rival": rival, "precision": precision, **chosen.described(device)}
    refused = _too_large_for_host(rival, spec)
    if refused:
        return {**described, "error": "out of memory", "where": "host", "detail": refused}
    tried: list[dict[str, Any]] = []
    losses: list[float] = []
    best: dict[str, Any] = {}
    with MemoryMeter(device) as meter:
        try:
            contender = _build(
                rival, config, chosen, device=device, precision=precision, rows=rows, stage=stage,
                num_micro_batches=-(-tokens // (rows[0] * sequence)),
            )  # fmt: skip
            described["precision"] = contender_precision(rival, precision, device)
            for count in sorted(size for size in rows if size * sequence <= tokens):
                meter.reset_device()
                seconds, norms = [], []
                for _ in range(WARM_UP + steps):
                    batch = step_tokens(spec.vocab_size, tokens, len(losses), sequence)
                    synchronize(device)
                    begun = time.perf_counter()
                    loss, norm = contender.step(*batch, count)
                    synchronize(device)
                    seconds.append(time.perf_counter() - begun)
                    losses.append(loss)
                    norms.append(norm)
                    print(f"rows {count}: {loss:.4f} {norm:.3f} {seconds[-1]:.3f} s",
                          file=sys.stderr, flush=True)  # fmt: skip
                figures = {
                    "rows": count,
                    **speed(spec, tokens, sequence, seconds[WARM_UP:]),
                    **meter.peaks(),
                    "warm_up_seconds": seconds[:WARM_UP],
                    "grad_norms": norms,
                }
                tried.append(figures)
                best = max(tried, key=lambda entry: entry["tokens_per_second"])
                report({**described, **best, "losses": losses, "tried": _short(tried)})
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            said = str(error).splitlines()[0]
            if not best:
                return {**described, "error": "out of memory", "detail": said, **meter.peaks()}
            return {**described, **best, "losses": losses, "tried": _short(tried),
                    "larger_rows": f"out of memory: {said}"}  # fmt: skip
    return {**described, **best, "losses": losses, "tried": _short(tried)}


def curve_case(
    *,
    rival: str,
    model: str,
    tokens: list[int],
    rows: int,
    options: dict[str, Any] | None = None,
    precision: str | None = None,
    steps: int = 2,
    sequence: int = SEQUENCE,
) -> dict[str, Any]:
    """Rates of one rival at several numbers of tokens a step, built and compiled once.

    For rivals whose step takes any number of micro-batches (FSDP2); arguments as above.
    """
    from headrace.models.spec import ModelSpec

    device = default_device()
    config = qwen3_config(model)
    spec = ModelSpec(config)
    chosen = RivalOptions(**options or {})
    described = {"rival": rival, "rows": rows, **chosen.described(device)}
    refused = _too_large_for_host(rival, spec)
    if refused:
        return {**described, "error": "out of memory", "where": "host", "detail": refused}
    contender = _build(
        rival, config, chosen, device=device, precision=precision, rows=[rows], stage=2,
        num_micro_batches=1,
    )  # fmt: skip
    points: list[dict[str, Any]] = []
    for count in tokens:
        seconds = []
        for step in range(1 + steps):
            batch = step_tokens(spec.vocab_size, count, step, sequence)
            synchronize(device)
            begun = time.perf_counter()
            contender.step(*batch, rows)
            synchronize(device)
            seconds.append(time.perf_counter() - begun)
        points.append({"tokens": count, **speed(spec, count, sequence, seconds[1:])})
        print(f"{count} tokens: {points[-1]['tokens_per_second']:.0f} tok/s",
              file=sys.stderr, flush=True)  # fmt: skip
        report({**described, "points": points})
    return {**described, "points": points}


def _build(
    rival: str,
    config: Any,
    options: RivalOptions,
    *,
    device: torch.device,
    precision: str | None,
    rows: list[int],
    stage: int,
    num_micro_batches: int,
) -> Any:
    if rival in ("fsdp2", "fsdp2-offload"):
        from benchmarks.cases.fsdp import Fsdp2

        return Fsdp2(
            config, options, device=device, offload=rival == "fsdp2-offload",
            precision=contender_precision(rival, precision, device),
        )  # fmt: skip
    if rival == "zero-offload":
        from benchmarks.cases.zero_offload import ZeroOffload

        if len(rows) != 1:
            raise ValueError("zero-offload takes one micro-batch size a case: its engine fixes it")
        return ZeroOffload(
            config, options, device=device, rows=rows[0], num_micro_batches=num_micro_batches,
            stage=stage,
        )  # fmt: skip
    raise ValueError(f"no rival {rival!r}; there are {', '.join(RIVALS)}")


def contender_precision(rival: str, precision: str | None, device: torch.device) -> Any:
    """What is computed in and kept: ``mixed`` is bf16 compute with float32 masters and moments."""
    if rival == "zero-offload":
        return "mixed"
    return precision or ("mixed" if device.type == "cuda" else "float32")


def _too_large_for_host(rival: str, spec: Any) -> str | None:
    """Say why the host cannot hold a rival's state; running out there takes the machine along."""
    from headrace.store.host_memory import host_memory
    from headrace.units import format_bytes

    sizes = [param.numel for unit in spec.units for param in unit.params]
    if rival == "fsdp2-offload":
        from benchmarks.cases.fsdp import offloaded_host_bytes

        needed = offloaded_host_bytes(sizes)
    elif rival == "zero-offload":
        from benchmarks.cases.zero_offload import HOST_BYTES_A_PARAMETER

        needed = HOST_BYTES_A_PARAMETER * sum(sizes)
    else:
        return None
    available = host_memory().available
    if needed <= available:
        return None
    return f"needs {format_bytes(needed)} of host memory, {format_bytes(available)} are there"


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up; pinned host memory fails with a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "out of memory" in str(error).lower()


def _short(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("rows", "tokens_per_second", "tflops", "seconds", "device_peak_gib")
    return [{name: entry[name] for name in names} for entry in tried]
