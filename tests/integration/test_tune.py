"""``headrace tune``: what it writes, who uses it, when it is passed over."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from headrace.cli.tune import app
from headrace.errors import CapacityError, ConfigError
from headrace.policy.rates import MeasuredRates
from headrace.policy.search import USABLE_SHARE, Room
from headrace.policy.steptime import Rates
from headrace.trainer import place as place_module
from headrace.trainer import resolve, train, tune_file, tuning
from headrace.trainer.model_checks import take_apart
from headrace.trainer.preflight import load_model_config
from headrace.units import GIB

RATES = Rates(
    flops=1e12, h2d_bytes=1e9, d2h_bytes=1e9, update_parameters=1e9,
    device_update_parameters=1e11, device_bytes=1e12,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _rates(monkeypatch):
    """Measuring has its own test."""
    measured = MeasuredRates(rates=RATES, figures={"products_tflops": 1.0})
    monkeypatch.setattr(tuning, "measure_rates", lambda *args, **kwargs: measured)


@pytest.fixture
def config_file(make_config, tmp_path):
    path = tmp_path / "run.yaml"
    config = make_config(max_steps=1, progress="lines", overwrite_output_dir=True)
    path.write_text(yaml.safe_dump(config))
    return path


def tuned(config_file, **options):
    lines = []
    result = tuning.tune(config_file, say=lines.append, **options)
    return result, "\n".join(lines)


def trained(config_file, *overrides):
    console = Console(file=io.StringIO(), width=200)
    train(config_file, overrides, console=console)
    return console.file.getvalue()


def test_a_choice_is_written_and_used(config_file):
    result, said = tuned(config_file, steps=1, num_candidates=2)
    assert result.path == config_file.with_name("run.tune.yaml")
    assert "predicted" in said
    assert "chosen" in said
    (first, second) = result.record.candidates
    assert first["measured_seconds"] <= 1.02 * second["measured_seconds"]
    assert first["predicted_seconds"] > 0
    assert first["predicted_binding"]
    assert {name: first[name] for name in tune_file.CHOSEN} == result.record.engine
    out = trained(config_file)
    assert f"placement: as {result.path} says" in out
    assert "passed over" not in out


def test_another_workload_passes_the_file_over(config_file):
    tuned(config_file)
    out = trained(config_file, "per_device_train_batch_size=1")
    assert "passed over: workload.per_device_train_batch_size was 2 and is 1" in out


def test_overrides_belong_to_the_choice(config_file):
    tuned(config_file, overrides=["per_device_train_batch_size=1"])
    assert "passed over" in trained(config_file)
    assert "passed over" not in trained(config_file, "per_device_train_batch_size=1")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: "", "not what headrace tune writes"),
        (lambda text: text.replace("format_version: 2", "format_version: 9"), "format_version"),
        (lambda text: text.replace("flops: 1", "flops: -1"), "rate"),
        (lambda text: text.replace("micro_batches_per_wave:", "waves:"), "micro_batches_per_wave"),
        (lambda text: text.replace("device_units: 0", "device_units: many"), "whole number"),
        (lambda text: text[: len(text) // 3], "not what headrace tune writes"),
    ],
)
def test_a_damaged_file_is_passed_over(config_file, damage, reason):
    result, _ = tuned(config_file)
    result.path.write_text(damage(result.path.read_text()))
    with pytest.raises(ConfigError, match=reason):
        tune_file.read(result.path)
    assert "passed over" in trained(config_file)


def test_a_file_that_was_named_and_is_gone_is_said(config_file):
    assert "passed over: it cannot be read" in trained(config_file, "tune_file=gone.yaml")


def test_no_file_no_word(config_file):
    assert "tune" not in trained(config_file)


def test_what_does_not_fit_now_is_derived_anew(config_file, monkeypatch):
    tuned(config_file)
    monkeypatch.setattr(
        place_module, "room", lambda *args: Room(device_bytes=None, host_bytes=1000)
    )
    assert "does not fit the memory that is free now" in trained(config_file)


def test_the_table_says_in_how_many_slices_experts_are_sent(config_file, monkeypatch):
    """Chosen because no whole layer fits: printed, written, and what the run then does."""
    config = yaml.safe_load(config_file.read_text())
    experts = {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 512}
    config["model_config"] = {**config["model_config"], **experts}
    config_file.write_text(yaml.safe_dump(config))
    chosen = []
    for power in range(24, 18, -1):
        usable = GIB + 2**power  # a GiB is the context's
        room = Room(device_bytes=int(usable / USABLE_SHARE) + 1, host_bytes=GIB)
        monkeypatch.setattr(tuning, "room", lambda *args, room=room: room)
        result, said = tuned(config_file, steps=int(bool(chosen and chosen[-1] == 1)))
        header, *rows = said[said.index("   on device") :].splitlines()
        assert header.split()[:3] == ["on", "device", "slices"]
        chosen.append(result.record.engine["expert_slices"])
        end = header.index("slices") + len("slices")
        assert rows[0][:end].split()[-1] == str(chosen[-1])
        if chosen[-1] > 1:
            break
    assert chosen[0] == 1
    assert chosen[-1] > 1
    assert "chosen: 1" in said
    assert f"placement: as {result.path} says" in trained(config_file)


def test_nothing_fits_is_refused_before_anything_is_measured(config_file, monkeypatch):
    def measured(*args, **kwargs):
        raise AssertionError("measured")

    monkeypatch.setattr(tuning, "measure_rates", measured)
    monkeypatch.setattr(tuning, "room", lambda *args: Room(device_bytes=None, host_bytes=1000))
    with pytest.raises(CapacityError, match="no placement fits"):
        tuned(config_file)
    assert not config_file.with_name("run.tune.yaml").exists()


def test_no_candidate_fits_after_all(config_file, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("headrace.engine.Engine.step", full)
    with pytest.raises(CapacityError, match="no room"):
        tuned(config_file, steps=1)


def test_command_line_prints_one_object(config_file, tmp_path):
    target = tmp_path / "elsewhere.yaml"
    done = CliRunner().invoke(app, [str(config_file), "--output", str(target), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["path"] == str(target)
    assert found["engine"] == yaml.safe_load(target.read_text())["engine"]
    assert "as " + str(target) in trained(config_file, f"tune_file={target}")


def test_on_cuda_the_choice_replaces_the_search(config_file, monkeypatch):
    """No GPU is needed to decide: what the driver would say is given."""
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config, _ = resolve(config_file, [f"tune_file={config_file.with_name('choice.yaml')}"])
    spec = take_apart(config, load_model_config(config, None))
    device = torch.device("cuda")
    record = tune_file.TuneRecord(
        fingerprint=tune_file.fingerprint(config, spec, device),
        engine={
            "device_units": 2, "rows_per_micro_batch": None, "micro_batches_per_wave": 1,
            "update_order": "weights_first", "recompute_layers": 1, "offload_layers": 0,
            "expert_slices": 1,
        },
        rates=RATES,
        figures={},
        candidates=[],
    )  # fmt: skip
    record.write(config.tune_file)
    lines = []
    engine = place_module.place(config, spec, device, lines.append)
    assert {name: getattr(engine, name) for name in tune_file.CHOSEN} == record.engine
    assert f"the rates in {config.tune_file}" in lines[-1]
    assert "layers recompute (without mlp.down_proj), " in lines[-1]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another card")
    engine = place_module.place(config, spec, device, lines.append)
    assert engine.recompute_layers == 0
    assert "machine.gpu was 'a card' and is 'another card'" in lines[-2]
    assert "typical rates" in lines[-1]
    assert "layers recompute, " in lines[-1]
