"""Rates in a plan: which are assumed is said, and those measured on this machine are taken."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli.plan import app
from headrace.trainer.record import host

FIGURES = {"products_tflops": 0.5, "update_gparameters": 0.25, "memory_gbps": 16.0}


@pytest.fixture
def files(tmp_path, tiny_model, monkeypatch):
    """A training file for the CPU; writes what tune would have found beside it."""
    monkeypatch.setenv("HEADRACE_HOST_MEMORY", "8GiB")
    config = {
        "model_config": {**tiny_model(), "vocab_size": 384}, "device": "cpu", "max_length": 64,
        "datasets": [{"path": "missing.jsonl", "type": "text"}],
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))

    def tuned(figures=FIGURES, **machine):
        found = {**host(), "gpu": None, **machine}
        text = yaml.safe_dump({"fingerprint": {"machine": found}, "figures": figures})
        (tmp_path / "run.tune.yaml").write_text(text)

    return path, tuned


def plan(path, *more):
    done = CliRunner().invoke(app, [str(path), *more, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_assumed_rates_are_named_with_how_to_measure_them(files):
    (note,) = [note for note in plan(files[0])["notes"] if "assumed" in note]
    assert "host update Gparam/s" in note
    assert "headrace tune CONFIG" in note


def test_rates_that_tune_measured_here_are_taken(files):
    path, tuned = files
    tuned()
    found = plan(path)
    machine = found["machine"]
    assert machine["matmul_tflops"] == {"value": 0.5, "origin": "measured"}
    assert machine["duplex_gb_per_s"] == {"value": 8.0, "origin": "measured"}
    assert machine["update_gparams_per_s"] == {"value": 0.25, "origin": "measured"}
    assert any("run.tune.yaml, which headrace tune wrote" in note for note in found["notes"])
    assert not any("assumed" in note for note in found["notes"])
    given = plan(path, "--update-rate", "0.125")["machine"]
    assert given["update_gparams_per_s"] == {"value": 0.125, "origin": "given"}
    assert given["matmul_tflops"]["origin"] == "measured"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_cores": 999}, "of another machine, not used: num_cores was 999"),
        ({"gpu": "NVIDIA H200"}, "of another machine, not used: gpu was 'NVIDIA H200'"),
        ({"figures": {"products_tflops": -1.0}}, "not used: ValueError"),
        ({"figures": {"products_tflops": 1.0}}, "not used: KeyError"),
    ],
)
def test_rates_of_another_machine_or_none_are_not(files, change, said):
    path, tuned = files
    tuned(**change)
    found = plan(path)
    assert found["machine"]["matmul_tflops"]["origin"] == "assumed"
    assert any(said in note for note in found["notes"])
