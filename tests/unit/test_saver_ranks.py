"""The save of one of several ranks, when the run fails."""

import threading
from types import SimpleNamespace

import torch

from headrace.store.layout import plan_unit
from headrace.store.ranges import Share, unit_shard
from headrace.trainer.saving import Saver


def test_a_failed_run_reads_the_state_no_more(tmp_path):
    """Its memory is given back next: a save that went on would read what is not there."""
    weights = torch.zeros(128)
    layout = plan_unit("head", [("w", "w", (4,), True)])
    shard = unit_shard(layout, Share(num_ranks=2))
    unit = SimpleNamespace(weights=weights, planes={}, num_bytes=16, shard=shard)
    state = SimpleNamespace(
        units=[unit] * 50, layouts=[], dtype="float32", optimizer_step=1, snapshot=None
    )
    sent, under_way = [], threading.Event()

    def send_to_main(values):
        sent.append(values)
        under_way.set()
        threading.Event().wait(0.05)

    ranks = SimpleNamespace(size=2, is_main=False, send_to_main=send_to_main)
    config = SimpleNamespace(async_save=False, output_dir=tmp_path)
    saver = Saver(config, None, state, tokenizer=None, last=None, ranks=ranks)
    saver.begin(SimpleNamespace(step=1, to_dict=dict))
    assert under_way.wait(10)
    saver.close(give_up=False)
    assert len(sent) < 50
    assert state.snapshot is None  # the thread has ended, and updates that waited go on
