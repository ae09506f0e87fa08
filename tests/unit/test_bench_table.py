"""The benchmark's arithmetic: targets, ratios within a run, MFU, tokens, memory of a rival."""

from __future__ import annotations

import pytest
import torch
from benchmarks.cases.common import qwen3_config, speed, step_tokens
from benchmarks.cases.engine import place
from benchmarks.cases.fsdp import offloaded_host_bytes
from benchmarks.suites import SUITES, TARGETS, Target
from benchmarks.table import judge, speed_lines, target_lines

from headrace.models.spec import ModelSpec
from headrace.policy.steptime import Rates


def record(case, *, kind="train", run="a", arguments=None, **result):
    return {
        "case": case,
        "kind": kind,
        "run": run,
        "arguments": {"model": "8b"} | (arguments or {}),
        "result": result,
    }


def target(**more):
    return Target(**{"row": "r", "case": "mine", "measure": "x", "unit": "", "bound": 2.0} | more)


def word(goal, *records):
    (verdict,) = judge([goal], list(records))
    return verdict.word, verdict.value, verdict.note


def test_a_bound_is_met_from_its_own_side():
    assert word(target(), record("mine", x=2.0))[0] == "pass"
    assert word(target(), record("mine", x=1.99))[0] == "gap"
    assert word(target(reading="at most"), record("mine", x=2.0))[0] == "pass"
    assert word(target(reading="at most"), record("mine", x=2.01))[0] == "gap"


def test_what_was_not_measured_passes_nothing():
    assert word(target())[0] == "not run"
    failed = record("mine", error="out of memory", detail="host")
    assert word(target(), failed) == ("not run", None, "out of memory: host")
    assert word(target(measure="x.y"), record("mine", x=3.0))[0] == "not run"


def test_a_ratio_is_over_the_best_rival_of_the_same_model_and_work():
    rivals = [
        record("rival-1", kind="rival", x=2.0),
        record("rival-2", kind="rival", x=4.0),
        record("rival-3", kind="rival", x=100.0, arguments={"model": "4b"}),
        record("rival-4", kind="rival", x=100.0, arguments={"precision": "bfloat16"}),
        record("rival-5", kind="rival", error="out of memory"),
    ]
    found = word(target(over=("rival", "x")), record("mine", x=9.0), *rivals)
    assert found == ("pass", 2.25, "best is rival-2")


def test_a_ratio_prefers_its_own_run_and_says_when_it_cannot():
    other = record("rival-1", kind="rival", run="b", x=9.0)
    same = record("rival-2", kind="rival", run="a", x=3.0)
    mine = record("mine", x=9.0)
    assert word(target(over=("rival", "x")), mine, other, same)[1] == 3.0
    _, value, note = word(target(over=("rival", "x")), mine, other)
    assert value == 1.0
    assert "another run" in note


def test_without_a_rival_there_is_no_ratio():
    dead = record("rival", kind="rival", error="out of memory")
    assert word(target(over=("rival", "x")), record("mine", x=9.0), dead)[1:] == (
        None,
        "rival: out of memory",
    )


def test_lines_name_failures_and_both_mfus():
    ceilings = record("ceilings", kind="ceilings", matmul_tflops=800.0, data_sheet_tflops=1000.0)
    mine = record(
        "mine", tokens_per_second=10.0, tflops=400.0, seconds=2.0, fastest_seconds=1.9,
        slowest_seconds=2.1, device_peak_gib=1.0, host_peak_gib=2.0, rows=8,
    )  # fmt: skip
    dead = record("dead", kind="rival", error="out of memory")
    text = "\n".join(speed_lines([ceilings, mine, dead]))
    assert "0.500" in text
    assert "0.400" in text
    assert "10.0%" in text
    assert "out of memory" in text
    assert "not run" in "\n".join(target_lines(judge(TARGETS, [])))


def test_every_target_reads_a_case_of_the_headline():
    names = {case.name for case in SUITES["headline"]}
    assert {goal.case for goal in TARGETS} <= names
    for goal in TARGETS:
        if goal.over:
            assert any(name.startswith(goal.over[0]) for name in names)


def test_names_are_unique_in_a_suite():
    for cases in SUITES.values():
        assert len({case.name for case in cases}) == len(cases)


def test_speed_counts_model_flops_of_the_median_step():
    spec = ModelSpec(qwen3_config("smoke"))
    figures = speed(spec, 256, 64, [1.0, 2.0, 30.0])
    matrices = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128) + 256 * 64
    flops = 6 * matrices + 6 * 2 * 64 * 64
    assert figures["seconds"] == 2.0
    assert figures["tokens_per_second"] == 128.0
    assert figures["tflops"] == pytest.approx(128 * flops / 1e12)
    assert (figures["fastest_seconds"], figures["slowest_seconds"]) == (1.0, 30.0)


def test_everyone_gets_the_same_tokens_of_a_step():
    ids_NT, targets_NT = step_tokens(256, 256, 3, 64)
    assert ids_NT.shape == (4, 64)
    assert torch.equal(ids_NT, step_tokens(256, 256, 3, 64)[0])
    assert not torch.equal(ids_NT, step_tokens(256, 256, 4, 64)[0])
    assert torch.equal(targets_NT[:, :-1], ids_NT[:, 1:])
    assert int((targets_NT == -100).sum()) == 4
    with pytest.raises(ValueError, match="whole number"):
        step_tokens(256, 100, 0, 64)


def test_offloaded_parameters_are_pinned_in_powers_of_two():
    # 3 * 4 bytes are pinned as 16, once for weights and once for gradients, and 24 of moments.
    assert offloaded_host_bytes([3]) == 2 * 16 + 24
    assert offloaded_host_bytes([4, 4]) == 2 * (16 + 16) + 64


def test_the_search_places_a_benchmark_under_a_cap():
    spec = ModelSpec(qwen3_config("0.6b"))
    rates = Rates(
        flops=5e14, h2d_bytes=4e10, d2h_bytes=4e10, update_parameters=3e9,
        device_update_parameters=1e11, device_bytes=3.3e12,
    )  # fmt: skip
    wide, rows, choice = place(spec, 32768, {}, None, room=130 << 30, rates=rates)
    assert wide.device_units == len(spec.units)
    assert 32768 % (rows * 4096) == 0
    assert choice is not None
    tight, rows, choice = place(spec, 32768, {}, None, room=12 << 30, rates=rates)
    assert choice is not None
    assert choice.budget.device_bytes <= 12 << 30
    assert (tight.device_units or 0) < len(spec.units) or (tight.recompute_layers or 0) > 0
    # In one wave much would be recomputed; several keep their activations instead.
    deep = ModelSpec(qwen3_config("4b"))
    cut, rows, choice = place(deep, 131072, {}, 2, room=70 << 30, rates=rates)
    assert cut.micro_batches_per_wave is not None
    assert (131072 // (rows * 4096)) % cut.micro_batches_per_wave == 0
    assert choice is not None
    whole, *_ = place(deep, 131072, {"micro_batches_per_wave": 16}, 2, room=70 << 30, rates=rates)
    assert (whole.recompute_layers or 0) > (cut.recompute_layers or 0)
    given, rows, _ = place(spec, 32768, {"device_units": 3}, 2, room=130 << 30, rates=rates)
    assert (given.device_units, rows) == (3, 2)
