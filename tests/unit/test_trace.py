"""The Chrome trace: every lane is there, in the order that the step promises, and costs nothing."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from headrace.engine.trace import KEPT_STEPS, LANES, Anchor, Span, chrome_trace
from headrace.errors import ConfigError
from tiny import make_batches, make_engine, planes, tiny_config, tiny_state


def run(tmp_path, *, steps=3, trace=True, evaluate=False, **settings):
    """Lanes' events of a small training, its losses and final bits."""
    path = tmp_path / "trace.json"
    spec, state = tiny_state(tiny_config(), "float32")
    more = {"trace": str(path)} if trace else {}
    with make_engine(spec, state, weight_slots=2, chunk_bytes=4096, **more, **settings) as engine:
        losses = [
            engine.step(make_batches(2, seed=step), learning_rate=1e-3, max_grad_norm=0.5).loss
            for step in range(steps)
        ]
        if evaluate:
            engine.evaluate(make_batches(1))
        engine.synchronize()
    if not trace:
        assert not path.exists()
        return {}, losses, planes(state)
    lanes = defaultdict(list)
    named = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["name"] == "thread_name":
            named[event["tid"]] = event["args"]["name"]
        if event["ph"] == "X":
            lanes[named[event["tid"]]].append(event)
    assert list(named.values()) == list(LANES)
    return lanes, losses, planes(state)


def end(event):
    return event["ts"] + event["dur"]


def test_lanes_hold_what_a_step_does(tmp_path):
    lanes, _, _ = run(tmp_path)
    assert [event["name"] for event in lanes["step"]] == ["step 1", "step 2", "step 3"]
    a_step = ["embed", *(f"forward layers.{i}" for i in range(3)), "head",
              *(f"backward layers.{i}" for i in (2, 1, 0)), "backward embed"]  # fmt: skip
    assert [event["name"] for event in lanes["compute"]] == 3 * a_step
    units = {"embed", "head", "layers.0", "layers.1", "layers.2"}
    for lane in ("h2d", "d2h", "update"):
        assert {event["name"] for event in lanes[lane]} == units
    assert len(lanes["update"]) == len(lanes["d2h"])
    assert [event["name"] for event in lanes["clip"]] == 3 * ["wait for the norm", "queue updates"]
    assert {event["name"] for event in lanes["host"]} >= {"wait for weights"}


def test_spans_of_a_lane_follow_one_another(tmp_path):
    lanes, _, _ = run(tmp_path, micro_batches_per_wave=1)
    for lane in set(LANES) - {"host"}:  # a wait may begin while compute is still launched
        events = lanes[lane]
        for before, after in pairwise(events):
            assert end(before) <= after["ts"] + 0.01, (lane, before, after)


def test_a_deferred_update_begins_after_its_norm_and_ends_before_its_weights_are_sent(tmp_path):
    lanes, _, _ = run(tmp_path, clipping="deferred")
    norms = [end(event) for event in lanes["clip"] if event["name"] == "wait for the norm"]
    for name in ("embed", "layers.1", "head"):
        updates = [event for event in lanes["update"] if event["name"] == name]
        a_step = len(updates) // 3
        for step in range(2):
            of_step = updates[a_step * step : a_step * (step + 1)]
            assert all(event["ts"] >= norms[step] for event in of_step)
            sent = [e["ts"] for e in lanes["h2d"] if e["name"] == name and e["ts"] > norms[step]]
            assert min(sent) >= end(of_step[-1])


def test_compute_waits_for_its_weights(tmp_path):
    lanes, _, _ = run(tmp_path, lane_jitter_seconds=0.002)
    for event in lanes["compute"]:
        if not event["name"].startswith("forward"):
            continue
        name = event["name"].removeprefix("forward ")
        sent = [end(e) for e in lanes["h2d"] if e["name"] == name and end(e) <= event["ts"] + 0.01]
        assert sent


def test_only_the_last_steps_are_kept(tmp_path):
    lanes, _, _ = run(tmp_path, steps=KEPT_STEPS + 2)
    steps = [event["name"] for event in lanes["step"]]
    assert steps[-1] == f"step {KEPT_STEPS + 2}"
    assert len(steps) == KEPT_STEPS
    assert min(event["ts"] for events in lanes.values() for event in events) == 0


def test_an_evaluation_has_no_backward(tmp_path):
    lanes, _, _ = run(tmp_path, steps=1, evaluate=True)
    names = [event["name"] for event in lanes["compute"]]
    assert names.count("backward embed") == 1
    assert names.count("forward layers.0") == 2


def test_tracing_changes_no_bit_and_is_off_by_default(tmp_path):
    _, losses, bits = run(tmp_path)
    (tmp_path / "trace.json").unlink()
    _, plain_losses, plain_bits = run(tmp_path, trace=False)
    assert losses == plain_losses
    assert all((bits[name] == plain_bits[name]).all() for name in bits)


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    spec, state = tiny_state(tiny_config(), "float32")
    with pytest.raises(ConfigError, match="cannot be written"):
        make_engine(spec, state, trace=str(tmp_path / "file" / "trace.json"))


class Event:
    """A device event whose clock has an origin of its own."""

    def __init__(self, milliseconds):
        self.milliseconds = milliseconds

    def elapsed_time(self, later):
        return later.milliseconds - self.milliseconds


def device_anchor(before, event, seconds=None):
    anchor = Anchor(None, cuda=False)
    anchor._before, anchor._event, anchor._seconds = before, event, seconds
    return anchor


def test_device_times_are_chained_from_step_to_step():
    first = device_anchor(None, Event(500.0), seconds=10.0)
    second = device_anchor(first, Event(2500.0))
    third = device_anchor(second, Event(3000.0))
    span = Span("h2d", "embed", Event(3100.0), Event(3250.0), third)
    assert span.seconds() == pytest.approx((12.6, 12.75))
    assert third._before is None  # long runs keep no chain
    mixed = [span, Span("update", "embed", 12.7, 12.8, third)]
    events = [e for e in chrome_trace(mixed, "x")["traceEvents"] if e["ph"] == "X"]
    assert [e["ts"] for e in events] == pytest.approx([0.0, 1e5])
    assert [e["dur"] for e in events] == pytest.approx([1.5e5, 1e5])
