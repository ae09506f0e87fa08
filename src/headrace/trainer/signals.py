"""Stopping on request: SIGINT and SIGTERM ask for a stop between two steps.

The invariant: the first signal never interrupts a step or a save, a second one does, and the
handlers that were there before are put back. Exit codes are those of shells, 128 plus the
signal's number, or 75 when the run asked to be started again.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Self

from headrace.errors import EXIT_OK, EXIT_REQUEUE

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set by the first signal while the context is entered.

    Outside the main thread Python delivers no signals; there the request is only ever set by
    :meth:`set`.

    Attributes:
        signal: the signal that asked, or ``None``.
    """

    def __init__(self, *, requeue: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self._requeue = requeue
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What the process should return."""
        if self.signal is None:
            return EXIT_OK
        return EXIT_REQUEUE if self._requeue else 128 + self.signal

    def set(self, number: signal.Signals) -> None:
        """Ask for a stop."""
        self.signal = self.signal or number

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            self._restore()
            raise KeyboardInterrupt
        self.set(signal.Signals(number))

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
