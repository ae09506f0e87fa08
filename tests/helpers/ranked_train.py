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


class SavesAt(TrainerCallback):
    """Asks for a save after a step's row, as callbacks that keep the best checkpoint do."""

    def __init__(self, step):
        self.step = step

    def on_log(self, args, state, control, **kwargs):
        control.should_save = state.global_step == self.step


def run(ranks, *, config, stop_at=None, save_at=None, seconds_a_save=0.0):
    """``train`` on every rank, perhaps with a slow disk; what it returned, in types of Python."""
    callbacks = [
        kind(step) for kind, step in ((StopAt, stop_at), (SavesAt, save_at)) if step is not None
    ]

    def slowly(*arguments, **settings):
        time.sleep(seconds_a_save)
        return write_checkpoint(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        if seconds_a_save:
            patch.setattr("headrace.trainer.saving.write_checkpoint", slowly)
        return _run(config, callbacks)


def _run(config, callbacks):
    result = train(config, callbacks=callbacks)
    return vars(result) | {
        "output_dir": str(result.output_dir),
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
    }
