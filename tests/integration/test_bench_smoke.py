"""Every kind of case of the GPU benchmark at the smallest size; rivals as the command runs them."""

from __future__ import annotations

import json

import pytest
from benchmarks.single_gpu import carry_out, main
from benchmarks.suites import SUITES
from torch import distributed as dist

pytest.importorskip("headrace.kernels.native")

CASES = {case.name.removeprefix("smoke-"): case for case in SUITES["smoke"]}


# Rivals run in this process: torch's own deprecations are not ours to fix.
in_this_process = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def process_group():
    """What a rival opens, a process of its own would close by ending."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_here(name, capsys):
    case = CASES[name]
    assert carry_out({"kind": case.kind, "arguments": case.arguments}) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def check_times(result):
    assert result["tokens_per_second"] == pytest.approx(256 / result["seconds"])
    assert result["fastest_seconds"] <= result["seconds"] <= result["slowest_seconds"]
    assert result["host_peak_gib"] > 0


@in_this_process
def test_rivals_train_the_same_model_on_the_same_tokens(capsys, tmp_path):
    resident = run_here("fsdp2", capsys)
    out = tmp_path / "results.json"
    arguments = ["--suite", "smoke", "--cases", "smoke-fsdp2-offload", "--out", str(out)]
    assert main(arguments) == 0
    (record,) = json.loads(out.read_text())["records"]
    offloaded = record["result"]
    for result in (resident, offloaded):
        check_times(result)
    assert offloaded["losses"] == pytest.approx(resident["losses"][:3], abs=1e-4)
    assert len(resident["losses"]) == 6  # two micro-batch sizes, a warm-up of two, a timed step
    assert [entry["rows"] for entry in resident["tried"]] == [1, 2]


@in_this_process
def test_a_curve_has_a_point_a_number_of_tokens(capsys):
    result = run_here("fsdp2-curve", capsys)
    assert [point["tokens"] for point in result["points"]] == [128, 256]


@in_this_process
def test_losses_follow_fsdp2(capsys):
    result = run_here("loss", capsys)
    assert result["last_loss"] < result["first_loss"] - 0.2
    assert result["largest_difference"] < 5e-4
    assert len(result["losses"]) == len(result["fsdp2_losses"]) == result["steps"]
    assert result["losses"] != result["fsdp2_other_rows_losses"]


def test_a_start_is_timed_by_stage(capsys):
    result = run_here("start", capsys)
    stages = result["cold_stages"]
    total = stages.pop("total")
    assert sum(stages.values()) == pytest.approx(total)
    assert result["beyond_reading_seconds"] == total - result["read_seconds"]
    assert result["warm_start_seconds"] > 0


def test_headrace_is_timed_as_they_are(capsys):
    result = run_here("train", capsys)
    check_times(result)
    assert result["mean_seconds_with_tail"] >= result["tail_seconds"] > 0
    assert len(result["losses"]) == 3


def test_a_profile_says_where_the_time_went(tmp_path, capsys):
    out = tmp_path / "results.json"
    assert main(["--suite", "smoke", "--cases", "smoke-profile", "--out", str(out)]) == 0
    (record,) = json.loads(out.read_text())["records"]
    lanes = record["result"]["lanes"]
    parts = sum(lanes["compute_seconds"].values()) + lanes["idle_compute_seconds"]
    assert parts == pytest.approx(lanes["step_seconds"])
    assert (tmp_path / "trace-smoke.json").exists()
    assert "compute: forward of layers" in capsys.readouterr().out


def test_parity_holds(capsys):
    errors = run_here("parity", capsys)["float32 eager"]
    assert errors["loss"] < 1e-5
    assert errors["gradient"] < 1e-4


def test_layers_of_experts_have_a_floor(capsys):
    result = run_here("experts", capsys)
    parts = dict(result["floor_milliseconds"])
    assert sum(parts.values()) - parts["all"] == pytest.approx(parts["all"])
    assert result["kept"]["layer_milliseconds"] > 0


def test_families_are_held_against_autograd(capsys):
    (row,) = run_here("families", capsys).values()
    assert row["eager"]["gradient"] < 1e-5
    assert row["eager"]["leak"] < 1e-6
    assert row["attention"]["attend_by_document"] > 0


def test_gated_delta_is_held_against_float32(capsys):
    result = run_here("hybrid", capsys)
    assert max(result["paths"]["torch, packed"]["errors"].values()) < 1e-6
    assert result["paths"]["torch, packed"]["both_milliseconds"] > 0


def test_ceilings_are_measured(capsys):
    result = run_here("ceilings", capsys)
    assert result["matmul_tflops"] > 0
    shapes = result["shapes_tflops"]["smoke"]
    rates = [rate for part, rate in shapes.items() if part not in ("layer", "head")]
    assert min(rates) <= shapes["layer"] <= max(rates)


def test_the_host_update_is_measured(capsys):
    assert run_here("host-update", capsys)["alone"]["ratio_to_torch"] > 0


def test_a_case_that_fails_says_why(capsys):
    request = {"kind": "rival", "arguments": {**CASES["fsdp2"].arguments, "rival": "none"}}
    assert carry_out(request) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["error"] == "ValueError"
    assert "no rival 'none'" in result["detail"]
