"""Where a step's time goes, from a trace with a known answer."""

from __future__ import annotations

import pytest
from benchmarks.lanes import covered, kind_of, lines, summarise


def span(lane, name, begun, ended):
    return {"ph": "X", "cat": lane, "name": name, "ts": 1e6 * begun, "dur": 1e6 * (ended - begun)}


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "args": {}},
        span("step", "step 4", 0.0, 2.0),
        span("step", "step 5", 2.0, 4.0),
        span("compute", "forward layers.0", 0.5, 1.0),
        span("compute", "forward layers.1", 1.0, 1.5),
        span("compute", "head", 2.0, 3.0),
        span("update", "embed", 1.0, 3.0),
        span("update", "head", 2.0, 2.5),
        span("update", "head", 3.5, 9.0),
    ]
}


def test_a_lane_is_busy_where_any_span_is_and_only_in_its_steps():
    assert covered([(0, 2), (1, 3), (5, 9), (6, 7)], (1, 8)) == 5
    assert covered([], (0, 1)) == 0


def test_seconds_are_a_step():
    found = summarise(TRACE)
    assert found["step_seconds"] == 2.0
    assert found["busy_seconds"] == pytest.approx({"compute": 1.0, "update": 1.25})
    assert found["compute_seconds"] == pytest.approx({"forward of layers": 0.5, "head": 0.5})
    assert found["idle_compute_seconds"] == pytest.approx(1.0)


def test_kinds_join_layers_and_leave_the_ends_apart():
    assert kind_of("backward layers.12") == "backward of layers"
    assert kind_of("backward embed") == "backward embed"
    assert kind_of("update on the device") == "update on the device"


def test_the_table_has_the_floor_and_shares():
    text = "\n".join(lines(summarise(TRACE), 0.4))
    assert "400.0 ms   20.0%" in text
    assert "compute: idle" in text
    assert "lane update" in text


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="no step"):
        summarise({"traceEvents": []})
