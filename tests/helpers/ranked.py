"""What ranks run in the tests of :mod:`headrace.parallel`, and the same on one rank."""

from __future__ import annotations

import benchmarks.ranks as benchmark
import torch
from transformers import AutoConfig

from headrace.engine import AdamWConfig, Engine, EngineConfig
from headrace.models.spec import ModelSpec
from headrace.store.checkpoint import load_checkpoint
from headrace.store.loading import initialise
from headrace.store.ranges import Share
from headrace.store.state import ModelState
from tiny import VOCAB, make_batches


def trained(
    ranks,
    *,
    config,
    dtype="float32",
    steps=3,
    num_batches=6,
    max_grad_norm=0.5,
    learning_rate=1e-3,
    device_units=0,
    cuts=(),
    vocab=VOCAB,
    infinite_at=None,
    frozen_below=0,
    **settings,
):
    """Train a fresh tiny model; what the steps and an evaluation said, and this rank's planes.

    In step ``infinite_at`` the last rank's gradient of the first layer is infinite. Layers before
    ``frozen_below`` and the embedding are frozen if it is above 0.
    """
    kept = tuple(f"model.layers.{index}." for index in range(frozen_below))
    frozen = ("model.embed_tokens", *kept) if frozen_below else ()
    spec = ModelSpec(config, trainable=lambda name: not name.startswith(frozen))
    share = Share(rank=ranks.rank, num_ranks=ranks.size)
    state = ModelState(spec.units, dtype, share=share, device_units=device_units)
    initialise(spec, state, seed=0)
    results = []
    engine = Engine(
        spec,
        state,
        "cpu",
        EngineConfig(**{"update_threads": 1} | settings),
        AdamWConfig(weight_decay=0.1),
        ranks=ranks,
    )
    with engine:
        give = engine.updater.return_gradient

        def return_gradient(unit, slot, early):
            if unit == 1 and step == infinite_at and ranks.rank == ranks.size - 1:
                slot.flat[:1].fill_(float("inf"))
            return give(unit, slot, early)

        engine.updater.return_gradient = return_gradient
        for step in range(steps):
            batches = make_batches(num_batches, seed=step, cuts=cuts, vocab=vocab)
            mine = batches[ranks.rank :: ranks.size]
            results.append(
                engine.step(mine, learning_rate=learning_rate, max_grad_norm=max_grad_norm)
            )
        batches = make_batches(5, seed=99, vocab=vocab)
        evaluated = engine.evaluate(batches[ranks.rank :: ranks.size])
        engine.synchronize()
    said = [
        (r.loss, r.grad_norm, r.num_tokens, r.num_supervised_tokens, r.skipped) for r in results
    ]
    return said, (evaluated.loss_sum, evaluated.num_supervised_tokens), shard_planes(state)


def loaded(ranks, *, path, dtype):
    """This rank's planes of a checkpoint."""
    spec = ModelSpec(AutoConfig.from_pretrained(str(path)))
    state = ModelState(spec.units, dtype, share=Share(rank=ranks.rank, num_ranks=ranks.size))
    load_checkpoint(path, spec, state)
    return shard_planes(state)


def shard_planes(state):
    """By unit and kind, with the range of the unit's elements that they are."""
    found = {}
    for unit in state.units:
        trained, frozen = unit.shard.trained, unit.shard.frozen
        n = trained.numel
        parts = {"weights": unit.weights[:n], "frozen": unit.weights[n:], **unit.planes}
        for kind, plane in parts.items():
            piece = frozen if kind == "frozen" else trained
            found[unit.layout.name, kind] = (piece.start, plane.float().clone().numpy())
    return found


def joined(shards):
    """Planes of all ranks in one."""
    return {
        key: torch.cat(
            [torch.from_numpy(s[key][1]) for s in sorted(shards, key=lambda s: s[key][0])]
        )
        for key in shards[0]
    }


def benchmarked(ranks, *, words):
    """A case of ``benchmarks.ranks``, as its command line says."""
    return benchmark.run(benchmark.arguments_of(words), ranks, torch.device("cpu"))
