"""Checkpoints written by a thread while training goes on.

Owns the one save that may be under way. The invariants: a checkpoint holds the state of its step
and of no other (:mod:`headrace.store.snapshot`); a save that failed ends the run with its reason at
the next step, of several ranks at once, for they wait for each other's saves; one whose disk stalls
does where training must wait for it; when this is closed nothing reads the state any more, but for
what a stalled disk holds. Of several ranks the main one writes, and the others send it what they
hold. Decides nothing about when to save.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import CheckpointError
from headrace.store.checkpoint import prune_checkpoints, write_checkpoint
from headrace.store.gathered import GatheredSource, give_shards
from headrace.store.pulse import Pulse
from headrace.store.ranges import Share, unit_shard
from headrace.store.snapshot import LOOK_SECONDS, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from headrace.models.spec import ModelSpec
    from headrace.parallel.ranks import Ranks
    from headrace.store.layout import UnitLayout
    from headrace.store.snapshot import StateSource
    from headrace.store.state import ModelState, StateDtype
    from headrace.trainer.config import TrainConfig
    from headrace.trainer.resume import Progress

STALL_SECONDS = 300.0  # without a byte written, while training waits for the save
_GIVEN_UP_STALL_SECONDS = 10.0  # the same, where nobody wants the save any more
_GIVING_UP_SECONDS = 2.0  # a unit's copy, while other ranks hang in the step that failed


def spare_bytes(config: TrainConfig, layouts: Sequence[UnitLayout], *, num_ranks: int = 1) -> int:
    """Host memory that a rank's save may take for units that change before they were written."""
    if not config.async_save:
        return 0
    if config.async_save_memory is not None:
        return config.async_save_memory
    return max(unit_bytes(layout, config.dtype, num_ranks=num_ranks) for layout in layouts)


def unit_bytes(layout: UnitLayout, dtype: StateDtype, *, num_ranks: int = 1) -> int:
    """Of a rank's master weights and moments of a unit."""
    working, rest = (2, 10) if dtype == "bfloat16" else (4, 8)
    shard = unit_shard(layout, Share(num_ranks=num_ranks))
    return working * shard.numel + rest * shard.num_trained


