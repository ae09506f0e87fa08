"""Cases in processes of their own: none that fails, hangs or is cut loses another's result."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from benchmarks.runner import Case, read_records, run_cases
from benchmarks.single_gpu import selected

SCRIPT = """
import json, os, signal, subprocess, sys, time
case = json.loads(sys.argv[1])["arguments"]
print("a library's line", flush=True)
print(json.dumps({"value": case["value"]}), flush=True)
if case.get("hang"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(json.dumps({"value": case["value"], "child": child.pid}), flush=True)
    time.sleep(60)
if case.get("die"):
    os.kill(os.getpid(), signal.SIGKILL)
print("{not json", flush=True)
sys.exit(case.get("code", 0))
"""
SILENT = "import sys; sys.exit(3)"


def case(name, value=1, *, limit=30.0, seconds=1.0, **more):
    return Case(
        name=name, kind="k", arguments={"value": value, **more}, limit=limit, seconds=seconds
    )


def run(cases, out, *, script=SCRIPT, **more):
    records = run_cases(cases, command=[sys.executable, "-c", script], out=out, **more)
    assert json.loads(out.read_text())["records"] == records
    return {entry["case"]: entry["result"] for entry in records}


def test_the_last_json_line_is_the_result(tmp_path):
    assert run([case("a", 5)], tmp_path / "r.json") == {"a": {"value": 5}}


def test_a_killed_case_keeps_what_it_had_and_the_next_one_runs(tmp_path):
    results = run([case("a", die=True), case("b", 2)], tmp_path / "r.json")
    assert results["a"]["value"] == 1
    assert "out of memory" in results["a"]["incomplete"]
    assert results["b"] == {"value": 2}


def test_a_hanging_case_is_ended_with_its_children(tmp_path):
    results = run([case("a", hang=True, limit=2.0)], tmp_path / "r.json")
    assert "longer than 2 s" in results["a"]["incomplete"]
    stat = Path(f"/proc/{results['a']['child']}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z":  # a zombie until it is reaped
        assert time.monotonic() < deadline, "the case's child lives on"
        time.sleep(0.05)


def test_a_case_without_a_result_is_an_error(tmp_path):
    assert run([case("a")], tmp_path / "r.json", script=SILENT) == {"a": {"error": "exit code 3"}}


def test_a_case_that_would_pass_the_budget_is_skipped(tmp_path):
    results = run(
        [case("long", seconds=500), case("short", 3)], tmp_path / "r.json", budget_seconds=100
    )
    assert results["long"]["error"] == "skipped"
    assert results["short"] == {"value": 3}


def test_earlier_records_stay_until_their_case_runs_again(tmp_path):
    run([case("a", 1), case("b", 2)], tmp_path / "old.json")
    earlier = read_records([tmp_path / "old.json"])
    results = run([case("b", 7)], tmp_path / "new.json", earlier=earlier)
    assert results == {"a": {"value": 1}, "b": {"value": 7}}
    results = run(
        [case("b", seconds=500)], tmp_path / "new.json", earlier=earlier, budget_seconds=100
    )
    assert results["b"] == {"value": 2}  # skipped: what was there stands


def test_cases_are_selected_by_pattern_and_a_wrong_one_is_refused():
    cases = [case("x-1"), case("x-2"), case("y")]
    assert [c.name for c in selected(cases, "x-*,y")] == ["x-1", "x-2", "y"]
    assert [c.name for c in selected(cases, "y")] == ["y"]
    with pytest.raises(SystemExit, match="no case matches 'z'"):
        selected(cases, "y,z")
