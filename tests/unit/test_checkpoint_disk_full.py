"""A disk that takes no more: a clear error, and everything saved before is still there."""

import errno
import os
import resource
import shutil

import pytest

from disk_operations import announce_operations
from headrace.errors import CheckpointError
from headrace.store.checkpoint import (
    export_pretrained,
    find_problem,
    latest_checkpoint,
    load_checkpoint,
    read_record,
)
from saved import fresh, save, trained
from tiny import differing, planes


@pytest.fixture(scope="module")
def saved():
    """One trained state that tests save but do not change."""
    return trained()


def count_operations(monkeypatch, work):
    names = []
    with monkeypatch.context() as patch:
        announce_operations(names.append, setattr=patch.setattr)
        work()
    return names


def test_disk_full_at_any_operation_of_a_save(tmp_path, saved, monkeypatch):
    """Each write, flush and rename of a save fails in turn: earlier checkpoints stay, and load."""
    spec, state = saved
    names = count_operations(monkeypatch, lambda: save(tmp_path / "count", spec, state, 2))
    assert names.count("write") > 80  # headers and tensors
    assert {"open", "fsync", "mkdir", "rename"} <= set(names)
    previous = save(tmp_path / "run", spec, state, 1)
    reached = 0
    for victim in range(len(names)):
        seen = []

        def fail(name, seen=seen, victim=victim):
            seen.append(name)
            if len(seen) == victim + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            announce_operations(fail, setattr=patch.setattr)
            try:
                save(tmp_path / "run", spec, state, 2)
            except CheckpointError as error:
                reached += 1
                assert "No space left on device" in str(error)  # noqa: PT017 - some operations may fail harmlessly
        found = latest_checkpoint(tmp_path / "run")
        if found != previous:  # the rename was done: the folder is complete
            assert found.name == "checkpoint-2"
            assert find_problem(found) is None
            shutil.rmtree(found)
        assert find_problem(previous) is None
        left = {path.name for path in (tmp_path / "run").iterdir()} - {"checkpoint-1"}
        assert left == set()
    assert reached > 0.9 * len(names)
    spec, again = fresh()
    load_checkpoint(previous, spec, again)
    assert differing(planes(again), planes(state)) == []


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_disk_takes_no_more_bytes(tmp_path, saved, part):
    """The system itself refuses the last byte of the weights, of the moments."""
    spec, state = saved
    previous = save(tmp_path / "run", spec, state, 1)
    limit = read_record(previous)["files"][f"{part}.safetensors"] - 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save(tmp_path / "run", spec, state, 2)
        if part == "model":
            with pytest.raises(CheckpointError, match="File too large"):
                export_pretrained(spec, state, tmp_path / "export" / "model")
            assert not any((tmp_path / "export").iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest_checkpoint(tmp_path / "run") == previous
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-1"]


def test_tokenizer_that_cannot_be_written(tmp_path, saved, tokenizer):
    """Its library raises errors of its own."""
    spec, state = saved
    tokenizer.add_tokens([f"token-{number:06d}" * 20 for number in range(3000)])
    previous = save(tmp_path / "run", spec, state, 1)
    limit = max(read_record(previous)["files"].values()) + 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save(tmp_path / "run", spec, state, 2, tokenizer=tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-1"]


def test_output_dir_that_is_a_file(tmp_path, saved):
    spec, state = saved
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not write"):
        save(tmp_path / "file", spec, state, 1)
