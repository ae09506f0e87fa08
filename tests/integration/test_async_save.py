"""Checkpoints written while training goes on: the same files, told when they are complete."""

import errno
import json
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import TrainerCallback

from headrace.errors import CheckpointError
from headrace.store import folders
from headrace.store.checkpoint import find_problem, latest_checkpoint
from headrace.store.snapshot import Snapshot
from headrace.trainer import saving
from headrace.trainer.metrics import read_rows


class Saves(TrainerCallback):
    """The step of every on_save, and whether its checkpoint was complete."""

    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, **_):
        folder = folders.Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.seen.append((state.global_step, find_problem(folder)))


def slow_reads(monkeypatch, seconds):
    """Every unit takes that long to be written."""
    read = Snapshot.unit

    def slow(self, index):
        time.sleep(seconds)
        return read(self, index)

    monkeypatch.setattr(Snapshot, "unit", slow)


@pytest.mark.parametrize("memory", [None, 0])
def test_checkpoints_are_those_of_a_run_that_waits(run_config, tmp_path, monkeypatch, memory):
    saves = Saves()
    keys = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    waited = run_config(async_save=False, output_dir=str(tmp_path / "waited"), **keys)
    slow_reads(monkeypatch, 0.02)
    result = run_config(callbacks=[saves], async_save_memory=memory, **keys)
    assert saves.seen == [(2, None), (4, None), (6, None)]
    for step in (2, 4, 6):
        for name in ("model.safetensors", "optimizer.safetensors"):
            a, b = (load_file(r.output_dir / f"checkpoint-{step}" / name) for r in (result, waited))
            assert a.keys() == b.keys()
            for key in a:
                assert torch.equal(a[key].view(torch.uint8), b[key].view(torch.uint8)), (step, key)
    rows = [
        [(row["step"], row["loss"]) for row in read_rows(r.output_dir / "metrics.jsonl")]
        for r in (result, waited)
    ]
    assert rows[0] == rows[1]


def test_a_slow_writer_times_nothing_out(run_config, tmp_path, monkeypatch):
    """Pitfall 21. A save lasts longer than every timeout: no collective is made, no lane gives up.

    The process group would end after 2 s, a lane after half of one; a save takes more than 2.
    """
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=2))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=2))

    def refused(*_args, **_kwargs):
        raise AssertionError("a collective")

    try:
        slow_reads(monkeypatch, 0.3)
        for name in ("barrier", "all_reduce", "all_gather", "gather_object", "broadcast"):
            monkeypatch.setattr(dist, name, refused)
        result = run_config(
            save_strategy="steps", save_steps=2, max_steps=4, async_save_memory=0,
            engine={"lane_timeout_seconds": 0.5, "chunk_bytes": 4096},
        )  # fmt: skip
    finally:
        dist.destroy_process_group()
    record = json.loads((result.output_dir / "run.json").read_text())
    assert record["save_stall_seconds"] > 2  # four units, twice
    assert find_problem(result.checkpoint) is None


def test_a_disk_that_fills_up_ends_the_run(run_config, tmp_path, monkeypatch):
    """The second save fails in its thread: the run ends, and the first checkpoint is whole."""
    rename = folders.Path.rename

    def full(path, target):
        if path.name == ".checkpoint-4.writing":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    monkeypatch.setattr(folders.Path, "rename", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run_config(save_strategy="steps", save_steps=2, max_steps=40)
    assert latest_checkpoint(tmp_path / "run").name == "checkpoint-2"
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


@pytest.mark.parametrize("memory", [0, 2**30], ids=["a step waits", "the next save waits"])
def test_a_disk_that_stalls_ends_the_run_with_the_files_name(
    run_config, tmp_path, monkeypatch, memory
):
    """The flush of the second save never returns: no error of the disk, and no end either."""
    fsync, answers, hung = os.fsync, threading.Event(), []

    def stalls(descriptor):
        name = folders.Path(f"/proc/self/fd/{descriptor}").readlink()
        if ".checkpoint-4.writing/optimizer" in str(name):
            hung.append(threading.current_thread())
            answers.wait(60)
        return fsync(descriptor)

    monkeypatch.setattr(os, "fsync", stalls)
    monkeypatch.setattr(saving, "STALL_SECONDS", 0.2)
    try:
        with pytest.raises(CheckpointError, match=r"nothing was written for .*optimizer.safetens"):
            run_config(save_strategy="steps", save_steps=2, async_save_memory=memory)
        assert latest_checkpoint(tmp_path / "run").name == "checkpoint-2"
        assert hung
    finally:
        answers.set()
        for thread in hung:
            thread.join(10)


class Fails(TrainerCallback):
    """Raises in the step after a save began."""

    def __init__(self, error):
        self.error = error

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2:
            raise self.error


def test_a_run_that_fails_completes_the_save_under_way(run_config, tmp_path, monkeypatch):
    slow_reads(monkeypatch, 0.05)
    with pytest.raises(ZeroDivisionError):
        run_config(
            callbacks=[Fails(ZeroDivisionError())], save_strategy="steps", save_steps=2, max_steps=9
        )
    assert find_problem(tmp_path / "run" / "checkpoint-2") is None


def test_a_second_interrupt_gives_the_save_up(run_config, tmp_path, monkeypatch):
    slow_reads(monkeypatch, 0.2)
    with pytest.raises(KeyboardInterrupt):
        run_config(
            callbacks=[Fails(KeyboardInterrupt())], save_strategy="steps", save_steps=2, max_steps=9
        )
    assert latest_checkpoint(tmp_path / "run") is None
    assert not list((tmp_path / "run").glob(".checkpoint-*"))
    assert not [t for t in threading.enumerate() if t.name == "headrace-save"]
