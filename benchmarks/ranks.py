"""Several ranks: that they compute what one does, and how fast they are.

``parity`` trains a small random model on all ranks together and, on the main rank, alone, over the
same global batch: losses, norms and weights must agree to rounding. ``speed`` times steps of a
random model of published shape and prints tokens a second of all ranks, model TFLOP/s of each, and
the host and device bytes that each takes. Nothing is downloaded; the last line of the main rank's
output is the result as JSON.

Usage: torchrun --nproc-per-node 2 -m benchmarks.ranks parity [--dtype float32|bfloat16]
       torchrun --nproc-per-node 2 -m benchmarks.ranks speed [--model 8b] [--tokens 65536]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cases.common import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SEQUENCE,
    WARM_UP,
    MemoryMeter,
    micro_batches,
    qwen3_config,
    speed,
    step_tokens,
    synchronize,
)
from headrace.engine import Engine, EngineConfig
from headrace.engine.lanes import indexed_device
from headrace.errors import HeadraceError
from headrace.models.slices import plan_sections
from headrace.models.spec import ModelSpec
from headrace.parallel.ranks import Ranks, bind_device
from headrace.policy.budget import Workload
from headrace.policy.search import choose, typical_rates
from headrace.store.host_memory import host_memory
from headrace.store.loading import initialise
from headrace.store.ranges import Share
from headrace.store.state import ModelState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.batch import MicroBatch
    from headrace.engine import StepResult
    from headrace.store.ranges import Part
    from headrace.store.state import UnitState

PARITY_STEPS = 5
PARITY_SEQUENCE = 256


def main() -> int:
    arguments = arguments_of()
    ranks = Ranks.started()
    try:
        with ranks.joined():
            device = indexed_device(torch.device(bind_device(ranks, arguments.device)))
            if device.type == "cuda":
                torch.cuda.set_device(device)
            ranks.connect(device)
            result = run(arguments, ranks, device)
    except HeadraceError as error:
        print(f"rank {ranks.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # groups of a failed run have threads that an interpreter cannot end
    if ranks.is_main:
        print(json.dumps(result), flush=True)
    ranks.close(failed=False)
    return int(not result.get("agrees", True))


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.ranks", description=__doc__)
    parser.add_argument("case", choices=["parity", "speed"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, over all ranks")
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, JSON")
    return parser.parse_args(words)


def run(arguments: argparse.Namespace, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """The result of a case; only the main rank's means something."""
    return (_parity if arguments.case == "parity" else _speed)(arguments, ranks, device)


