"""200 steps beside FSDP2: the same data, initial weights, schedule and optimizer; are losses equal?

The text is drawn from a fixed table in which each token has four equally likely successors, so the
loss falls from ln(vocabulary) towards ln 4 and a wrong update shows. The learning rate is one of
continued training: a loss that falls steeply magnifies rounding. FSDP2 runs a second time with
other micro-batches: what then differs is rounding alone, the floor of the comparison.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cases.common import (
    MAX_GRAD_NORM,
    default_device,
    micro_batches,
    qwen3_config,
    report,
)

if TYPE_CHECKING:
    from headrace.models.spec import ModelSpec
    from headrace.store.state import ModelState

NUM_SUCCESSORS = 4
WEIGHT_DECAY = 0.1

Step = tuple[torch.Tensor, torch.Tensor]


def agreement_case(
    *,
    model: str = "small",
    steps: int = 200,
    num_sequences: int = 16,
    sequence: int = 512,
    rows: int = 8,
    learning_rate: float = 3e-5,
    warm_up: int = 20,
    compiled: bool | None = None,
) -> dict[str, Any]:
    """Largest and mean difference of the loss, step by step.

    Args:
        model: a name in :data:`benchmarks.cases.common.SHAPES`.
        steps: of each run.
        num_sequences: of a step.
        sequence: their length.
        rows: sequences of a micro-batch.
        learning_rate: after the warm-up.
        warm_up: steps of a linear rise.
        compiled: headrace's layers; None as the engine does by default.
    """
    from headrace.models.spec import ModelSpec

    device = default_device()
    spec = ModelSpec(qwen3_config(model))
    data = list(chains(spec.vocab_size, steps, num_sequences, sequence))
    rates = [learning_rate * min(1.0, (step + 1) / warm_up) for step in range(steps)]
    mine, initial = _headrace(spec, data, rates, rows, device, compiled=compiled)
    theirs = _fsdp2(model, initial, data, rates, rows=rows, device=device)
    result = {"steps": steps, "model": model, **differences(mine, theirs)}
    report(result)  # stands if there is no time for the floor
    again = _fsdp2(model, initial, data, rates, rows=max(1, rows // 2), device=device)
    floor = differences(theirs, again)
    return {
        **result,
        "floor_largest_difference": floor["largest_difference"],
        "floor_mean_difference": floor["mean_difference"],
        "losses": mine,
        "fsdp2_losses": theirs,
        "fsdp2_other_rows_losses": again,
    }


def differences(mine: list[float], theirs: list[float]) -> dict[str, float]:
    """How far two runs' losses are apart."""
    gaps = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    return {
        "largest_difference": gaps[worst],
        "at_step": worst,
        "mean_difference": sum(gaps) / len(gaps),
        "first_loss": mine[0],
        "last_loss": mine[-1],
    }


def chains(vocab_size: int, steps: int, num_sequences: int, sequence: int, seed: int = 0) -> Any:
    """Ids and targets of each step: walks over a random table of successors."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, vocab_size, (vocab_size, NUM_SUCCESSORS), generator=generator)
    for _ in range(steps):
        turns_NT = torch.randint(0, NUM_SUCCESSORS, (num_sequences, sequence), generator=generator)
        ids_NT = torch.empty((num_sequences, sequence + 1), dtype=torch.long)
        ids_NT[:, 0] = torch.randint(0, vocab_size, (num_sequences,), generator=generator)
        for position in range(sequence):
            ids_NT[:, position + 1] = table[ids_NT[:, position], turns_NT[:, position]]
        yield ids_NT[:, :-1].contiguous(), ids_NT[:, 1:].contiguous()


def _headrace(
    spec: ModelSpec,
    data: list[Step],
    rates: list[float],
    rows: int,
    device: torch.device,
    *,
    compiled: bool | None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the initial master weights by name."""
    from headrace.engine import AdamWConfig, Engine, EngineConfig
    from headrace.store.loading import initialise
    from headrace.store.state import ModelState

    cuda = device.type == "cuda"
    # Half of the units on the device: both updates take part.
    units = len(spec.units) // 2 if cuda else 0
    state: ModelState = ModelState.allocate(
        spec, "bfloat16" if cuda else "float32", device=device, device_units=units
    )
    initialise(spec, state, seed=1)
    initial = {p.name: unit.master(p) for unit in state.units for p in unit.layout.params}
    losses = []
    config = EngineConfig(compile=compiled, device_units=units)
    optimizer = AdamWConfig(weight_decay=WEIGHT_DECAY)
    with Engine(spec, state, device, config, optimizer) as engine:
        for (ids_NT, targets_NT), rate in zip(data, rates, strict=True):
            batches = micro_batches(ids_NT, targets_NT, rows)
            result = engine.step(batches, learning_rate=rate, max_grad_norm=MAX_GRAD_NORM)
            losses.append(result.loss)
        engine.synchronize()
    state.close()
    print(f"headrace: {losses[0]:.4f} to {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return losses, initial


def _fsdp2(
    model: str,
    initial: dict[str, torch.Tensor],
    data: list[Step],
    rates: list[float],
    *,
    rows: int,
    device: torch.device,
) -> list[float]:
    from benchmarks.cases.fsdp import Fsdp2
    from benchmarks.cases.rival_model import RivalOptions

    options = RivalOptions(checkpointing="none", loss="chunked", liger_kernels=False)
    contender = Fsdp2(
        qwen3_config(model),
        options,
        device=device,
        precision="mixed" if device.type == "cuda" else "float32",
        weight_decay=WEIGHT_DECAY,
    )
    contender.load(initial)
    losses = []
    for (ids_NT, targets_NT), rate in zip(data, rates, strict=True):
        contender.set_learning_rate(rate)
        losses.append(contender.step(ids_NT, targets_NT, rows)[0])
    print(f"FSDP2: {losses[0]:.4f} to {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return losses
