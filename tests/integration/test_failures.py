"""Failures under load: the run ends with the reason, and the last checkpoint is whole."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainerCallback

from headrace.engine.host_optimizer import HostOptimizer
from headrace.engine.passes import Passes
from headrace.errors import CapacityError, CheckpointError, HeadraceError, LaneError
from headrace.store.checkpoint import latest_checkpoint
from headrace.store.host_memory import host_memory
from headrace.trainer import failures, prepare, train
from headrace.trainer.evaluate import Evaluator
from headrace.trainer.metrics import MetricsLog


def same_weights(a, b):
    found, expected = (load_file(folder / "model.safetensors") for folder in (a, b))
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_lane_that_raises(run_config, tmp_path, monkeypatch):
    """In the middle of step 6: checkpoint 4 stays, and the run goes on to the same bits."""
    whole = run_config(output_dir=str(tmp_path / "whole"), save_strategy="steps", save_steps=2)
    update = HostOptimizer.update

    def failing(self, chunk, gradient, settings, *order):
        if settings.step == 6 and chunk.unit == 1:
            raise OSError("the bus is gone")
        return update(self, chunk, gradient, settings, *order)

    with monkeypatch.context() as patch:
        patch.setattr(HostOptimizer, "update", failing)
        with pytest.raises(LaneError, match="update lane failed: OSError: the bus is gone"):
            run_config(save_strategy="steps", save_steps=2)
    assert latest_checkpoint(tmp_path / "run").name == "checkpoint-4"
    result = run_config(save_strategy="steps", save_steps=2, resume_from_checkpoint="auto")
    assert same_weights(result.checkpoint, whole.checkpoint)


def test_a_gpu_out_of_memory_in_step_3(make_config, tmp_path, monkeypatch, capsys):
    """It says that smaller waves are taken, and trains on."""
    backward, calls = Passes.layer_backward, []

    def failing(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 2 * 4 + 3:  # two layers, two micro-batches
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return backward(self, *args, **kwargs)

    monkeypatch.setattr(Passes, "layer_backward", failing)
    result = train(make_config(progress="lines"), console=Console(width=300))
    assert (result.status, result.step) == ("finished", 8)
    said = capsys.readouterr().out
    assert "out of device memory in update 3" in said
    assert "engine.micro_batches_per_wave: 1" in said


class Shrinks(TrainerCallback):
    """Takes memory away from the host at step 3, and nearly all of it at step 5."""

    def __init__(self, monkeypatch):
        self.left = 1.0
        monkeypatch.setattr(failures, "host_memory", self.read)

    def read(self):
        found = host_memory()
        limit = 1 << 40
        return replace(
            found, override=None, total=limit, cgroup_limit=None, cgroup_available=None,
            mem_available=int(self.left * limit),
        )  # fmt: skip

    def on_step_end(self, args, state, control, **_):
        self.left = {3: 0.02, 4: 0.01, 5: 0.001}.get(state.global_step, self.left)


def test_host_memory_near_its_limit(make_config, tmp_path, monkeypatch, capsys):
    """It warns once, then saves and ends before the kernel does."""
    watch = Shrinks(monkeypatch)
    config = make_config(progress="lines")
    with pytest.raises(CapacityError, match=r"1\.02 GiB of 1\.00 TiB of host memory are left"):
        train(config, callbacks=[watch], console=Console(width=400))
    assert capsys.readouterr().out.count("below 0.5% the run saves and ends") == 1
    assert latest_checkpoint(tmp_path / "run").name == "checkpoint-5"


def test_a_disk_that_would_fill_up(run_config, tmp_path, monkeypatch):
    """The tokenizer's and the configuration's files count too."""
    result = run_config(max_steps=1)
    written = sum(f.stat().st_size for f in result.checkpoint.iterdir())
    assert written > result.state_bytes
    usage = shutil.disk_usage(tmp_path)._replace(free=written - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(CapacityError, match="checkpoints need 1 x"):
        run_config(max_steps=1, output_dir=str(tmp_path / "other"))


def flip_last_bit(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


SAVES = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_passed_over(make_config, tmp_path, capsys, caplog, file):
    """A bit of the newest one has flipped: `auto` says so and takes the one before it."""
    whole = train(make_config(output_dir=str(tmp_path / "whole"), **SAVES))
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    flip_last_bit(tmp_path / "run" / "checkpoint-8" / file)
    config = make_config(**SAVES, resume_from_checkpoint="auto", progress="lines")
    result = train(config, console=Console(width=400))
    said = capsys.readouterr().out + caplog.text
    assert f"{file} has changed since it was saved" in said
    assert "checkpoint-6, step 6" in said
    assert same_weights(result.checkpoint, whole.checkpoint)
    names = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    kept = {"checkpoint-8.damaged"} if file != "config.json" else set()  # else it was replaced
    assert names == {"checkpoint-4", "checkpoint-6", "checkpoint-8"} | kept


@pytest.mark.parametrize("file", ["model.safetensors", "headrace.json", "tokenizer.json"])
def test_the_only_checkpoint_is_damaged(run_config, tmp_path, file):
    """Nothing begins anew by itself, and nothing is renamed."""
    path = run_config(**SAVES | {"save_steps": 8}).checkpoint
    flip_last_bit(path / file)
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="checkpoint-8") as caught:
        run_config(**SAVES, resume_from_checkpoint="auto")
    assert "copy" in caught.value.remedy
    with pytest.raises(CheckpointError):
        run_config(output_dir=str(tmp_path / "other"), resume_from_checkpoint=str(path))
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-8"]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows
    keys = {"resume_from_checkpoint": "auto", "overwrite_output_dir": True, "max_steps": 2}
    if file != "model.safetensors":  # else it is still taken for whole
        assert run_config(**keys).step == 2


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (
            "initialise",
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 B."),
            r"host memory ran out while the run was prepared: .*can't allocate memory",
        ),
        (
            "initialise",
            torch.OutOfMemoryError("CUDA out of memory."),
            "the device ran out of memory while the run was prepared",
        ),
        (
            "evaluate",
            MemoryError(),
            r"host memory ran out in the evaluation after step 2: MemoryEr",
        ),
        (
            "evaluate",
            torch.OutOfMemoryError("CUDA out of memory."),
            "the device ran out of memory in the evaluation after step 2",
        ),
    ],
)
def test_memory_that_runs_out_elsewhere(run_config, monkeypatch, part, error, message):
    def fails(*_args, **_kwargs):
        raise error

    if part == "initialise":
        monkeypatch.setattr(prepare, "initialise", fails)
    else:
        monkeypatch.setattr(Evaluator, "run", fails)
    with pytest.raises(CapacityError, match=message) as caught:
        run_config(eval_steps=2, val_set_size=2)
    assert caught.value.remedy


def test_a_full_disk_at_a_row_of_metrics(run_config, tmp_path, monkeypatch):
    """The reason, once; the checkpoint before is whole and nothing half written is left."""
    append = MetricsLog.append

    def full(self, row):
        if row["step"] == 5:
            self._file.close()  # what a full disk does to a buffered file: the row cannot go out
            self._file = open("/dev/full", "a", encoding="utf-8")  # noqa: PTH123, SIM115 - closed by the log
        return append(self, row)

    monkeypatch.setattr(MetricsLog, "append", full)
    with pytest.raises(CapacityError, match=r"disk of output_dir .*run is full") as caught:
        run_config(save_strategy="steps", save_steps=4)
    assert "resume_from_checkpoint: auto" in caught.value.remedy
    assert latest_checkpoint(tmp_path / "run").name == "checkpoint-4"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_a_trace_that_cannot_be_written(run_config, tmp_path):
    """The run itself is finished and saved."""

    class Loses(TrainerCallback):
        def on_step_end(self, *_args, **_):
            shutil.rmtree(tmp_path / "traces")

    trace = str(tmp_path / "traces" / "trace.json")
    with pytest.raises(HeadraceError, match="what was trained is not touched"):
        run_config(engine={"trace": trace}, max_steps=1, callbacks=[Loses()])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    assert latest_checkpoint(tmp_path / "run").name == "checkpoint-1"
