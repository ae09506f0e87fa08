"""Activations in host memory: the same bits, and the device's memory really given back."""

import gc
import weakref

import pytest
import torch

from headrace.engine import EngineConfig, offload
from headrace.engine.offload import ActivationOffload, SavedActivations
from headrace.errors import ConfigError, LaneError
from tiny import (
    differing,
    make_batches,
    make_engine,
    planes,
    tiny_config,
    tiny_state,
    train,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch):
    """Tiny models save tiny tensors."""
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "offload"},
        {"activations": "offload", "recompute_layers": 2},
        {"offload_layers": 2},
        {"offload_layers": 3, "recompute_layers": 1, "micro_batches_per_wave": 2},
        {"activations": "offload", "poison_slots": True, "weight_slots": 2,
         "lane_jitter_seconds": 0.002},
    ],
    ids=["all", "after-recompute", "some", "mixed-waves", "poisoned-race"],
)  # fmt: skip
def test_offload_keeps_every_bit(settings):
    config = tiny_config(tied=False, num_hidden_layers=5)
    expected = train(config, steps=3, cuts=(4, 11))
    found = train(config, steps=3, cuts=(4, 11), **settings)
    assert found[0] == expected[0]
    assert differing(found[1], expected[1]) == []


def test_layers_leave_and_come_back(monkeypatch):
    """Of five layers' two micro-batches the last two are still there when backward needs them."""
    sent, arrived = [], []
    send, turn, arrive = (getattr(ActivationOffload, n) for n in ("send", "turn", "arrive"))

    def sending(self, layer, number, saved):
        send(self, layer, number, saved)
        sent.append((layer, number, saved))

    def turning(self, order):
        order = list(order)
        arrived.append([saved.is_away for saved in order])
        turn(self, order)

    def arriving(self, saved):
        arrive(self, saved)
        arrived.append(saved)

    for name, function in (("send", sending), ("turn", turning), ("arrive", arriving)):
        monkeypatch.setattr(ActivationOffload, name, function)
    spec, state = tiny_state(tiny_config(num_hidden_layers=5))
    with make_engine(spec, state, activations="offload") as engine:
        engine.step(make_batches(2), learning_rate=1e-3)
    assert [place[:2] for place in sent] == [(layer, m) for layer in range(5) for m in (0, 1)]
    assert all(saved.num_bytes > 0 for *_, saved in sent)
    away, *rest = arrived
    assert away == [False] * 2 + [True] * 8
    by_place = {place[:2]: place[2] for place in sent}
    assert rest == [by_place[layer, m] for layer in reversed(range(5)) for m in (0, 1)]


def test_what_left_is_freed_on_the_device():
    lane = ActivationOffload(CPU, timeout_seconds=20.0, jitter=None)
    rows, watched = [], []
    for layer in range(4):
        saved = SavedActivations(())
        big = torch.full((100, 10), float(layer))
        references = saved.put(big.T), saved.put(big[3:5])
        watched.append(weakref.ref(saved.storages[0]))
        del big
        rows.append((saved, references))
        lane.send(layer, 0, saved)
    gc.collect()
    assert [saved.is_away for saved, _ in rows] == [True, True, False, False]
    assert [ref() is None for ref in watched] == [True, True, False, False]
    lane.turn(saved for saved, _ in reversed(rows))
    for layer, (saved, references) in reversed(list(enumerate(rows))):
        lane.arrive(saved)
        whole, part = (saved.get(reference) for reference in references)
        assert whole.shape == (10, 100)
        assert whole.stride() == (1, 10)
        assert part.shape == (2, 10)
        assert bool((whole == layer).all())
        assert bool((part == layer).all())
        assert whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        # One is on its way while this one is used, and no more.
        assert [s.is_away for s, _ in rows] == [i < layer - 1 and i < 2 for i in range(4)]
    lane.close()


def test_what_a_layer_was_called_with_stays():
    """A copy of the accumulator would swallow what backward adds to it."""
    accumulator = torch.zeros(64)
    saved = SavedActivations([accumulator])
    view = accumulator[8:16]
    assert saved.put(view) is view
    assert saved.num_bytes == 0


def test_steps_of_growing_size_get_larger_buffers():
    config = tiny_config(tied=False)
    runs = []
    for activations in ("keep", "offload"):
        spec, state = tiny_state(config)
        with make_engine(spec, state, activations=activations) as engine:
            for number, length in enumerate((8, 16, 12)):
                batches = make_batches(1 + number, length=length, seed=number)
                engine.step(batches, learning_rate=1e-3)
            engine.synchronize()
        runs.append(planes(state))
    assert differing(*runs) == []


@pytest.mark.parametrize("lane", ["_out", "_back"])
def test_a_failed_copy_stops_the_step(lane, monkeypatch):
    spec, state = tiny_state(tiny_config(num_hidden_layers=5))

    def failing():
        raise OSError("link down")

    with make_engine(spec, state, activations="offload", lane_timeout_seconds=20.0) as engine:
        monkeypatch.setattr(getattr(engine._waves._offload, lane), "_delay", failing)
        with pytest.raises(LaneError, match="link down"):
            engine.step(make_batches(1), learning_rate=1e-3)


def test_what_each_layer_leaves():
    def plan(num_layers=6, first=0, **settings):
        leaving = EngineConfig(**settings).activation_plan(num_layers, first)
        return "".join(what[0] for what in leaving)

    assert plan() == "kkkkkk"
    assert plan(activations="recompute", offload_layers=2) == "rrrrrr"
    assert plan(activations="offload") == "oooooo"
    assert plan(activations="offload", recompute_layers=2) == "rroooo"
    assert plan(recompute_layers=2, offload_layers=2) == "rrokok"
    assert plan(offload_layers=2) == "okkokk"
    assert plan(offload_layers=4).count("o") == 4
    assert plan(recompute_layers=5, offload_layers=3) == "rrrrro"
    assert plan(recompute_layers=9) == "rrrrrr"
    assert plan(first=2, recompute_layers=1, offload_layers=1) == "nnrokk"
    assert plan(first=6, activations="recompute") == "nnnnnn"
    with pytest.raises(ConfigError, match="offload_layers is -1"):
        EngineConfig(offload_layers=-1)
