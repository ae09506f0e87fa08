"""A failure of one rank ends them all, with its reason.

Every rank tells that it lives, and looks whether another one failed or fell silent. Invariant: once
a rank has failed, every other one raises :class:`RankError` in its main thread within seconds, or,
where that thread hangs in a call that cannot be interrupted (a collective, the device), says why
and ends the process. A rank that left without a word, as one that was killed, is named, with where
the run stood and how to go on. Makes no collective call itself.
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

import torch.distributed as dist

from headrace.errors import HeadraceError, LaneError, RankError, exit_code_of
from headrace.interrupts import Interrupts, end_of

if TYPE_CHECKING:
    from types import FrameType

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 60.0
SUSPECT_SECONDS = 4 * BEAT_SECONDS  # of silence, beside a broken connection
NAMED_SECONDS = SUSPECT_SECONDS + 4 * BEAT_SECONDS  # until the silent rank must have been found
GRACE_SECONDS = 15.0
HEARD_SECONDS = 5 * BEAT_SECONDS
_SIGNAL = signal.SIGRTMIN + 1
_FAILED = "failed"


class Watch:
    """Looks after the ranks of a run from a thread of its own.

    Attributes:
        reason: why the run must end, once another rank or a thread of this one failed; else None.
        where: the run stands, as in ``"in step 7"``; None before its first step.
        how_to_go_on: a command or key that does, for the remedy.
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
        self.where: str | None = None
        self.how_to_go_on = "start the run again"
        self._told = False  # the main thread, or it tells of an error of its own
        self._settled = False
        self._suspects = False
        self._ends = False  # within a bound
        self._lost: int | None = None
        self._ended = threading.Event()
        self._use = threading.Lock()  # of the store
        self.reason: BaseException | None = None
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

    def lost(self, error: BaseException) -> BaseException:
        """Why a call to other ranks broke: what one of them told, or which of them is gone."""
        self._suspects = True
        deadline = time.monotonic() + NAMED_SECONDS
        while self.reason is None and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 10)
        text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return self.reason or RankError(
            f"the connection to another rank broke {self._where}: {text}",
            remedy=f"look at the network between the machines; {self.how_to_go_on}",
        )

    @property
    def _where(self) -> str:
        return self.where or "while the run was prepared"

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others of an error here; the reason to show is the first that any rank told."""
        self._told = True
        Interrupts.spare_the_error()
        if _is_connection(error):
            error = self.lost(error)
        # A peer that died breaks the calls of others before it is missed: its own word comes first.
        deadline = time.monotonic() + 2 * BEAT_SECONDS
        broken = isinstance(error, LaneError) or not isinstance(
            error, (HeadraceError, KeyboardInterrupt, SystemExit)
        )
        while broken and self.reason is None and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 10)
        self._settled = True  # what the store says from now on, or that it is gone, comes too late
        reason: BaseException | None = self.reason
        if reason is None:
            try:
                first = self._tell(error)
            except (RuntimeError, ValueError):
                return error  # the store is gone, and so are the others
            reason = error if first["rank"] == self._rank else _reason(first)
        self._last_resort(reason)
        if reason is error or self._rank == 0:
            self._wait_until_heard()
        return reason

    def thread_failed(self, error: BaseException) -> None:
        """Tell all ranks of an error in another thread than the main one, which raises it.

        The main thread may wait, in a collective, for a rank that waits for that thread.
        """
        if self._told:  # it is ending already
            return
        with contextlib.suppress(RuntimeError, ValueError):  # the store is gone, and is missed
            self._tell(error)
            self._end(error)

    def raises(self) -> None:
        """The main thread is about to raise; nothing else needs to make it."""
        self._told = True

    def _tell(self, error: BaseException, *, lost: int | None = None) -> dict[str, Any]:
        """Tell all ranks of an error, of this one or of a lost one; what was told first counts."""
        known = error if isinstance(error, HeadraceError) else None
        message = known.message if known else repr(error)
        if isinstance(error, KeyboardInterrupt):
            message, _ = end_of(error)
        # What a run was refused for is for people to change, and a signal is their own: they read
        # it once.
        refused = known is not None and self.where is None and lost is None
        told = {
            "rank": self._rank,
            "lost": lost,
            "message": message,
            "remedy": known.remedy if known else None,
            "exit_code": exit_code_of(error),
            "said": refused or isinstance(error, KeyboardInterrupt),
        }
        with self._use:
            first: dict[str, Any] = json.loads(
                self._store.compare_set(_FAILED, "", json.dumps(told))
            )
            self._store.set(f"heard/{self._rank}", "")
        return first

    def _wait_until_heard(self) -> None:
        """The store ends with the process that keeps it: the others read the reason before."""
        gone = {self._rank, self._lost}
        others = [f"heard/{rank}" for rank in range(self._size) if rank not in gone]
        deadline = time.monotonic() + HEARD_SECONDS
        with contextlib.suppress(RuntimeError):
            while others and time.monotonic() < deadline:
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
                    silent = None if found is not None else self._silent(beats)
                if silent is not None:
                    found = self._tell(self._missed(*silent), lost=silent[0])
            except (RuntimeError, ValueError):
                if not self._ended.is_set():
                    self._end(self._no_store())
                return
            if found is not None:
                self._lost = found["lost"]
                if self._lost is not None or found["rank"] != self._rank:
                    self._end(_reason(found))
                return

    def _missed(self, rank: int, seconds: float) -> RankError:
        return RankError(
            f"rank {rank} left the run {self._where}: its last sign of life is {seconds:.0f} s old",
            remedy=f"look at its messages, and whether the system ended it (dmesg); "
            f"{self.how_to_go_on}",
        )

    def _no_store(self) -> RankError:
        """The process that keeps the store is gone: the launcher's, or rank 0."""
        launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        gone = "the launcher" if launcher else "rank 0"
        return RankError(
            f"{gone}, which the ranks meet at, left the run {self._where}",
            remedy="look at its messages, and whether the system ended it (dmesg); "
            f"{self.how_to_go_on}",
        )

    def _is_set(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _silent(self, beats: dict[int, tuple[bytes, float]]) -> tuple[int, float] | None:
        """A rank that stopped to tell that it lives, and for how many seconds."""
        now = time.monotonic()
        for rank in range(self._size):
            key = f"beat/{rank}"
            beat = self._store.get(key) if self._is_set(key) else b""
            before, since = beats.get(rank, (None, now))
            beats[rank] = (beat, since if beat == before else now)
        rank = min(beats, key=lambda rank: beats[rank][1])
        silence = now - beats[rank][1]
        limit = SUSPECT_SECONDS if self._suspects else SILENCE_SECONDS
        return (rank, silence) if silence > limit else None

    def _end(self, reason: BaseException) -> None:
        """Have the main thread raise; end the process if it cannot."""
        if not self._settled:
            self.reason = reason
        if self._told:
            return
        if self._in_main:
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
        self._last_resort(reason)

    def _last_resort(self, error: BaseException) -> None:
        if self._ends:
            return
        self._ends = True

        def end() -> None:
            time.sleep(GRACE_SECONDS)
            if not getattr(error, "said", False):
                print(f"headrace: rank {self._rank}: {error}", file=sys.stderr, flush=True)
            os._exit(exit_code_of(error))

        threading.Thread(target=end, name="headrace-last-resort", daemon=True).start()


def _reason(told: dict[str, Any]) -> RankError:
    message = told["message"]
    if told["lost"] is None:
        message = f"rank {told['rank']} failed: {message}"
    reason = RankError(message, remedy=told["remedy"])
    reason.exit_code = told["exit_code"]  # all ranks of a run return the same
    reason.said = told["said"]
    return reason


def _is_connection(error: BaseException) -> bool:
    """Whether it, or what a lane failed for, is a broken call to other ranks."""
    return any(isinstance(one, dist.DistError) for one in (error, error.__cause__))
