"""Checkpoints whose sizes are right and whose contents are not."""

import json
import logging
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError, DamagedCheckpointError
from headrace.store.checkpoint import (
    RECORD,
    find_problem,
    latest_checkpoint,
    load_checkpoint,
    read_record,
)
from headrace.trainer.export import export_checkpoint
from headrace.trainer.export_dtype import export_as
from headrace.trainer.resume import Progress
from saved import forget_digests, fresh, save, trained


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "run", *trained(), 2)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer_step": ...},
        {"optimizer_step": "2"},
        {"dtype": ...},
        {"trainer_state": ...},
        {"trainer_state": []},
        {"step": None},
    ],
)
def test_a_damaged_record_is_named_by_key(path, change):
    forget_digests(path, **change)
    with pytest.raises(CheckpointError, match=f"is damaged: {next(iter(change))}") as caught:
        read_record(path)
    assert caught.value.remedy
    with pytest.raises(CheckpointError):
        load_checkpoint(path, *fresh())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_resumed(path, value):
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "mlp" in name)
    tensors[name].view(-1)[3] = value
    save_file(tensors, file, {"format": "pt"})
    forget_digests(path)
    with pytest.raises(CheckpointError, match=f"{name} .* NaN or infinite"):
        load_checkpoint(path, *fresh())


def test_a_tensor_of_another_width_says_how_to_go_on(path):
    spec, state = fresh()
    other = load_file(path / "model.safetensors")
    name = next(name for name in other if "mlp" in name)
    other[name] = torch.cat([other[name], other[name]])
    save_file(other, path / "model.safetensors", {"format": "pt"})
    forget_digests(path)
    with pytest.raises(CheckpointError, match=name) as caught:
        load_checkpoint(path, spec, state)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "change", [{"loader": {}}, {"loader": 5}, {"unheard_of": 1}, {"meter": ...}]
)
def test_a_damaged_trainer_state_is_named(path, change):
    saved = {
        "format": 1, "step": 2, "loader": {"seed": 1}, "meter": {}, "data": {}, "config": {},
    }  # fmt: skip
    assert Progress.from_dict(saved, path).step == 2
    values = {key: value for key, value in (saved | change).items() if value is not ...}
    with pytest.raises(CheckpointError, match=r"trainer state of .* is damaged"):
        Progress.from_dict(values, path)


def flip(file, place, bit=0):
    """Change one bit of a file; its size stays."""
    with file.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ (1 << bit)]))


def damaged_somewhere(path, spec, state):
    """What loading says, or None; a checkpoint that would not be chosen is not loaded."""
    problem = find_problem(path)
    if problem is not None:
        return problem
    try:
        load_checkpoint(path, spec, state)
    except CheckpointError as error:
        return error.message
    return None


def test_a_flipped_bit_is_found_wherever_it_is(path, tmp_path):
    """Every file of a checkpoint, at its first and last byte and at random ones."""
    spec, state = fresh()
    assert damaged_somewhere(path, spec, state) is None
    rng = random.Random(5)
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        places = [0, 9, size // 2, *(rng.randrange(size) for _ in range(12))]
        if file.name != RECORD:  # which ends with a line end that means nothing
            places.append(size - 1)
        for place in places:
            bit = rng.randrange(8)
            content = file.read_bytes()
            flip(file, place, bit)
            if file.name == RECORD and _same_json(content, file.read_bytes()):
                flip(file, place, bit)
                continue
            found = damaged_somewhere(path, spec, state)
            flip(file, place, bit)
            assert found is not None, (file.name, place)
            assert file.name in found, (file.name, place, found)
    assert damaged_somewhere(path, spec, state) is None


def _same_json(before, after):
    """Spaces between values mean nothing."""
    try:
        return json.loads(before) == json.loads(after)
    except ValueError:
        return False


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_of_a_tensor_is_named(path, file):
    flip(path / file, (path / file).stat().st_size - 1)
    last = list(load_file(path / file))
    assert find_problem(path) is None  # the data is compared when it is read
    with pytest.raises(DamagedCheckpointError, match=f"in .*{file} has changed") as caught:
        load_checkpoint(path, *fresh())
    assert caught.value.folder == path
    assert caught.value.message.split()[0] in last


def test_a_checkpoint_of_an_earlier_version_loads_and_says_so(path, caplog):
    forget_digests(path)
    with caplog.at_level(logging.WARNING, logger="headrace.store.checkpoint"):
        load_checkpoint(path, *fresh())
    assert "saved without digests" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="headrace.store.checkpoint"):
        load_checkpoint(save(path.parent, *trained(), 3), *fresh())
    assert caplog.text == ""


def test_small_files_are_compared_when_a_checkpoint_is_chosen(path):
    save(path.parent, *trained(), 1)
    flip(path / "config.json", 30)
    assert latest_checkpoint(path.parent).name == "checkpoint-1"


@pytest.mark.parametrize("export", [export_checkpoint, lambda *a: export_as(*a, dtype="float32")])
def test_damage_is_not_exported(path, tmp_path, export):
    whole = tmp_path / "whole"
    export(path, whole)
    assert not [name for name in ("digests.json", RECORD) if (whole / name).exists()]
    shutil.copytree(path, copy := tmp_path / "copy")
    flip(copy / "model.safetensors", (copy / "model.safetensors").stat().st_size - 1)
    with pytest.raises(DamagedCheckpointError, match="has changed"):
        export(copy, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "run", "whole"]
