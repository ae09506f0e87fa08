"""Work spread over processes, one unit a time each; results in the order of the jobs.

Workers come from a fork server: a process without threads that imports what all of them need
once, so that a worker starts in milliseconds. This process itself is never forked, no worker
outlives it, and none runs its script again: a script needs no ``if __name__ == "__main__"``.
With one worker everything runs in this process, which is what small corpora and tests want.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import types
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headrace.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_Job = TypeVar("_Job")


class Pool(Protocol):
    """Runs jobs somewhere; :class:`Workers` here, a cluster in :mod:`headrace.corpus.blocks`."""

    def each(self, function: Callable[[_Job], Any], jobs: Iterable[_Job]) -> Iterator[_Job]:
        """Run ``function`` on every job and hand each job back when it is done, in order."""
        ...


class Workers:
    """A function over jobs; ``prepare`` runs once in every worker."""

    def __init__(self, executor: ProcessPoolExecutor | None, num_workers: int) -> None:
        """Use :func:`workers`, which also cleans up."""
        self._executor = executor
        self._num_workers = num_workers

    def each(self, function: Callable[[_Job], Any], jobs: Iterable[_Job]) -> Iterator[_Job]:
        """Run ``function`` on every job and hand each job back when it is done, in order.

        Raises:
            CapacityError: a worker was killed, as the kernel does when memory is short.
        """
        if self._executor is None:
            for job in jobs:
                function(job)
                yield job
            return
        waiting: deque[tuple[_Job, Future[Any]]] = deque()
        try:
            for job in jobs:
                waiting.append((job, self._executor.submit(function, job)))
                if len(waiting) >= 3 * self._num_workers:
                    yield self._finished(waiting)
            while waiting:
                yield self._finished(waiting)
        finally:
            for _, future in waiting:
                future.cancel()

    @staticmethod
    def _finished(waiting: deque[tuple[_Job, Future[Any]]]) -> _Job:
        job, future = waiting.popleft()
        try:
            future.result()
        except BrokenProcessPool as error:
            raise CapacityError(
                "a worker process was killed, most likely for memory",
                remedy="lower num_workers or max_document_bytes; what is done is kept",
            ) from error
        return job


class _Process(multiprocessing.context.ForkServerProcess):
    """A process that is not told of the script of this one, which it would run."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - the library's name
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return multiprocessing.context.ForkServerProcess._Popen(process_obj)  # noqa: SLF001 - to override
        finally:
            sys.modules["__main__"] = main


class _Context(multiprocessing.context.ForkServerContext):
    Process = _Process


def warm_up(*modules: str) -> None:
    """Let the fork server start and import ``modules``; returns at once.

    A server that runs already stays as it is: its workers import what they miss.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *modules])
    multiprocessing.forkserver.ensure_running()


@contextmanager
def workers(num_workers: int, prepare: Callable[..., None], *arguments: Any) -> Iterator[Workers]:
    """Workers for the length of a block; ``prepare(*arguments)`` is called in each."""
    if num_workers == 1:
        prepare(*arguments)
        yield Workers(None, 1)
        return
    context = _Context()
    # Only this process holds the writing end: the kernel closes it however this process ends.
    ours_to_read, ours_to_close = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(
        num_workers,
        mp_context=context,
        initializer=_begin,
        initargs=(ours_to_read, prepare, arguments),
    )
    try:
        yield Workers(executor, num_workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        ours_to_close.close()
        ours_to_read.close()


def _begin(
    parent: multiprocessing.connection.Connection,
    prepare: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """In a worker: tie its life to the parent's, then prepare it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    prepare(*arguments)


def _die_with(parent: multiprocessing.connection.Connection) -> None:
    """Wait for the end of ``parent``, to which nothing is ever sent, and end this process.

    A worker that outlives a killed build would write beside the next one.
    """
    parent.poll(None)
    os.kill(os.getpid(), signal.SIGKILL)


def default_num_workers() -> int:
    """The processors this process may run on."""
    return len(os.sched_getaffinity(0))
