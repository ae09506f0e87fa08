"""Whole trainings in the processes of a crew."""

from __future__ import annotations

import os
import signal
import time

import pytest
from transformers import TrainerCallback

from headrace.store.checkpoint import write_checkpoint
from headrace.trainer import train


class StopAt(TrainerCallback):
    """Sends SIGTERM to its own process in a step; runs on the main rank alone, as all callbacks."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def run(ranks, *, config, stop_at=None, seconds_a_save=0.0):
    """``train`` on every rank, perhaps with a slow disk; what it returned, in types of Python."""

    def slowly(*arguments, **settings):
        time.sleep(seconds_a_save)
        return write_checkpoint(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        if seconds_a_save:
            patch.setattr("headrace.trainer.saving.write_checkpoint", slowly)
        return _run(config, stop_at)


def _run(config, stop_at):
    result = train(config, callbacks=[] if stop_at is None else [StopAt(stop_at)])
    return vars(result) | {
        "output_dir": str(result.output_dir),
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
    }
