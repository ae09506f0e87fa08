"""Checkpoints whose sizes are right and whose contents are not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError
from headrace.store.checkpoint import RECORD, load_checkpoint, read_record
from headrace.trainer.resume import Progress
from saved import fresh, save, trained


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "run", *trained(), 2)


def change_record(path, **changes):
    record = json.loads((path / RECORD).read_text()) | changes
    kept = {key: value for key, value in record.items() if value is not ...}
    (path / RECORD).write_text(json.dumps(kept))


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
    change_record(path, **change)
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
    files = json.loads((path / RECORD).read_text())["files"]
    change_record(path, files=files | {file.name: file.stat().st_size})
    with pytest.raises(CheckpointError, match=f"{name} .* NaN or infinite"):
        load_checkpoint(path, *fresh())


def test_a_tensor_of_another_width_says_how_to_go_on(path):
    spec, state = fresh()
    other = load_file(path / "model.safetensors")
    name = next(name for name in other if "mlp" in name)
    other[name] = torch.cat([other[name], other[name]])
    save_file(other, path / "model.safetensors", {"format": "pt"})
    files = json.loads((path / RECORD).read_text())["files"]
    size = (path / "model.safetensors").stat().st_size
    change_record(path, files=files | {"model.safetensors": size})
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
