"""Stopping on request: SIGINT and SIGTERM ask for a stop between two steps.

The invariant: the first signal never interrupts a step or a save, nor what follows the last one;
before the first step, where nothing is lost, it ends the run at once. Launchers and terminals
signal twice (a terminal's whole group gets SIGINT, torchrun and schedulers add SIGTERM), so what
comes within :data:`BURST_SECONDS` of the first is the same request; a later one stops the
process at once, without a save. Of several ranks any one's request stops all at the same step. The
handlers that were there before are put back. Exit codes are those of shells, 128 plus the signal's
number, or 75 when the run was saved and asked to be started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from headrace.errors import EXIT_OK, EXIT_REQUEUE
from headrace.interrupts import BURST_SECONDS, SIGNALS, Stopped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

    from headrace.parallel.ranks import Ranks

_TOLD = (
    f"headrace: finishing the step, then saving; a signal after {BURST_SECONDS:g} s stops at once, "
    "without a save\n"
)


class StopNow(Stopped):
    """A second request: nothing is finished and nothing is saved."""

    def __init__(self, number: signal.Signals) -> None:
        """Build from the signal that asked."""
        super().__init__(number, "stopped at once by a second signal, {}")


class StopRequest:
    """Set by the first signal while the context is entered.

    Outside the main thread Python delivers no signals; there nobody asks.

    Attributes:
        signal: for which all ranks stop, or ``None``; set by :meth:`agreed` alone.
    """

    def __init__(
        self, *, requeue: bool = False, quiet: bool = True, ranks: Ranks | None = None
    ) -> None:
        """Build a request that nobody has made yet.

        Args:
            requeue: the exit code asks to be started again.
            quiet: do not tell on stderr what the first signal does.
            ranks: that stop together.
        """
        self.signal: signal.Signals | None = None
        self.begin(requeue=requeue, quiet=quiet, ranks=ranks)
        self._asked: signal.Signals | None = None  # of this process, at any moment
        self._asked_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    @classmethod
    def before_the_first_step(cls) -> Self:
        """One whose first signal ends the run at once, until :meth:`begin`."""
        stop = cls()
        stop._begun = False
        return stop

    def begin(self, *, requeue: bool, quiet: bool, ranks: Ranks | None) -> None:
        """From now on a signal lets the step be finished; arguments as of the constructor."""
        self._requeue = requeue
        self._quiet = quiet
        self._ranks = ranks if ranks is not None and ranks.size > 1 else None
        self._begun = True

    @contextlib.contextmanager
    def spares_errors(self) -> Iterator[None]:
        """A first signal breaks into no error that leaves this block: ranks tell it each other."""
        try:
            yield
        except BaseException:
            self._begun = True
            raise

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    @property
    def exit_code(self) -> int:
        """What the process should return."""
        if self.signal is None:
            return EXIT_OK
        return EXIT_REQUEUE if self._requeue else 128 + self.signal

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; all of them must look at the same points."""
        asked = self._asked or 0  # looked at once: a signal may come while ranks exchange it
        numbers = [asked] if self._ranks is None else [n for (n,) in self._ranks.table([asked])]
        if any(numbers):
            self.signal = signal.Signals(int(next(filter(None, numbers))))
        return self.signal is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._asked is None:
            # Another rank may have been asked first: what comes here now is the same request.
            # The time first: the next signal may interrupt between any two of these lines.
            self._asked_at = time.monotonic()
            self._asked = signal.Signals(number)
            if not self._begun:  # should something swallow this, the first step will not
                raise Stopped(self._asked, "stopped by {} before the first step; nothing is saved")
            if not self._quiet:
                os.write(2, _TOLD.encode())  # nothing that could be waiting for a lock
        elif time.monotonic() - self._asked_at >= BURST_SECONDS:
            self._restore()
            raise StopNow(signal.Signals(number))

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
