"""Which checkpoint is resumed from: the newest whole one, of this model, or an error."""

import json
import logging

import pytest

from headrace.errors import CheckpointError
from headrace.store import folders
from headrace.store.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
)
from saved import forget_digests, fresh, save, trained
from tiny import differing, planes, tiny_config


@pytest.fixture(scope="module")
def saved():
    """One trained state that tests save but do not change."""
    return trained()


def test_latest_is_the_highest_step(tmp_path, saved):
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None
    for step in (9, 100, 20):
        save(tmp_path, *saved, step)
    (tmp_path / "checkpoint-500x").mkdir()
    (tmp_path / "checkpoint-600").write_text("a file")
    assert latest_checkpoint(tmp_path).name == "checkpoint-100"
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "checkpoint-9",
        "checkpoint-20",
        "checkpoint-100",
    ]


@pytest.mark.parametrize(
    "victim", ["model.safetensors", "optimizer.safetensors", "config.json", "headrace.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing"])
def test_partly_written_checkpoint_is_passed_over(tmp_path, saved, caplog, victim, damage):
    """Pitfall 16. A damaged newest one: a warning that names it, and the one before it."""
    previous = save(tmp_path, *saved, 1)
    newest = save(tmp_path, *saved, 2)
    path = newest / victim
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -1 if damage == "truncated" else 0])
    # The record's last byte is a line end, without which it is still whole.
    harmless = victim == "headrace.json" and damage == "truncated"
    with caplog.at_level(logging.WARNING, logger="headrace.store.folders"):
        assert latest_checkpoint(tmp_path) == (newest if harmless else previous)
    if not harmless:
        assert [str(newest) in message for message in caplog.messages] == [True]
        assert victim in caplog.text
        spec, state = fresh()
        before = planes(state)
        with pytest.raises(CheckpointError, match=f"checkpoint-2 is not .*{victim}"):
            load_checkpoint(newest, spec, state)
        assert differing(planes(state), before) == []


def test_bytes_changed_on_the_disk(tmp_path, saved):
    """A header that no longer describes the file is refused, not read."""
    path = save(tmp_path, *saved, 1)
    forget_digests(path)
    data = bytearray((path / "optimizer.safetensors").read_bytes())
    data[8:40] = b"\0" * 32
    (path / "optimizer.safetensors").write_bytes(data)
    spec, state = fresh()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is not a whole"):
        load_checkpoint(path, spec, state)


def test_older_format_is_refused(tmp_path, saved):
    path = save(tmp_path, *saved, 1)
    record = json.loads((path / folders.RECORD).read_text())
    (path / folders.RECORD).write_text(json.dumps(record | {"format_version": 0}))
    with pytest.raises(CheckpointError, match="format version 0"):
        load_checkpoint(path, *fresh())


OTHERS = {
    "more layers": ({"num_hidden_layers": 4}, r"lacks .*layers\.3\."),
    "fewer layers": ({"num_hidden_layers": 2}, r"has .* others \(model\.layers\.2\."),
    "untied": ({"tied": False}, r"lacks .*lm_head\.weight"),
    "wider": ({"hidden_size": 48}, r"embed_tokens\.weight .*\(96, 32\).*\(96, 48\)"),
    "family": ({"family": "llama"}, r"others \(model\.layers\.0\.self_attn\.k_norm"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_checkpoint_of_another_model(tmp_path, saved, other):
    overrides, message = OTHERS[other]
    path = save(tmp_path, *saved, 1)
    config = tiny_config(**{"tied": True} | overrides)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, *fresh(config))


def test_checkpoint_of_another_dtype(tmp_path, saved):
    path = save(tmp_path, *saved, 1)
    with pytest.raises(CheckpointError, match="dtype bfloat16, this run has float32"):
        load_checkpoint(path, *fresh(dtype="float32"))


def test_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: headrace\.json"):
        load_checkpoint(tmp_path, *fresh())


def test_pruning_keeps_the_newest_complete_ones(tmp_path, saved):
    paths = [save(tmp_path, *saved, step) for step in (1, 2, 3, 4)]
    (paths[3] / "model.safetensors").unlink()
    assert prune_checkpoints(tmp_path, keep=2) == [paths[0]]
    assert list_checkpoints(tmp_path) == paths[1:]
    assert prune_checkpoints(tmp_path, keep=2) == []
    assert latest_checkpoint(tmp_path) == paths[2]


def test_pruning_that_was_killed(tmp_path, saved, monkeypatch):
    """Renamed before it is emptied: what is left never counts, and the next save clears it."""
    for step in (1, 2):
        save(tmp_path, *saved, step)
    monkeypatch.setattr(folders.shutil, "rmtree", lambda *args, **kwargs: None)
    prune_checkpoints(tmp_path, keep=1)
    monkeypatch.undo()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    save(tmp_path, *saved, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
