"""What ranks run in the tests of :mod:`headrace.parallel`, and the same on one rank."""

from __future__ import annotations

import benchmarks.ranks as benchmark
import torch
from transformers import AutoConfig

from headrace.engine import AdamWConfig, Engine, EngineConfig
from headrace.models.slices import plan_sections
from headrace.models.spec import ModelSpec
from headrace.store.checkpoint import load_checkpoint
from headrace.store.loading import initialise
from headrace.store.ranges import Share
from headrace.store.state import ModelState
from headrace.trainer.place import _alike
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
    frozen="",
    constant=(),
    lora=None,
    **settings,
):
    """Train a fresh tiny model; what the steps and an evaluation said, and this rank's planes.

    In step ``infinite_at`` the last rank's gradient of the first layer is infinite. Layers before
    ``frozen_below`` and the embedding are frozen if it is above 0, and names with ``frozen`` in
    them. All tokens of the ``constant`` micro-batches are one, so that they choose alike.
    """
    kept = tuple(f"model.layers.{index}." for index in range(frozen_below))
    below = ("model.embed_tokens", *kept) if frozen_below else ()
    spec = ModelSpec(
        config,
        trainable=None
        if lora
        else lambda name: not name.startswith(below) and not (frozen and frozen in name),
        lora=lora,
    )
    slices = settings.get("expert_slices", 1)
    share = Share(rank=ranks.rank, num_ranks=ranks.size)
    state = ModelState(
        spec.units,
        dtype,
        share=share,
        device_units=device_units,
        sections=plan_sections(spec, slices, device_units),
    )
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

        def return_gradient(unit, slot, early, section=0):
            if unit == 1 and step == infinite_at and ranks.rank == ranks.size - 1:
                slot.flat[:1].fill_(float("inf"))
            return give(unit, slot, early, section)

        engine.updater.return_gradient = return_gradient
        for step in range(steps):
            batches = make_batches(num_batches, seed=step, cuts=cuts, vocab=vocab)
            for index in constant:
                batches[index].input_ids_BT.fill_(7)
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


def placed_alike(ranks):
    """What ranks do that would each choose otherwise."""
    own = EngineConfig(expert_slices=2 + ranks.rank, device_units=ranks.rank, update_threads=4)
    return vars(_alike(own, ranks))


def allocated(ranks, *, config, lora=None, **settings):
    """Bytes that an engine has after a step of a micro-batch for each wave."""
    spec = ModelSpec(config, lora=lora)
    state = ModelState(
        spec.units,
        "float32",
        share=Share(rank=ranks.rank, num_ranks=ranks.size),
        sections=plan_sections(spec, settings["expert_slices"]),
    )
    initialise(spec, state, seed=0)
    config = EngineConfig(update_threads=1, **settings)
    with Engine(spec, state, "cpu", config, ranks=ranks) as engine:
        engine.step(make_batches(2), learning_rate=0.0)
        windows, sums = engine._windows, engine._accumulators
        slots = [windows.embed, windows.head, *windows.layers]
        return {
            "slots": sum(slot.flat.nbytes for slot in slots),
            "accumulators": sum(s.flat.nbytes for s in (sums.embed, sums.head, *sums._layers)),
            "returned": engine.updater.pending_bytes,
            "state": sum(unit.num_bytes for unit in state.units),
        }


def loaded(ranks, *, path, dtype, slices=1):
    """This rank's planes of a checkpoint."""
    spec = ModelSpec(AutoConfig.from_pretrained(str(path)))
    share = Share(rank=ranks.rank, num_ranks=ranks.size)
    state = ModelState(spec.units, dtype, share=share, sections=plan_sections(spec, slices))
    load_checkpoint(path, spec, state)
    return shard_planes(state)


def shard_planes(state):
    """By unit and kind, stretches of the unit's elements, each with the first one's number."""
    found = {}
    for unit in state.units:
        shard = unit.shard
        kinds = {name: (plane, shard.trained_parts) for name, plane in unit.planes.items()}
        kinds["weights"] = unit.weights, shard.trained_parts
        kinds["frozen"] = unit.weights, shard.frozen_parts
        for kind, (plane, parts) in kinds.items():
            found[unit.layout.name, kind] = [
                (
                    part.start,
                    plane[part.at : part.at + part.stop - part.start].float().clone().numpy(),
                )
                for part in parts
            ]
    return found


def joined(shards):
    """Planes of all ranks in one."""
    return {
        key: torch.cat(
            [
                torch.empty(0),
                *(
                    torch.from_numpy(values)
                    for _, values in sorted(
                        (part for shard in shards for part in shard[key]), key=lambda part: part[0]
                    )
                ),
            ]
        )
        for key in shards[0]
    }


def benchmarked(ranks, *, words):
    """A case of ``benchmarks.ranks``, as its command line says."""
    return benchmark.run(benchmark.arguments_of(words), ranks, torch.device("cpu"))
