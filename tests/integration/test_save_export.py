"""Saving and exporting: whole at every moment, and without memory of the model's size."""

import json
import os
import shutil
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headrace.cli import main
from headrace.errors import CapacityError, CheckpointError, ConfigError
from headrace.models.spec import ModelSpec
from headrace.store.checkpoint import (
    export_pretrained,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from headrace.store.loading import initialise
from headrace.store.state import ModelState
from headrace.trainer.export import export_checkpoint
from headrace.trainer.export_dtype import export_as

_WATCHED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


@pytest.fixture
def run(run_config):
    """A finished run with checkpoints 4 and 8."""
    return run_config(save_strategy="steps", save_steps=4)


def test_a_kill_at_every_write_of_a_save_leaves_a_whole_checkpoint(run_config, tmp_path):
    """A copy of the folder before every file operation of a save is what a kill there leaves."""
    result = run_config(max_steps=2)
    config = AutoConfig.from_pretrained(result.checkpoint)
    spec = ModelSpec.from_config(config)
    state = ModelState(spec.units, "bfloat16")
    out, copies = tmp_path / "run", tmp_path / "copies"
    copies.mkdir()
    watching = False

    def hook(event, args):
        nonlocal watching
        if not watching or event not in _WATCHED or str(out) not in str(args[0]):
            return
        watching = False  # the copy's own operations are not the save's
        shutil.copytree(out, copies / f"{len(list(copies.iterdir())):03d}")
        watching = True

    sys.addaudithook(hook)
    load_checkpoint(result.checkpoint, spec, state)
    for step in (3, 2):  # a new checkpoint, then one that replaces an existing one
        state.units[0].exp_avg[0] = step
        watching = True
        save_checkpoint(out, spec, state, step=step, trainer_state={"step": step})
        watching = False
    torn = []
    for copy in sorted(copies.iterdir()):
        # The file being written may hold any part of what it should.
        for file in copy.glob(".checkpoint-*.writing/*"):
            if file.stat().st_size:
                cut = copies / f"{copy.name}-{file.name}"
                shutil.copytree(copy, cut)
                os.truncate(cut / file.relative_to(copy), file.stat().st_size // 2)
                torn.append(cut)
    moments = sorted(copies.iterdir())
    assert len(moments) > 20
    assert torn
    for moment in moments:
        newest = latest_checkpoint(moment)
        assert newest is not None, moment.name
        saved = load_checkpoint(newest, spec, state)
        if "loader" not in saved:  # one of the two saves above, complete
            assert state.units[0].exp_avg[0] == saved["step"], moment.name


def test_tied_weights_are_saved_once(run_config, tiny_model, tmp_path):
    """Save, load, train, save, export: one storage, one key, still tied for transformers."""
    run_config(max_steps=2)
    result = run_config(max_steps=4, resume_from_checkpoint="auto")
    exported = export_checkpoint(result.output_dir, tmp_path / "model").folder
    for folder in (result.checkpoint, exported):
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a mapping
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = run_config(
        model_config=tiny_model(tied=False), max_steps=2, output_dir=str(tmp_path / "untied")
    )
    model = AutoModelForCausalLM.from_pretrained(untied.checkpoint)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_index_and_files_agree_after_a_save_with_fewer_shards(run_config, tmp_path, monkeypatch):
    from headrace.store import checkpoint as store  # noqa: PLC0415 - its constant is replaced

    keys = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    with monkeypatch.context() as small:
        small.setattr(store, "SHARD_BYTES", 20_000)
        sharded = run_config(**keys)
    files = sorted(p.name for p in sharded.checkpoint.glob("model*"))
    assert len(files) > 2
    model = AutoModelForCausalLM.from_pretrained(sharded.checkpoint)
    # The same step again with one shard: nothing of the shards is left.
    os.truncate(sharded.checkpoint / "headrace.json", 0)
    again = run_config(**keys, resume_from_checkpoint="auto")
    assert again.checkpoint == sharded.checkpoint
    assert sorted(p.name for p in again.checkpoint.glob("model*")) == ["model.safetensors"]
    keys = set(load_file(again.checkpoint / "model.safetensors"))
    assert keys == {name for name, _ in model.named_parameters()}


def test_export_is_a_model_folder_with_equal_logits(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["export", str(run.output_dir), str(tmp_path / "model"), "--json"])
    assert end.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checkpoint"] == str(run.checkpoint)
    folder = tmp_path / "model"
    assert sorted(p.name for p in folder.iterdir()) == sorted(said["files"])
    assert not list(folder.glob("optimizer*"))
    assert said["num_bytes"] == sum(p.stat().st_size for p in folder.iterdir())
    ids = torch.arange(20)[None]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (run.checkpoint, folder)
    )
    assert torch.equal(ours, theirs)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    earlier = export_checkpoint(run.output_dir / "checkpoint-4", tmp_path / "earlier")
    assert earlier.checkpoint.name == "checkpoint-4"


def test_export_of_the_master_weights(run, tmp_path, capsys):
    """float32 is the split master joined, to the last bit; bfloat16 is that rounded to even."""
    spec = ModelSpec.from_config(AutoConfig.from_pretrained(run.checkpoint))
    state = ModelState(spec.units, "bfloat16")
    load_checkpoint(run.checkpoint, spec, state)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(SystemExit) as end:
            main(["export", str(run.output_dir), str(tmp_path / dtype), "--dtype", dtype])
        assert end.value.code == 0, capsys.readouterr().err
        model = AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto")
        assert model.dtype == getattr(torch, dtype)
        weights = model.state_dict()
        for unit in state.units:
            for param in unit.layout.params:
                expected = unit.master(param).to(model.dtype)
                assert torch.equal(weights[param.name], expected)
        assert AutoTokenizer.from_pretrained(tmp_path / dtype).eos_token == "<eos>"
    working = load_file(run.checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    master = load_file(tmp_path / "float32" / "model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(working.float(), master)


def test_export_refuses_what_it_cannot_do(run, tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_checkpoint(run.output_dir, taken)
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run folder"):
        export_checkpoint(tmp_path / "absent", tmp_path / "model")
    with pytest.raises(ConfigError, match="cannot be written"):
        export_checkpoint(run.output_dir, taken / "file" / "model")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _path: usage)
        with pytest.raises(CapacityError, match="1000 B free"):
            export_checkpoint(run.output_dir, tmp_path / "model")
    (run.checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        export_checkpoint(run.checkpoint, tmp_path / "model")
    # The run's last complete checkpoint is an earlier one now.
    assert export_checkpoint(run.output_dir, tmp_path / "model").checkpoint.name == "checkpoint-4"


def test_a_checkpoint_deleted_while_it_is_exported(run, tmp_path, monkeypatch):
    copy = shutil.copyfile

    def pruned(source, target):
        shutil.rmtree(run.checkpoint)
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", pruned)
    with pytest.raises(CheckpointError, match="deleted by its run"):
        export_checkpoint(run.output_dir, tmp_path / "model")
    assert not list(tmp_path.glob("*model*"))


def test_a_killed_export_leaves_nothing_under_the_name(run, tmp_path, monkeypatch):
    def killed(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(run.output_dir, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert export_checkpoint(run.output_dir, tmp_path / "model").folder.is_dir()


def _peak_above(action):
    """Resident bytes that ``action`` adds at its peak; the kernel's own mark, reset before."""

    def read(name):
        with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123 - not a path
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:  # noqa: PTH123 - as above
        file.write("5")
    before = read("VmRSS")
    action()
    return read("VmHWM") - before


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no way to reset VmHWM")
def test_saving_and_exporting_take_less_than_a_unit(tiny_model, tmp_path):
    config = AutoConfig.for_model(
        **tiny_model(
            hidden_size=512, intermediate_size=1024, num_hidden_layers=6, vocab_size=8192,
            tied=False,
        )
    )  # fmt: skip
    spec = ModelSpec.from_config(config)
    state = ModelState(spec.units, "bfloat16")
    initialise(spec, state, seed=0)
    unit = max(12 * layout.num_parameters for layout in spec.units)
    assert state.state_bytes > 3 * unit
    save = _peak_above(lambda: save_checkpoint(tmp_path, spec, state, step=1, trainer_state={}))
    assert save < unit
    assert _peak_above(lambda: export_pretrained(spec, state, tmp_path / "a")) < unit
    assert _peak_above(lambda: export_checkpoint(tmp_path, tmp_path / "b")) < unit
    # A unit is put together, and its float32 copy is written.
    file_pages = (tmp_path / "checkpoint-1" / "model.safetensors").stat().st_size
    peak = _peak_above(lambda: export_as(tmp_path, tmp_path / "c", dtype="float32"))
    assert peak - file_pages < 2 * unit
    for folder in ("a", "b", "c"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert model.num_parameters() == spec.num_parameters
