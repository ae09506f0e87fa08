"""Every kind of case of the GPU benchmark at the smallest size; rivals as the command runs them."""

from __future__ import annotations

import json

import pytest
from benchmarks.single_gpu import carry_out, main
from benchmarks.suites import SUITES

pytest.importorskip("headrace.kernels.native")

CASES = {case.name.removeprefix("smoke-"): case for case in SUITES["smoke"]}


@pytest.fixture(scope="module")
def rivals(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "results.json"
    names = "smoke-fsdp2,smoke-fsdp2-offload"
    assert main(["--suite", "smoke", "--cases", names, "--out", str(out)]) == 0
    records = json.loads(out.read_text())["records"]
    return {entry["case"].removeprefix("smoke-"): entry["result"] for entry in records}


def run_here(name, capsys):
    case = CASES[name]
    assert carry_out({"kind": case.kind, "arguments": case.arguments}) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def check_times(result):
    assert result["tokens_per_second"] == pytest.approx(256 / result["seconds"])
    assert result["fastest_seconds"] <= result["seconds"] <= result["slowest_seconds"]
    assert result["host_peak_gib"] > 0


def test_rivals_train_the_same_model_on_the_same_tokens(rivals):
    for result in rivals.values():
        check_times(result)
    resident, offloaded = (rivals[name]["losses"] for name in ("fsdp2", "fsdp2-offload"))
    assert offloaded == pytest.approx(resident[:3], abs=1e-4)
    assert len(resident) == 6  # two micro-batch sizes, a warm-up of two and one timed step
    assert [entry["rows"] for entry in rivals["fsdp2"]["tried"]] == [1, 2]


def test_headrace_is_timed_as_they_are(capsys):
    result = run_here("train", capsys)
    check_times(result)
    assert result["mean_seconds_with_tail"] >= result["tail_seconds"] > 0
    assert len(result["losses"]) == 3


def test_parity_holds(capsys):
    errors = run_here("parity", capsys)["float32 eager"]
    assert errors["loss"] < 1e-5
    assert errors["gradient"] < 1e-4


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
