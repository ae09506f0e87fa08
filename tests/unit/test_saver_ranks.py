"""The save of one of several ranks: when it, or the run, fails, and when it is whole."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from headrace.errors import CapacityError
from headrace.parallel import watch as watch_module
from headrace.parallel.watch import Watch
from headrace.store.layout import plan_unit
from headrace.store.ranges import Share, unit_shard
from headrace.trainer.saving import Saver


@pytest.fixture
def saver_of(tmp_path):
    """Makes the saver of a rank that is not the main one, with so many units."""

    def make(num_units, **ranks):
        weights = torch.zeros(128)
        layout = plan_unit("head", [("w", "w", (4,), True)])
        shard = unit_shard(layout, Share(num_ranks=2))
        unit = SimpleNamespace(weights=weights, planes={}, num_bytes=16, shard=shard)
        state = SimpleNamespace(
            units=[unit] * num_units, layouts=[], dtype="float32", optimizer_step=1, snapshot=None
        )
        ranks = SimpleNamespace(size=2, is_main=False, **ranks)
        config = SimpleNamespace(async_save=False, output_dir=tmp_path, save_total_limit=None)
        return Saver(config, None, state, tokenizer=None, last=None, ranks=ranks), state

    return make


PROGRESS = SimpleNamespace(step=1, to_dict=dict)


def test_a_failed_run_reads_the_state_no_more(saver_of):
    """Its memory is given back next: a save that went on would read what is not there."""
    sent, under_way = [], threading.Event()

    def send_to_main(values):
        sent.append(values)
        under_way.set()
        threading.Event().wait(0.05)

    saver, state = saver_of(50, send_to_main=send_to_main)
    saver.begin(PROGRESS)
    assert under_way.wait(10)
    saver.close(give_up=False)
    assert len(sent) < 50
    assert state.snapshot is None  # the thread has ended, and updates that waited go on


def test_a_save_that_fails_is_told_while_the_main_thread_waits_for_others(saver_of):
    """Which wait for this save: nobody would come to where its error is looked at."""
    told = []

    def send_to_main(_values):
        raise MemoryError("none for the copy")

    saver, _ = saver_of(1, send_to_main=send_to_main, thread_failed=told.append)
    saver.begin(PROGRESS)
    saver._thread.join(10)
    assert [type(error) for error in told] == [MemoryError]


def test_a_thread_that_failed_interrupts_its_main_thread(monkeypatch):
    """Once, and with the thread's own error."""
    monkeypatch.setattr(watch_module, "GRACE_SECONDS", 1e6)  # this process does not end
    watch = Watch(dist.HashStore(), 0, 1)
    error = CapacityError("the disk is full")
    try:
        threading.Timer(0.05, watch.thread_failed, [error]).start()
        with pytest.raises(CapacityError) as caught:
            time.sleep(10)
        assert caught.value is error
        assert watch.failed(error) is error
        watch.thread_failed(CapacityError("given up"))  # it is ending: the first error counts
    finally:
        watch.close(failed=False)


def test_a_rank_calls_whole_what_the_main_one_has_written(saver_of):
    """What it has sent may not be on the disk yet, and a killed run would go on from nothing."""
    saver, _ = saver_of(1, send_to_main=lambda _: None)
    saver.begin(PROGRESS)
    saver._thread.join(10)
    assert saver.finish(wait=False)[0] == 1
    saver.learn(-1)
    assert saver.last is None
    assert "had not saved yet" in saver.how_to_go_on
    saver.learn(1)
    assert saver.last.name == "checkpoint-1"
