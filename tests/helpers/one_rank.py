"""What one rank finds, may or does otherwise than the others; called in each process first."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from pathlib import Path

from transformers import TrainerCallback

from headrace.errors import DamagedCheckpointError
from headrace.trainer import preflight, prepare, run, saving, together


def slow_to_load(_rank):
    """Says that the run is being prepared, and takes its time over it."""
    real = prepare.initialise

    def slowly(*arguments, **settings):
        print("loading", flush=True)
        time.sleep(2.0)
        real(*arguments, **settings)

    prepare.initialise = slowly


def reads_other_documents(rank):
    """The second rank's machine has an older copy of a file."""
    if rank == 1:
        real = prepare.open_data

        def other(config, *arguments, **settings):
            source = dataclasses.replace(config.datasets[0], max_samples=20)
            return real(config.model_copy(update={"datasets": [source]}), *arguments, **settings)

        prepare.open_data = other


def has_another_model(rank):
    """The second rank's machine has another config.json."""
    if rank == 1:
        real = preflight.load_model_config

        def other(*arguments):
            config = real(*arguments)
            config.hidden_act = "gelu"
            return config

        preflight.load_model_config = other


def sees_no_checkpoint(rank):
    """The second rank's machine does not share the output folder."""
    together.PATIENCE_SECONDS = 0.1
    if rank == 1:
        real = together.find_problem
        together.find_problem = lambda path: real(Path("/nowhere") / path.name)


def cannot_write(rank):
    """The second rank may not write where the first one does."""
    if rank == 1:
        real = os.access
        os.access = lambda path, mode, **more: mode != os.W_OK and real(path, mode, **more)


def reads_damage(rank):
    """The second rank reads other bits of the last checkpoint's record."""
    if rank == 1:
        real = prepare.read_progress

        def damaged(path, **settings):
            if path.name == "checkpoint-2":
                raise DamagedCheckpointError("its bits are others", folder=path)
            return real(path, **settings)

        prepare.read_progress = damaged


def cannot_save(rank):
    """The main rank's disk fills up while a save is written beside the next step."""
    if rank == 0:

        def full(*_arguments, **_settings):
            time.sleep(0.3)
            raise OSError(errno.ENOSPC, "No space left on device", "optimizer.safetensors")

        saving.write_checkpoint = full


class Exits(TrainerCallback):
    def on_log(self, *_, **__):
        raise SystemExit(7)


def exits_in_a_callback(_rank):
    run.stopping_callbacks = lambda _: [Exits()]
