"""How an audit uses the cores.

Owns one choice: linear algebra runs on one thread, and independent pieces of work (twins,
training sets, systems of equations) run side by side, a thread a core. A BLAS pool shares each
product among the cores and waits for the next one by spinning: 19 twins of 512 dimensions took
165 s of processor time with two BLAS threads and 87 s with one (benchmarks/audit_speed.py). The
invariants: results come in the order of the pieces, and what a piece is never depends on the
number of cores, so figures do not either. Pieces are worth a thread from 512 dimensions on; of
narrower matrices the interpreter's lock would take back what a second core gives.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")

_WIDE = 512
_MOST_WORKERS = 8  # each holds matrices of its own: 0.2 GiB at 2,048 dimensions

_here = threading.local()


def num_workers() -> int:
    """Threads that work side by side."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, _MOST_WORKERS)


@contextmanager
def single_blas() -> Iterator[None]:
    """One BLAS thread for each thread of ours, until the block ends.

    The limit is the process's, not the thread's: inside a worker it is set already, and putting
    it back there would take it from the other workers.
    """
    if getattr(_here, "limited", False):
        yield
        return
    with threadpool_limits(limits=1, user_api="blas"):
        _here.limited = True
        try:
            yield
        finally:
            _here.limited = False


def spread(
    work: Callable[[_Piece], _Result], pieces: Sequence[_Piece], *, dimension: int
) -> Iterator[_Result]:
    """``work(piece)`` of each piece, in their order, side by side where that pays.

    Few results wait at a time, so a slow consumer needs no memory for all of them. Inside a
    piece of another call the work is done in place: cores are shared out once.

    Args:
        work: is called from several threads; must not depend on the order of the calls.
        pieces: what it is called with.
        dimension: of the matrices that are multiplied or decomposed.
    """
    workers = min(num_workers(), len(pieces))
    if workers < 2 or dimension < _WIDE or getattr(_here, "working", False):
        for piece in pieces:
            yield work(piece)
        return

    def guarded(piece: _Piece) -> _Result:
        _here.working = _here.limited = True
        return work(piece)

    waiting: deque[Future[_Result]] = deque()
    with single_blas(), ThreadPoolExecutor(workers, thread_name_prefix="audit") as pool:
        try:
            for piece in pieces:
                waiting.append(pool.submit(guarded, piece))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
