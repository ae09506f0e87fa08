"""Signals that end a verb: SIGINT and SIGTERM raise once, so that whatever is open is closed.

The invariants: what one request sends twice (a terminal signals its whole group, and a launcher
adds a signal of its own) raises once; the handlers that were there before are put back. Exit codes
are those of shells, 128 plus the signal's number. Imports nothing that takes time, for a verb may
be stopped while it imports.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BURST_SECONDS = 2.0
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Stopped(KeyboardInterrupt):
    """A signal asked the process to end.

    Attributes:
        message: what happened, in a line.
        exit_code: what the process should return.
    """

    def __init__(self, number: signal.Signals, what: str = "stopped by {}") -> None:
        """Build from the signal and what it did, with ``{}`` for its name."""
        self.message = what.format(number.name)
        super().__init__(self.message)
        self.exit_code = 128 + number


def end_of(error: KeyboardInterrupt) -> tuple[str, int]:
    """What to tell people of an interrupt, and the code to return."""
    if isinstance(error, Stopped):
        return error.message, error.exit_code
    return "interrupted", 128 + signal.SIGINT


class Interrupts:
    """While the context is entered, signals that nobody else answers raise :class:`Stopped`.

    Python delivers signals to the main thread alone; in another one this does nothing.

    Attributes:
        entered: the one that answers now, if any.
    """

    entered: Interrupts | None = None

    def __init__(self) -> None:
        self._raised_at: float | None = None
        self._spares = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) in _DEFAULTS:
                    self._previous[number] = signal.signal(number, self._handle)
        Interrupts.entered = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        Interrupts.entered = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._raised_at is None or now - self._raised_at >= BURST_SECONDS:
            self._raised_at = now
            if self._spares:
                self._spares = False
                return
            raise Stopped(signal.Signals(number))

    @classmethod
    def spare_the_error(cls) -> None:
        """An error is on its way to people: the next request does not break into it.

        A launcher ends the processes that are left as soon as the first one has failed.
        """
        if (entered := cls.entered) is not None:
            entered._spares = True  # noqa: SLF001 - of this class
