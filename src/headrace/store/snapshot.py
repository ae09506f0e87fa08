"""The state of one moment, read unit by unit while updates of later steps go on.

Invariant: what is read of every unit is what it held when the snapshot was taken. A unit may be
updated once it was read, or once it was copied to spare memory; until then its update waits. Spare
memory is bounded, so a snapshot never doubles the state. Whoever waits asks, now and then, whether
the reader still reads. Knows no files and no engine.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from headrace.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.store.state import ModelState, StateDtype, UnitState


LOOK_SECONDS = 1.0  # between two looks at a reader that is waited for


class StateSource(Protocol):
    """A state that can be read one unit at a time, in order."""

    @property
    def dtype(self) -> StateDtype:
        """Of the working weights."""

    @property
    def optimizer_step(self) -> int:
        """Updates applied."""

    @property
    def described(self) -> Sequence[UnitState]:
        """Types and shapes of all units; their values mean nothing."""

    def unit(self, index: int) -> UnitState:
        """A unit's planes, valid until :meth:`done`."""

    def done(self, index: int) -> None:
        """A unit was read."""


class Snapshot:
    """A moment of a state, from its making to :meth:`close`."""

    def __init__(
        self,
        state: ModelState,
        *,
        spare_bytes: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the moment; the state must hold every update (``Engine.synchronize``).

        Args:
            state: whose updates ask :meth:`before_update` from now on.
            spare_bytes: memory for units that are updated before they were read.
            check: called while something waits; raises when the reader is not worth waiting for.
        """
        assert state.snapshot is None, "one snapshot at a time"
        self.dtype = state.dtype
        self.optimizer_step = state.optimizer_step
        self._state = state
        self._spare = spare_bytes
        self._check = check
        self._unread = set(range(len(state.units)))
        self._copies: dict[int, UnitState] = {}
        self._reading: int | None = None
        self._given_up = False
        self._change = threading.Condition()
        state.snapshot = self

    @property
    def described(self) -> Sequence[UnitState]:
        """Types and shapes of all units."""
        return self._state.units

    def unit(self, index: int) -> UnitState:
        """A unit's planes as they were; read them, then call :meth:`done`.

        Raises:
            CheckpointError: the snapshot was given up.
        """
        with self._change:
            if self._given_up:
                raise CheckpointError("the save was given up", remedy="save again")
            self._reading = index
            return self._copies.get(index) or self._state.units[index]

    def done(self, index: int) -> None:
        """A unit was read: its update may go on."""
        with self._change:
            self._reading = None
            self._unread.discard(index)
            copied = self._copies.pop(index, None)
            if copied is not None:
                self._spare += copied.num_bytes
            self._change.notify_all()

    def before_update(self, index: int) -> None:
        """Called before a unit's planes change: copies the unit, or waits until it was read.

        Raises:
            CheckpointError: the reader stands still.
        """
        with self._change:
            if index not in self._unread or index in self._copies:
                return
            unit = self._state.units[index]
            if index != self._reading and unit.num_bytes <= self._spare:
                self._spare -= unit.num_bytes
                self._copies[index] = unit.copy()
                return
            self._wait_for(lambda: index not in self._unread)

    def wait_until_free(self) -> None:
        """Block until no update can have to wait.

        Raises:
            CheckpointError: the reader stands still.
        """
        with self._change:
            self._wait_for(self._is_free)

    def _wait_for(self, done: Callable[[], bool]) -> None:
        while not self._change.wait_for(done, timeout=LOOK_SECONDS):
            self._check()

    def _is_free(self) -> bool:
        # The unit that is being read is waited for: that takes no longer than a unit.
        left = self._unread - self._copies.keys() - {self._reading}
        return sum(self._state.units[index].num_bytes for index in left) <= self._spare

    def give_up(self) -> None:
        """Refuse to be read any further."""
        with self._change:
            self._given_up = True

    def close(self) -> None:
        """Let all updates go on; what was not read is lost."""
        with self._change:
            self._unread.clear()
            self._copies.clear()
            self._state.snapshot = None
            self._change.notify_all()