class Saver:
    """Writes one checkpoint at a time.

    Attributes:
        last: the last complete checkpoint, or None; of several ranks, as far as this one was told.
        stalled_seconds: how long training waited for saves.
        is_stuck: the disk stalls: nothing more should be written to it.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        state: ModelState,
        *,
        tokenizer: Any,
        last: Path | None,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._spec = spec
        self._state = state
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None
        self._written: tuple[int, Path] | None = None
        self._sent: tuple[int, Path] | None = None  # to the main rank, which may be writing yet
        self._pulse = Pulse()
        self._closing = False  # the run fails, and has its reason
        self.last = last
        self.last_step = -1  # that this session has saved, complete
        self.stalled_seconds = 0.0
        self.is_stuck = False

    def begin(self, progress: Progress) -> None:
        """Start to write a checkpoint of this moment; the one before must have been finished.

        The state must be complete (``Engine.synchronize``).
        """
        assert self._thread is None, "the save before was not finished"
        self._pulse = Pulse()
        self._snapshot = Snapshot(self._state, spare_bytes=self._spare_bytes(), check=self._check)
        # Taken now: callbacks and the loader go on.
        trainer_state = progress.to_dict()
        self._thread = threading.Thread(
            target=self._write,
            args=(self._snapshot, progress.step, trainer_state),
            name="headrace-save",
            daemon=True,
        )
        self._thread.start()

    def _spare_bytes(self) -> int:
        """As :func:`spare_bytes`, of the units as they are shared out."""
        if self._config.async_save and self._config.async_save_memory is None:
            return max(unit.num_bytes for unit in self._state.units)
        return spare_bytes(self._config, self._state.layouts)

    def _write(self, snapshot: Snapshot, step: int, trainer_state: dict[str, Any]) -> None:
        try:
            with self._own_stream():
                self._written = step, self._send_or_write(snapshot, step, trainer_state)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._error = error
            if not self._closing:
                self._ranks.thread_failed(error)
        finally:
            snapshot.close()

    def _send_or_write(self, snapshot: Snapshot, step: int, trainer_state: dict[str, Any]) -> Path:
        if not self._ranks.is_main:
            give_shards(snapshot, self._ranks)
            return self._config.output_dir / f"checkpoint-{step}"
        source: StateSource = snapshot
        if self._ranks.size > 1:
            source = GatheredSource(snapshot, self._ranks)
        return write_checkpoint(
            self._config.output_dir,
            self._spec,
            source,
            step=step,
            trainer_state=trainer_state,
            tokenizer=self._tokenizer,
            pulse=self._pulse,
        )

    def _check(self, seconds: float | None = None) -> None:
        """Refuse to wait for a stalled disk; the main rank's, whose failure ends the others."""
        if not self._ranks.is_main:
            return
        try:
            self._pulse.check(STALL_SECONDS if seconds is None else seconds)
        except CheckpointError:
            self.is_stuck = True
            raise

    def _own_stream(self) -> AbstractContextManager[Any]:
        """Units on a GPU are copied beside its compute."""
        device = self._state.units[0].weights.device
        if device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # untyped in torch

    @property
    def how_to_go_on(self) -> str:
        """For people: what continues the run after its last complete checkpoint."""
        if self.last is None:
            return "start the run again: it had not saved yet"
        inside = self.last.resolve().parent == self._config.output_dir.resolve()
        return (
            f"resume_from_checkpoint={'auto' if inside else self.last} on the same command goes on "
            f"from {self.last}, which is whole"
        )

    def before_step(self) -> None:
        """Wait until no update of a step that begins now can have to wait for long.

        Raises:
            CheckpointError: the disk stalls.
        """
        if self._snapshot is not None:
            started = time.perf_counter()
            self._snapshot.wait_until_free()
            self.stalled_seconds += time.perf_counter() - started

    def finish(self, *, wait: bool) -> tuple[int, Path] | None:
        """Step and folder of the save that was under way, once it is complete; told once.

        Of several ranks all wait, or none.

        Args:
            wait: for it; else None while it is being written.

        Raises:
            CheckpointError: it could not be written, or the disk stalls; earlier checkpoints are
                untouched.
        """
        if not wait and (self._thread is None or self._thread.is_alive()):
            return None
        started = time.perf_counter()
        self._join()
        if wait and self._error is None:
            self._ranks.meet()  # no step, whose waits are bounded, begins beside a slow disk
        self.stalled_seconds += time.perf_counter() - started
        if self._thread is None:
            return None
        self._thread = self._snapshot = None
        error, self._error = self._error, None
        if error is not None:
            self._ranks.raises()
            raise error
        assert self._written is not None
        if wait or self._ranks.is_main:
            self.last_step, self.last = self._written
        else:
            self._sent = self._written
        if self._config.save_total_limit is not None and self._ranks.is_main:
            prune_checkpoints(self._config.output_dir, self._config.save_total_limit)
        return self._written

    def learn(self, last_step: int) -> None:
        """Take over which checkpoint of this session is the main rank's last complete one."""
        if self._sent is not None and self._sent[0] == last_step:
            self.last_step, self.last = self._sent

    def _join(self, stall_seconds: float | None = None) -> None:
        """Wait for the thread that writes, as long as it does."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=LOOK_SECONDS)
            if self._thread.is_alive():
                self._check(stall_seconds)

    def close(self, *, give_up: bool) -> None:
        """End the save that is under way: completed, or given up at its next unit.

        Of several ranks, given up: others may not send theirs any more. What waits for one of them
        does not read the state, and is left waiting.
        """
        self._closing = True
        if self._ranks.size > 1:
            if self._snapshot is not None and self._thread is not None:
                self._snapshot.give_up()
                self._thread.join(timeout=_GIVING_UP_SECONDS)
            return
        with contextlib.suppress(Exception):  # the error that ended the run is the one to show
            if self._snapshot is not None and give_up:
                self._snapshot.give_up()
                self._join(_GIVEN_UP_STALL_SECONDS)
            self.finish(wait=True)