def _parity(arguments: argparse.Namespace, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Train on all ranks, then on the main one alone, and compare."""
    spec = ModelSpec(qwen3_config(arguments.model or "tiny"))
    rows = 4 * ranks.size - 1  # the last rank has one micro-batch less
    steps = [
        micro_batches(
            *step_tokens(spec.vocab_size, rows * PARITY_SEQUENCE, step, PARITY_SEQUENCE), 1
        )
        for step in range(PARITY_STEPS)
    ]
    together, weights = _train(arguments, spec, ranks, device, steps)
    if not ranks.is_main:
        ranks.meet()
        return {}
    alone, expected = _train(arguments, spec, Ranks(), device, steps)
    ranks.meet()
    largest = max(
        float((weights[name] - expected[name]).norm() / expected[name].norm()) for name in expected
    )
    # Sums in another order, and bf16 gradients that round otherwise; AdamW's first steps make a
    # whole step of a gradient near zero, whatever its sign.
    limits = (1e-5, 5e-4) if arguments.dtype == "float32" else (1e-3, 5e-3)
    losses = max(abs(a.loss - b.loss) / b.loss for a, b in zip(together, alone, strict=True))
    norms = max(
        abs(a.grad_norm - b.grad_norm) / b.grad_norm for a, b in zip(together, alone, strict=True)
    )
    return {
        "case": "parity",
        "num_ranks": ranks.size,
        "device": str(device),
        "dtype": arguments.dtype,
        "loss_error": losses,
        "norm_error": norms,
        "weight_error": largest,
        "limits": limits,
        "losses": [result.loss for result in together],
        "agrees": max(losses, norms) <= limits[0] and largest <= limits[1],
    }


def _train(
    arguments: argparse.Namespace,
    spec: ModelSpec,
    ranks: Ranks,
    device: torch.device,
    steps: list[list[MicroBatch]],
) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """Results of the steps, and on the main rank the weights by unit."""
    share = Share(rank=ranks.rank, num_ranks=ranks.size)
    config = EngineConfig(**arguments.options)
    sections = plan_sections(spec, config.expert_slices or 1)
    state = ModelState(spec.units, arguments.dtype, device=device, share=share, sections=sections)
    initialise(spec, state, seed=0)
    with Engine(spec, state, device, config, ranks=ranks) as engine:
        results = [
            engine.step(
                batch[ranks.rank :: ranks.size], learning_rate=1e-3, max_grad_norm=MAX_GRAD_NORM
            )
            for batch in steps
        ]
        engine.synchronize()
    weights = {}
    for unit, layout in zip(state.units, state.layouts, strict=True):
        whole = torch.zeros(layout.num_trainable)
        for part, values in _parts(ranks, unit):
            whole[part.start : part.stop] = values
        if ranks.is_main:
            weights[layout.name] = whole
    state.close()
    return results, weights


def _parts(ranks: Ranks, unit: UnitState) -> Iterator[tuple[Part, torch.Tensor]]:
    """On the main rank what every rank has trained of a unit; the others send it."""
    for rank in range(ranks.size):
        for part in unit.shard.of_rank(rank).trained_parts:
            values = torch.empty(part.stop - part.start)
            if rank == ranks.rank:
                values = unit.weights[part.at : part.at + values.numel()].float().cpu()
            if rank and rank == ranks.rank:
                ranks.send_to_main(values)
            elif rank and ranks.is_main:
                ranks.receive(values, rank)
            if ranks.is_main:
                yield part, values


def _speed(arguments: argparse.Namespace, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Time steps after the warm-up, as :mod:`benchmarks.cases.engine` does."""
    spec = ModelSpec(qwen3_config(arguments.model or "8b"))
    config = _placed(arguments, spec, ranks, device)
    share = Share(rank=ranks.rank, num_ranks=ranks.size)
    begun = time.perf_counter()
    with MemoryMeter(device) as meter:
        state = ModelState(
            spec.units, "bfloat16", device=device, share=share,
            device_units=config.device_units or 0,
            sections=plan_sections(spec, config.expert_slices or 1, config.device_units or 0),
        )  # fmt: skip
        _fill(state)
        batches = [
            micro_batches(
                *step_tokens(spec.vocab_size, arguments.tokens, step, arguments.sequence),
                arguments.rows,
            )[ranks.rank :: ranks.size]
            for step in range(WARM_UP + arguments.steps)
        ]
        results, returns = [], [time.perf_counter()]
        with Engine(spec, state, device, config, ranks=ranks) as engine:
            for batch in batches:
                results.append(
                    engine.step(batch, learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
                )
                returns.append(time.perf_counter())
                if ranks.is_main:
                    print(results[-1], f"{returns[-1] - returns[-2]:.3f} s",
                          file=sys.stderr, flush=True)  # fmt: skip
            engine.synchronize()
            synchronize(device)
            tail = time.perf_counter() - returns[-1]
        peaks = meter.peaks()
    times = [after - before for before, after in pairwise(returns)]
    figures = speed(spec, arguments.tokens, arguments.sequence, times[WARM_UP:])
    figures["tflops_a_rank"] = figures.pop("tflops") / ranks.size
    table = ranks.table([peaks["host_rss_gib"], peaks["device_peak_gib"], state.allocated_bytes])
    return {
        "case": "speed",
        "num_ranks": ranks.size,
        "model": arguments.model or "8b",
        "tokens": arguments.tokens,
        "rows": arguments.rows,
        "options": {k: v for k, v in vars(config).items() if v is not None},
        **figures,
        "tail_seconds": tail,
        "host_rss_gib": [row[0] for row in table],
        "device_peak_gib": [row[1] for row in table],
        "state_gib": [row[2] / 2**30 for row in table],
        "machine_host_used_gib": peaks["host_used_gib"],
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "exposed_seconds": results[-1].exposed_seconds,
        "preparation_seconds": returns[0] - begun,
    }


def _placed(
    arguments: argparse.Namespace, spec: ModelSpec, ranks: Ranks, device: torch.device
) -> EngineConfig:
    """What the options leave open, chosen as a run chooses it; nothing on the CPU."""
    config = EngineConfig(**{"loss_chunk_tokens": 2048} | arguments.options)
    cores = max(1, len(os.sched_getaffinity(0)) // ranks.local_size)
    if config.update_threads is None:
        config = EngineConfig(**vars(config) | {"update_threads": cores})
    if device.type != "cuda":
        return config
    rows = arguments.tokens // arguments.sequence
    workload = Workload(
        tokens=arguments.rows * arguments.sequence,
        micro_batches=-(-rows // (arguments.rows * ranks.size)),
        sequence_length=arguments.sequence,
    )
    choice = choose(
        spec, config, "bfloat16", workload,
        device_bytes=torch.cuda.mem_get_info(device)[0],
        host_bytes=host_memory().available // ranks.local_size,
        rates=typical_rates(device, cores),
        num_ranks=ranks.size,
    )  # fmt: skip
    ranks.meet()  # before anybody takes memory
    return choice.config


def _fill(state: ModelState) -> None:
    """Normal weights of std 0.02, norms one: layers alike, as speed does not tell them apart."""
    generator = torch.Generator().manual_seed(0)
    piece = torch.randn(1 << 24, generator=generator) * 0.02
    for unit in state.units:
        for start in range(0, unit.weights.numel(), piece.numel()):
            stop = min(start + piece.numel(), unit.weights.numel())
            unit.weights[start:stop].copy_(piece[: stop - start])
        for param in unit.layout.params:
            if len(param.shape) < 2:
                for own, _ in unit.shard.own(param.offset, param.numel):
                    unit.weights[own].fill_(1.0)


if __name__ == "__main__":
    sys.exit(main())
