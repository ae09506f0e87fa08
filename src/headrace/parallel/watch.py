"""A failure of one rank ends them all, with its reason.

Every rank tells that it lives, and looks whether another one failed or fell silent. Invariant: once
a rank has failed, every other one raises :class:`RankError` in its main thread within seconds, or,
where that thread hangs in a call that cannot be interrupted (a collective, the device), says why
and ends the process. Makes no collective call itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from headrace.errors import EXIT_FAILED, HeadraceError, LaneError, RankError

if TYPE_CHECKING:
    from types import FrameType

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 60.0
GRACE_SECONDS = 15.0
HEARD_SECONDS = 5 * BEAT_SECONDS
_SIGNAL = signal.SIGRTMIN + 1
_FAILED = "failed"


class Watch:
    """Looks after the ranks of a run from a thread of its own.

    Attributes:
        reason: why the run must end, once another rank failed; else None.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Begin to watch.

        Args:
            store: of all ranks; a connection that nobody else uses.
            rank: of this process.
            size: how many there are.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._told = False
        self._ended = threading.Event()
        self._use = threading.Lock()  # of the store
        self.reason: RankError | None = None
        self._previous: Any = None
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._previous = signal.signal(_SIGNAL, self._interrupt)
        self._thread = threading.Thread(target=self._look, name="headrace-watch", daemon=True)
        self._thread.start()

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.reason is not None and not self._told:
            self._told = True
            raise self.reason

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others of an error here; the reason to show is the first that any rank told."""
        if isinstance(error, RankError):
            return error
        # A peer that died breaks the calls of others before it is missed: its own word comes first.
        deadline = time.monotonic() + 2 * BEAT_SECONDS
        broken = isinstance(error, LaneError) or not isinstance(error, HeadraceError)
        while broken and self.reason is None and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 10)
        if self.reason is not None:
            self._told = True
            return self.reason
        told = json.dumps(
            {
                "rank": self._rank,
                "message": error.message if isinstance(error, HeadraceError) else repr(error),
                "remedy": error.remedy if isinstance(error, HeadraceError) else None,
                "exit_code": getattr(error, "exit_code", EXIT_FAILED),
            }
        )
        self._told = True
        try:
            with self._use:
                first = json.loads(self._store.compare_set(_FAILED, "", told))
                self._store.set(f"heard/{self._rank}", "")
        except (RuntimeError, ValueError):
            return error  # the store is gone, and so are the others
        self._last_resort(f"rank {self._rank}: {error}")
        if first["rank"] != self._rank:
            return _reason(first)
        self._wait_until_heard()
        return error

    def _wait_until_heard(self) -> None:
        """The store ends with the process that keeps it: the others read the reason before."""
        others = [f"heard/{rank}" for rank in range(self._size) if rank != self._rank]
        deadline = time.monotonic() + HEARD_SECONDS
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline:
                with self._use:
                    if self._store.check(others):
                        return
                time.sleep(BEAT_SECONDS / 10)

    def close(self, *, failed: bool) -> None:
        """Watch no longer; after a failure the process still ends within a bound."""
        if not failed:
            self._ended.set()
            self._thread.join(timeout=5 * BEAT_SECONDS)
        if self._in_main and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, signal.SIG_IGN if failed else self._previous)

    def _look(self) -> None:
        beats: dict[int, tuple[bytes, float]] = {}
        number = 0
        while not self._ended.wait(BEAT_SECONDS):
            number += 1
            try:
                with self._use:
                    self._store.set(f"beat/{self._rank}", str(number))
                    found = json.loads(self._store.get(_FAILED)) if self._is_set(_FAILED) else None
                    if found is not None:
                        self._store.set(f"heard/{self._rank}", "")
                    silent = self._silent(beats)
            except (RuntimeError, ValueError):
                if self._ended.is_set():
                    return
                self._end(RankError(
                    "the process that the ranks meet at is gone",
                    remedy="look at the messages of rank 0 and of the launcher",
                ))  # fmt: skip
                return
            if found is not None:
                if found["rank"] != self._rank:
                    self._end(_reason(found))
                return
            if silent is not None:
                self._end(RankError(
                    f"rank {silent} has not been heard of for {SILENCE_SECONDS:.0f} s",
                    remedy="look at its messages, and whether the system ended it (dmesg)",
                ))  # fmt: skip
                return

    def _is_set(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _silent(self, beats: dict[int, tuple[bytes, float]]) -> int | None:
        """A rank that stopped to tell that it lives."""
        now = time.monotonic()
        for rank in range(self._size):
            key = f"beat/{rank}"
            beat = self._store.get(key) if self._is_set(key) else b""
            before, since = beats.get(rank, (None, now))
            beats[rank] = (beat, since if beat == before else now)
            if now - beats[rank][1] > SILENCE_SECONDS:
                return rank
        return None

    def _end(self, reason: RankError) -> None:
        """Have the main thread raise; end the process if it cannot."""
        self.reason = reason
        if self._told:
            return
        if self._in_main:
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
        self._last_resort(str(reason))

    def _last_resort(self, message: str) -> None:
        def end() -> None:
            time.sleep(GRACE_SECONDS)
            print(f"headrace: {message}", file=sys.stderr, flush=True)
            os._exit(EXIT_FAILED)

        threading.Thread(target=end, name="headrace-last-resort", daemon=True).start()


def _reason(told: dict[str, Any]) -> RankError:
    reason = RankError(f"rank {told['rank']} failed: {told['message']}", remedy=told["remedy"])
    reason.exit_code = told["exit_code"]  # all ranks of a run return the same
    return reason
