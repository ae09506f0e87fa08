"""How a step runs does not change its result: modes, waves, slots, chunks, threads, delays."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from headrace.engine import exposure, slots, windows
from headrace.errors import ConfigError
from tiny import differing, make_batches, make_engine, planes, tiny_config, tiny_state, train

STEPS = 4


@pytest.fixture(scope="module")
def plain():
    """Losses and final bits of the plain run, by tied, dtype and documents."""
    runs = {}

    def run(tied, dtype="float32", cuts=()):
        key = (tied, dtype, cuts)
        if key not in runs:
            runs[key] = train(tiny_config(tied=tied), steps=STEPS, dtype=dtype, cuts=cuts)
        return runs[key]

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "recompute"},
        {"weight_slots": 2},
        {"weight_slots": 4},
        {"weight_slots": 9},
        {"gradient_slots": 1},
        {"gradient_slots": 5},
        {"update_threads": 2},
        {"micro_batches_per_wave": 3},
        {"update_order": "weights_first"},
        {"update_order": "weights_first", "gradient_slots": 1, "chunk_bytes": 4096},
    ],
    ids=lambda settings: "-".join(f"{key}-{value}" for key, value in settings.items()),
)
def test_settings_keep_every_bit(plain, settings, dtype):
    expected = plain(True, dtype, (4, 11))
    run = train(tiny_config(tied=True), steps=STEPS, dtype=dtype, cuts=(4, 11), **settings)
    assert run[0] == expected[0]
    assert differing(run[1], expected[1]) == []


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("per_wave", [1, 2])
def test_waves_keep_every_bit_of_an_untied_model(plain, per_wave, activations):
    expected = plain(False)
    settings = {"micro_batches_per_wave": per_wave, "activations": activations}
    run = train(tiny_config(tied=False), steps=STEPS, **settings)
    assert run[0] == expected[0]
    assert differing(run[1], expected[1]) == []


@pytest.mark.parametrize("per_wave", [1, 2])
def test_waves_of_a_tied_model_agree_to_rounding(plain, per_wave):
    """One wave adds the head's gradients before the embedding's; several alternate."""
    losses, state = train(tiny_config(tied=True), steps=STEPS, micro_batches_per_wave=per_wave)
    expected_losses, expected = plain(True)
    assert losses == pytest.approx(expected_losses, abs=2e-6)
    for name in expected:
        if name.endswith("weights"):
            weights, wanted = state[name].view(torch.float32), expected[name].view(torch.float32)
            # Three learning rates: a gradient near zero may turn its sign.
            assert (weights - wanted).abs().max() < 3e-3
            assert (weights - wanted).abs().mean() < 1e-6


@pytest.mark.parametrize("cuts", [(), (4, 11)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_cut_micro_batches_agree_to_rounding(rows, cuts):
    """Two rows a micro-batch, whole or cut: the same tokens weigh the same."""
    losses, norms = [], []
    for settings in ({}, {"rows_per_micro_batch": rows}):
        spec, state = tiny_state(tiny_config(tied=False))
        with make_engine(spec, state, **settings) as engine:
            batches = make_batches(2, cuts=cuts)
            assert batches[0].input_ids_BT.shape[0] == 2
            evaluated = engine.evaluate(batches)
            result = engine.step(batches, learning_rate=1e-3)
        losses.append((evaluated.loss_sum, result.loss))
        norms.append(result.grad_norm)
        assert result.num_supervised_tokens == evaluated.num_supervised_tokens
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_document_over_the_end_of_a_row_is_not_cut():
    (batch,) = make_batches(1)
    rows, length = batch.input_ids_BT.shape
    crossing = replace(batch, cu_seqlens=torch.tensor([0, length + 2, rows * length]))
    assert crossing.split(1) == [crossing]
    assert [part.num_tokens for part in batch.split(1)] == [length] * rows


def test_micro_batches_of_a_balancing_loss_are_not_cut():
    spec, state = tiny_state(tiny_config())
    spec.auxiliary_loss = SimpleNamespace(coefficient=0.01)
    with pytest.raises(ConfigError, match="rows_per_micro_batch is 1, but a loss over"):
        make_engine(spec, state, rows_per_micro_batch=1)


def test_one_slot_count_after_another_in_one_engine():
    """Steps of one and of several waves may follow each other: accumulators are re-made."""
    state_bits = []
    for per_wave in (None, 1):
        spec, state = tiny_state(tiny_config(tied=False))
        with make_engine(spec, state, micro_batches_per_wave=per_wave) as engine:
            for number in (1, 3, 1, 2):
                engine.step(make_batches(number, seed=number), learning_rate=1e-3)
            engine.synchronize()
        state_bits.append(planes(state))
    assert differing(*state_bits) == []


@pytest.mark.parametrize("settings", [{}, {"weight_slots": 2, "micro_batches_per_wave": 1}])
def test_units_are_sent_in_the_order_of_their_use(settings, monkeypatch):
    """The head is updated last: before a layer it would hold back what is updated already."""
    sent = []
    fetch = windows.Windows._fetch

    def noting(self, unit, slot, *section):
        sent.append(unit)
        fetch(self, unit, slot, *section)

    monkeypatch.setattr(windows.Windows, "_fetch", noting)
    spec, state = tiny_state(tiny_config())
    with make_engine(spec, state, **settings) as engine:
        engine.step(make_batches(2), learning_rate=1e-3)
    assert sent[:5] == [0, 1, 2, 3, 4]
    assert sent.count(4) == sent.count(0) == 1


def test_chunks_and_threads_keep_every_bit():
    """A unit of 2.4 chunks, with a block of the norm that ends inside the last one."""
    config = tiny_config(tied=True, vocab_size=5000)
    runs = [
        train(config, steps=2, num_batches=1, dtype="bfloat16", **settings)
        for settings in ({}, {"chunk_bytes": 4096}, {"chunk_bytes": 4096, "update_threads": 2})
    ]
    for run in runs[1:]:
        assert run[0] == runs[0][0]
        assert differing(run[1], runs[0][1]) == []


def test_loss_chunks_agree_to_rounding(plain):
    losses, _ = train(tiny_config(tied=True), steps=STEPS, loss_chunk_tokens=5)
    assert losses == pytest.approx(plain(True)[0], abs=2e-6)


RACE = {"poison_slots": True, "lane_jitter_seconds": 0.002}


@pytest.mark.parametrize("max_grad_norm", [0.5, None])
@pytest.mark.parametrize(
    "settings",
    [
        {"weight_slots": 2, "gradient_slots": 1},
        {"weight_slots": 3, "activations": "recompute"},
        {"weight_slots": 2, "micro_batches_per_wave": 1},
        {"weight_slots": 2, "gradient_slots": 1, "update_order": "weights_first"},
    ],
    ids=["keep", "recompute", "waves", "weights first"],
)
def test_buffer_lifetime_races(settings, max_grad_norm):
    """Pitfall 13. Lanes with random delays, freed slots poisoned with NaN: the same bits."""
    config = tiny_config(tied=False)
    expected = train(config, steps=STEPS, cuts=(4, 11), max_grad_norm=max_grad_norm)
    run = train(config, steps=STEPS, cuts=(4, 11), max_grad_norm=max_grad_norm, **settings, **RACE)
    assert run[0] == expected[0]
    assert differing(run[1], expected[1]) == []


# -- the check above can fail: each of these breaks one wait -------------------------------------


def refill_slots_too_early(engine, monkeypatch):
    """A slot is refilled while its layer is still in use."""

    def layers(walk, phase):
        for index in walk.uses(phase):
            use = walk._plan[index]
            slot = walk._windows.layers[use.slot]
            if use.fetch:
                walk._windows.wait(slot)
            walk._start(index)
            slot.ready.synchronize()
            yield use, slot

    monkeypatch.setattr(windows.Walk, "layers", layers)


def forget_to_rebind_kept_graphs(engine, monkeypatch):
    """Backward reads the slot that forward used."""
    monkeypatch.setattr(slots.KeptGraph, "rebind", lambda graph, slot: None)


def dispatch_before_the_update(engine, monkeypatch):
    """A unit is sent while its update is still queued."""

    class Blind(list):
        def __getitem__(self, index):
            return None

    engine.updater.updated = Blind(engine.updater.updated)
    engine.updater._update._jitter = lambda: 0.03


def reuse_gradients_too_early(engine, monkeypatch):
    """A gradient slot is overwritten before its content went back."""
    monkeypatch.setattr(exposure.Exposure, "reuse", lambda self, slot: slot)
    engine.updater._d2h._jitter = lambda: 0.02


def return_before_the_moments(engine, monkeypatch):
    """A gradient comes back over one that the moments still need."""

    class Blind(list):
        def __getitem__(self, index):
            return None

    engine.updater._moments_updated = Blind(engine.updater._moments_updated)
    finish = engine.updater._finish_moments
    monkeypatch.setattr(
        engine.updater, "_finish_moments", lambda *args: (time.sleep(0.1), finish(*args))
    )


@pytest.mark.parametrize(
    "fault",
    [
        refill_slots_too_early,
        forget_to_rebind_kept_graphs,
        dispatch_before_the_update,
        reuse_gradients_too_early,
        return_before_the_moments,
    ],
)
def test_buffer_lifetime_check_finds_a_missing_wait(fault, monkeypatch):
    """Pitfall 13, the other way round: with one wait taken out, the bits differ."""

    def run(break_engine):
        spec, state = tiny_state(tiny_config(tied=False))
        settings = {"weight_slots": 2, "gradient_slots": 1, "poison_slots": True}
        if fault is return_before_the_moments:
            settings["update_order"] = "weights_first"
        with make_engine(spec, state, **settings) as engine:
            if break_engine:
                fault(engine, monkeypatch)
            for seed in range(2):
                engine.step(make_batches(2, seed=seed), learning_rate=1e-2, max_grad_norm=1.0)
            engine.synchronize()
        return planes(state)

    healthy = run(break_engine=False)
    assert differing(run(break_engine=False), healthy) == []
    assert differing(run(break_engine=True), healthy) != []
