"""A save while training goes on: every unit as it was at one step, whatever the lanes do."""

import threading
import time

import pytest
import torch

from headrace.errors import CheckpointError
from headrace.store.snapshot import Snapshot
from headrace.store.state import ModelState
from tiny import (
    differing,
    make_batches,
    make_engine,
    parameters,
    planes,
    tiny_config,
    tiny_state,
)


def unit_planes(unit):
    """A copy of a unit's planes as bits."""
    kinds = (unit.weights, unit.remainder, unit.exp_avg, unit.exp_avg_sq)
    bits = {2: torch.int16, 4: torch.int32}
    return [p.view(bits[p.element_size()]).clone() for p in kinds if p is not None]


def expected_planes(state):
    return [unit_planes(unit) for unit in state.units]


def same(found, expected):
    return all(
        torch.equal(a, b)
        for unit, wanted in zip(found, expected, strict=True)
        for a, b in zip(unit, wanted, strict=True)
    )


class Reader(threading.Thread):
    """Reads a snapshot slowly, as a disk would take it; each unit in two halves."""

    def __init__(self, snapshot, seconds):
        super().__init__()
        self.snapshot = snapshot
        self.seconds = seconds
        self.found = []

    def run(self):
        for index in range(len(self.snapshot.described)):
            time.sleep(self.seconds)
            unit = self.snapshot.unit(index)
            first = unit_planes(unit)
            time.sleep(self.seconds)
            second = unit_planes(unit)
            assert same([first], [second])
            self.found.append(first)
            self.snapshot.done(index)
        self.snapshot.close()


@pytest.mark.parametrize("clipping", ["deferred", "optimistic"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("spare_units", "device_units"), [(0, 0), (1, 0), (100, 0), (0, 2), (9, 5)]
)
def test_no_mix_of_two_steps(clipping, dtype, spare_units, device_units):
    """Steps go on while the snapshot is read; both are bitwise what they would be alone."""
    config = tiny_config("llama", tied=True)
    spec, filled = tiny_state(config, dtype)
    state, plain = (ModelState(spec.units, dtype, device_units=device_units) for _ in range(2))
    for target in (state, plain):
        for (unit, param), (source, _) in zip(parameters(target), parameters(filled), strict=True):
            unit.set_master(param, source.master(param))
    largest = max(unit.num_bytes for unit in state.units)

    def steps(engine, first, last):
        for step in range(first, last):
            engine.step(make_batches(2, seed=step), learning_rate=1e-2, max_grad_norm=0.5)

    settings = {"clipping": clipping, "lane_jitter_seconds": 0.002}
    settings["device_units"] = device_units
    with make_engine(spec, plain, **settings) as engine:
        steps(engine, 0, 14)
        engine.synchronize()
    with make_engine(spec, state, **settings) as engine:
        steps(engine, 0, 11)  # from the tenth on updates may come early
        engine.synchronize()
        expected = expected_planes(state)
        snapshot = Snapshot(state, spare_bytes=spare_units * largest)
        reader = Reader(snapshot, 0.01)
        reader.start()
        for step in range(11, 14):
            snapshot.wait_until_free()
            steps(engine, step, step + 1)
        engine.synchronize()
        reader.join()
    assert same(reader.found, expected)
    assert differing(planes(state), planes(plain)) == []
    assert state.snapshot is None


def test_update_waits_until_its_unit_was_read():
    _, state = tiny_state(tiny_config("llama"), "bfloat16")
    snapshot = Snapshot(state)
    order = []

    def update():
        state.before_update(1)
        order.append("updated")

    thread = threading.Thread(target=update)
    thread.start()
    snapshot.unit(0)
    snapshot.done(0)
    time.sleep(0.05)
    snapshot.unit(1)
    order.append("read")
    snapshot.done(1)
    thread.join()
    assert order == ["read", "updated"]
    state.before_update(0)  # read: no one waits
    snapshot.close()
    state.before_update(2)  # closed: nor here


def test_an_update_does_not_wait_for_a_reader_that_stands_still(monkeypatch):
    """Nor does a step: what the reader's owner says reaches both."""

    def check():
        raise CheckpointError("the disk stalls")

    monkeypatch.setattr("headrace.store.snapshot.LOOK_SECONDS", 0.01)
    _, state = tiny_state(tiny_config("llama"), "bfloat16")
    snapshot = Snapshot(state, check=check)
    for wait in (lambda: state.before_update(1), snapshot.wait_until_free):
        with pytest.raises(CheckpointError, match="stalls"):
            wait()
    snapshot.close()


def test_spare_memory_holds_copies_up_to_its_size():
    _, state = tiny_state(tiny_config("llama"), "bfloat16")
    unit = state.units[1]
    snapshot = Snapshot(state, spare_bytes=unit.num_bytes)
    before = unit_planes(unit)
    state.before_update(1)  # copied
    unit.weights.zero_()
    waiting = threading.Thread(target=state.before_update, args=(2,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()  # no memory is left for a second one
    assert same([unit_planes(snapshot.unit(1))], [before])
    snapshot.done(1)
    snapshot.give_up()
    with pytest.raises(CheckpointError, match="given up"):
        snapshot.unit(2)
    snapshot.close()
    waiting.join()
