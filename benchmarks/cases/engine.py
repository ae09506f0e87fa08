"""headrace's own training steps, placed by its own search or as a case says.

Invariant: steps are timed from return to return, so that whatever a step leaves running for the
next one is paid for in some step; the last one's tail is reported beside the median.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases.common import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SEQUENCE,
    WARM_UP,
    MemoryMeter,
    default_device,
    micro_batches,
    qwen3_config,
    speed,
    step_tokens,
    synchronize,
)
from benchmarks.lanes import summarise

if TYPE_CHECKING:
    import torch

    from headrace.engine import EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.policy.search import Choice
    from headrace.policy.steptime import Rates

ROWS = (8, 4, 2, 1)


def train_case(
    *,
    model: str,
    tokens: int,
    options: dict[str, Any] | None = None,
    rows: int | None = None,
    device_gib: float | None = None,
    steps: int = 4,
    sequence: int = SEQUENCE,
    mean_document: int | None = None,
    trace: str | None = None,
    num_layers: int | None = None,
) -> dict[str, Any]:
    """Time ``steps`` steps after the warm-up, clipping at 1.0.

    Args:
        model: a name that :func:`benchmarks.cases.common.qwen3_config` knows.
        tokens: of a step.
        options: of the engine; what they leave open is chosen by headrace's search.
        rows: sequences of a micro-batch; None lets the predicted step time choose.
        device_gib: all the device memory the process may take, the driver's context included.
        steps: timed ones.
        sequence: tokens of a sequence.
        mean_document: rows are packed with documents of about that many tokens; None for one
            document a row. Model FLOPs are still counted as if each row were one.
        trace: file for a Chrome trace; the result then says where the time went.
        num_layers: fewer than the model has.
    """
    import torch

    from headrace.engine import Engine
    from headrace.models.flops import flops_per_token
    from headrace.models.spec import ModelSpec
    from headrace.policy.search import typical_rates
    from headrace.policy.trial import fill_randomly
    from headrace.store.state import ModelState

    device = default_device()
    spec = ModelSpec(qwen3_config(model, num_layers))
    room = _device_room(device, device_gib)
    rates = None
    if room is not None:
        rates = typical_rates(device, len(os.sched_getaffinity(0)))
    if trace is not None:
        options = {**(options or {}), "trace": trace}
    config, rows, choice = place(
        spec, tokens, options or {}, rows, room=room, rates=rates, sequence=sequence
    )
    described: dict[str, Any] = {
        "rows": rows,
        "device_units": config.device_units or 0,
        "recompute_layers": config.recompute_layers or 0,
        "micro_batches_per_wave": config.micro_batches_per_wave,
        "num_units": len(spec.units),
        "engine": {k: v for k, v in asdict(config).items() if v is not None},
    }
    if choice is not None:
        described["predicted"] = {
            "seconds": choice.time.seconds,
            "binding": choice.time.binding,
            "device_gib": choice.budget.device_bytes / 2**30,
            "host_gib": choice.budget.host_bytes / 2**30,
        }
    with MemoryMeter(device) as meter:
        # On the CPU a bf16 state computes in float32 all the same; it is the engine's usual one.
        state = ModelState.allocate(
            spec, "bfloat16", device=device, device_units=config.device_units or 0
        )
        fill_randomly(state, torch.Generator().manual_seed(0))
        batches = [
            micro_batches(
                *step_tokens(spec.vocab_size, tokens, step, sequence), rows, mean_document
            )
            for step in range(WARM_UP + steps)
        ]
        results, returns = [], []
        with Engine(spec, state, device, config) as engine:
            for step, batch in enumerate(batches):
                begun = time.perf_counter() if step == 0 else returns[-1]
                results.append(
                    engine.step(batch, learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
                )
                returns.append(time.perf_counter())
                print(step, results[-1], f"{returns[-1] - begun:.3f} s",
                      file=sys.stderr, flush=True)  # fmt: skip
            engine.synchronize()
            synchronize(device)
            compiled = engine.compile_counts
            tail = time.perf_counter() - returns[-1]
        times = [after - before for before, after in pairwise(returns)]
        figures = speed(spec, tokens, sequence, times[WARM_UP - 1 :])
        peaks = meter.peaks()
    if trace is not None:
        figures["lanes"] = summarise(json.loads(Path(trace).read_text()))
        figures["floor_flops"] = tokens * flops_per_token(spec, sequence)
    return {
        **described,
        **figures,
        **peaks,
        "tail_seconds": tail,
        "mean_seconds_with_tail": (sum(times[WARM_UP - 1 :]) + tail) / steps,
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "exposed_seconds": results[-1].exposed_seconds,
        "compile": None if compiled is None else compiled.row() | compiled.eager_calls,
    }


def _device_room(device: torch.device, device_gib: float | None) -> int | None:
    """Bytes that this process may still allocate on the device, the cap enforced; None on a CPU."""
    import torch

    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    if device_gib is None:
        return free
    allowed = int(device_gib * 2**30) - (total - free)  # the context is in total - free
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    return allowed


def place(
    spec: ModelSpec,
    tokens: int,
    options: dict[str, Any],
    rows: int | None,
    *,
    room: int | None,
    rates: Rates | None,
    sequence: int = SEQUENCE,
) -> tuple[EngineConfig, int, Choice | None]:
    """The engine's settings and micro-batch rows: the search's shortest predicted step.

    The search places units, recomputation and waves; micro-batch sizes are tried around it.
    Without a GPU (``room`` is None) nothing is placed.

    Raises:
        CapacityError: nothing fits; of the smallest micro-batch tried.
    """
    from headrace.engine import EngineConfig
    from headrace.errors import CapacityError
    from headrace.policy.budget import Workload
    from headrace.policy.search import SAME_SPEED, choose
    from headrace.store.host_memory import host_memory

    num_sequences = tokens // sequence
    sizes = [rows] if rows else [size for size in ROWS if num_sequences % size == 0]
    config = EngineConfig(**{"loss_chunk_tokens": 2048, **options})
    if room is None or rates is None:
        return config, sizes[0], None
    fitting: list[tuple[Choice, int]] = []
    refusal: CapacityError | None = None
    for size in sizes:
        workload = Workload(
            tokens=size * sequence, micro_batches=num_sequences // size, sequence_length=sequence
        )
        chunk = replace(config, loss_chunk_tokens=min(config.loss_chunk_tokens, size * sequence))
        try:
            choice = choose(
                spec, chunk, "bfloat16", workload, device_bytes=room,
                host_bytes=host_memory().available, rates=rates,
            )  # fmt: skip
        except CapacityError as error:
            refusal = error
            continue
        fitting.append((choice, size))
    if not fitting:
        assert refusal is not None
        raise refusal
    limit = SAME_SPEED * min(choice.time.seconds for choice, _ in fitting)
    # Of equally fast ones that with the fewest pieces: each costs what no model counts. Offloaded
    # activations cost most: layers wait for them in turn.
    choice, size = min(
        (pair for pair in fitting if pair[0].time.seconds <= limit),
        key=lambda pair: (
            bool(pair[0].config.offload_layers),
            _num_waves(pair[0].config, num_sequences // pair[1]),
            -pair[1],
        ),
    )
    return choice.config, size, choice


def _num_waves(config: EngineConfig, count: int) -> int:
    return -(-count // (config.micro_batches_per_wave or count))
