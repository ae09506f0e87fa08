"""Points of the curve, and how far two runs' losses are apart."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.cases.agreement import NUM_SUCCESSORS, chains, differences
from benchmarks.cases.fsdp import plain_name
from benchmarks.cases.start import file_system
from benchmarks.curve import points, save


def record(kind, tokens, speed, **arguments):
    return {
        "case": f"{kind}-{tokens}-{arguments}",
        "kind": kind,
        "run": "a",
        "arguments": {"model": "4b", "tokens": tokens, **arguments},
        "result": {"tokens_per_second": speed},
    }


RECORDS = [
    record("train", 16384, 20.0),
    record("train", 8192, 10.0),
    record("train", 8192, 99.0, device_gib=16),
    record("rival", 8192, 5.0, rival="fsdp2", options={"compiled": True}),
    record("rival", 8192, 6.0, rival="fsdp2",
           options={"compiled": True, "checkpointing": "selective"}),
    record("rival", 8192, 3.0, rival="zero-offload", stage=2),
    record("ceilings", 8192, 1.0),
    {
        **record("rival-curve", [8192, 16384], 0.0, rival="fsdp2-offload"),
        "result": {"points": [{"tokens": 16384, "tokens_per_second": 4.0}]},
    },
    {**record("rival", 32768, 0.0, rival="fsdp2"), "result": {"error": "out of memory"}},
]  # fmt: skip


def test_each_system_has_its_best_point_a_size_in_order():
    lines = points(RECORDS)["4b"]
    assert list(lines["headrace"].items()) == [(8192, 10.0), (16384, 20.0)]
    assert lines["FSDP2, compiled"] == {8192: 6.0}
    assert lines["ZeRO-2 offload"] == {8192: 3.0}
    assert lines["FSDP2 CPU offload"] == {16384: 4.0}
    assert len(lines) == 4


def test_the_curve_is_written_as_json_and_plot(tmp_path):
    written = save(RECORDS, tmp_path / "results.json")
    assert [path.name for path in written] == ["results.curve.json", "results.curve-4b.svg"]
    assert json.loads(written[0].read_text())["4b"]["headrace"]["8192"] == 10.0
    assert "<svg" in written[1].read_text()


def test_the_largest_difference_is_found_where_it_is():
    found = differences([3.0, 2.0, 1.0], [3.0, 2.5, 0.75])
    assert found["largest_difference"] == 0.5
    assert found["at_step"] == 1
    assert found["mean_difference"] == pytest.approx(0.25)


def test_the_text_has_four_successors_a_token():
    ((ids_NT, targets_NT),) = chains(50, 1, 8, 400)
    assert torch.equal(ids_NT[:, 1:], targets_NT[:, :-1])
    following = [set(targets_NT[ids_NT == token].tolist()) for token in range(50)]
    assert max(map(len, following)) <= NUM_SUCCESSORS
    assert sum(map(len, following)) > 3 * 40  # most tokens are met, with most of their successors
    assert torch.equal(ids_NT, next(iter(chains(50, 1, 8, 400)))[0])


def test_wrappers_do_not_change_a_parameter_s_name():
    wrapped = "model.model.layers.3._orig_mod._checkpoint_wrapped_module.mlp.up_proj.weight"
    assert plain_name(wrapped) == "model.layers.3.mlp.up_proj.weight"
    assert plain_name("model.lm_head.weight") == "lm_head.weight"


def test_a_folder_s_file_system_is_named():
    assert file_system("/proc/self") == "proc"
    assert file_system("/") != "unknown"
