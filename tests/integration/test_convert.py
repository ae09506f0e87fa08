"""Sharded checkpoints of FSDP2, made by real ranks over gloo, come out bitwise."""

import json
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace.cli import main
from headrace.errors import CapacityError, CheckpointError, ConfigError
from headrace.models.spec import ModelSpec
from headrace.store.checkpoint import load_checkpoint, read_record
from headrace.store.state import ModelState
from headrace.trainer.convert import convert_to_model
from headrace.trainer.convert_state import convert_to_checkpoint
from headrace.trainer.metrics import read_rows
from sharded import make_config, save_sharded

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders by family, made by two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(save_sharded, args=(2, port, folder), nprocs=2)
    return lambda family: folder / family


def reference(folder):
    return torch.load(folder / "reference.pt", weights_only=True)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_weights_are_bitwise_those_of_the_ranks(made, family, tmp_path):
    folder = made(family)
    result = convert_to_model(folder, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert model.dtype == torch.float32
    expected = reference(folder)["weights"]
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(bits(found[name]), bits(tensor)), name
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert result.num_tensors == len(written)
    assert ("lm_head.weight" in written) == (family != "qwen3")
    if family == "qwen3_moe":  # experts apart, as its published checkpoints have them
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in written


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_optimizer_goes_on_where_it_was(made, family, tmp_path):
    """Master weights to the last bit, moments, step count; tied heads and fused experts too."""
    folder = made(family)
    result = convert_to_checkpoint(folder, tmp_path / "run")
    assert (result.folder.name, result.step) == ("checkpoint-2", 2)
    spec = ModelSpec(make_config(family))
    state = ModelState(spec.units, "bfloat16")
    load_checkpoint(result.folder, spec, state)
    assert state.optimizer_step == 2
    expected = reference(folder)
    for unit in state.units:
        for param in unit.layout.params:
            moments = expected["state"][param.name]
            assert torch.equal(unit.master(param), expected["weights"][param.name])
            for kind in ("exp_avg", "exp_avg_sq"):
                plane = getattr(unit, kind)[param.slice].view(param.shape)
                assert torch.equal(plane, moments[kind]), (param.name, kind)
            assert moments["step"] == 2


def test_no_optimizer_to_go_on_with(made, tmp_path):
    with pytest.raises(CheckpointError, match="holds nothing, and AdamW's exp_avg is needed"):
        convert_to_checkpoint(made("llama"), tmp_path / "run")


def test_command_line_and_types(made, tmp_path, capsys):
    folder = made("qwen3") / "checkpoint-2"
    out = tmp_path / "model"
    with pytest.raises(SystemExit) as end:
        main(["convert", str(folder), str(out), "--dtype", "bfloat16", "--json"])
    assert end.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dtype"] == "bfloat16"
    assert "left behind" in said["notes"][0]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    expected = reference(folder.parent)["weights"]
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, expected[name].to(torch.bfloat16))


def test_a_run_folder_gives_its_last_finished_save(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made("qwen3"), run)
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-4")
    (run / "checkpoint-4" / "pytorch_model_fsdp_0" / ".metadata").unlink()
    assert convert_to_model(run, tmp_path / "model").source.name == "checkpoint-2"
    with pytest.raises(CheckpointError, match="this save was not finished"):
        convert_to_model(run / "checkpoint-4", tmp_path / "other")


def test_what_cannot_be_converted_is_refused(made, tmp_path, monkeypatch):
    folder = made("qwen3")
    shards = folder / "checkpoint-2"
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no sharded checkpoint in"):
        convert_to_model(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty" / "pytorch_model_fsdp_0_rank0.bin").touch()
    with pytest.raises(CheckpointError, match=r"rank0\.bin, which is pickle and is never read"):
        convert_to_model(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(CheckpointError, match="only an optimizer's state"):
        convert_to_model(shards / "optimizer_0", tmp_path / "out")
    alone = tmp_path / "a" / "b" / "c"
    shutil.copytree(shards, alone)
    with pytest.raises(ConfigError, match="--model FOLDER"):
        convert_to_model(alone, tmp_path / "out")
    make_config("qwen3", num_hidden_layers=4).save_pretrained(tmp_path / "deeper")
    with pytest.raises(CheckpointError, match=r"lacks 11 of .*model\.layers\.3"):
        convert_to_model(shards, tmp_path / "out", model=tmp_path / "deeper")
    make_config("qwen3", vocab_size=400).save_pretrained(tmp_path / "wider")
    with pytest.raises(CheckpointError, match=r"is \(384, 32\) in .* and \(400, 32\)"):
        convert_to_model(shards, tmp_path / "out", model=tmp_path / "wider")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _path: usage)
        for convert in (convert_to_model, convert_to_checkpoint):
            with pytest.raises(CapacityError, match="1000 B free"):
                convert(shards, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        convert_to_model(shards, tmp_path / "out")


def test_training_goes_on_from_another_trainer(made, run_config, tmp_path):
    """Schedule, bias correction and data stand where that many steps of ours would end."""
    folder = made("qwen3")
    config = json.loads((folder / "config.json").read_text())
    whole = run_config(model_config=config, output_dir=str(tmp_path / "whole"), max_steps=4)
    convert_to_checkpoint(folder, tmp_path / "run")
    result = run_config(model_config=config, resume_from_checkpoint="auto", max_steps=4)
    assert result.step == 4
    rows, ours = ({row["step"]: row for row in read_rows(r.output_dir / "metrics.jsonl")}
                  for r in (result, whole))  # fmt: skip
    assert sorted(rows) == [3, 4]
    assert [rows[s]["learning_rate"] for s in rows] == [ours[s]["learning_rate"] for s in rows]
    loaders = [read_record(r.checkpoint)["trainer_state"]["loader"] for r in (result, whole)]
    assert loaders[0] == loaders[1]
    assert read_record(result.checkpoint)["optimizer_step"] == 4


def test_a_run_from_fused_experts_goes_on(made, run_config, tmp_path):
    """A model saved as it lies in memory, experts in one tensor: its run resumes in that form."""
    folder = made("qwen3_moe")
    model = tmp_path / "model"
    shutil.copytree(folder, model, ignore=shutil.ignore_patterns("step-*", "*.pt"))
    save_file(reference(folder)["weights"], model / "model.safetensors", metadata={"format": "pt"})
    keys = {"model_config": None, "model_name_or_path": str(model)}
    whole = run_config(**keys, output_dir=str(tmp_path / "whole"), max_steps=4)
    run_config(**keys, max_steps=2)
    result = run_config(**keys, max_steps=4, resume_from_checkpoint="auto")
    found, expected = (load_file(r.checkpoint / "model.safetensors") for r in (result, whole))
    assert found.keys() == expected.keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in found
    assert all(torch.equal(found[name], expected[name]) for name in expected)
