"""Lanes: ordered queues of work beside compute, each with a thread and, on CUDA, a stream.

Invariants: jobs of a lane run in the order they were submitted; a job starts after everything it
was told to wait for; an exception in any job reaches the caller at its next wait, and every later
job of that lane is dropped; nothing waits without a bound. On the CPU a job is done when its
function returned; on CUDA when, besides, the work it enqueued on the lane's stream is done.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.engine.trace import timed_event
from headrace.errors import HeadraceError, LaneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace.engine.trace import Tracer


@dataclass(frozen=True)
class Mark:
    """A point in the compute stream that lanes can wait for; free on the CPU."""

    event: torch.cuda.Event | None

    @classmethod
    def here(cls, device: torch.device) -> Mark:
        """Mark everything enqueued on the current stream so far."""
        if device.type != "cuda":
            return cls(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        event.record()
        return cls(event)

    def wait_on_stream(self) -> None:
        """Order the current stream after this point."""
        if self.event is not None:
            self.event.wait()

    def synchronize(self) -> None:
        """Block the host until the point is reached."""
        if self.event is not None:
            self.event.synchronize()


class Ticket:
    """Completion of a lane job."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._future: Future[torch.cuda.Event | None] = Future()
        self.work_started: float | None = None  # host clock, when the job stopped waiting
        self.begun: torch.cuda.Event | None = None  # on CUDA, when its device work began

    def _finish(self, event: torch.cuda.Event | None) -> None:
        self._future.set_result(event)

    def _fail(self, error: BaseException) -> None:
        self._future.set_exception(error)

    def _result(self) -> torch.cuda.Event | None:
        try:
            return self._future.result(timeout=self._lane.timeout_seconds)
        except FutureTimeoutError:
            raise LaneError(
                f"the {self._lane.name} lane did not finish within "
                f"{self._lane.timeout_seconds:.0f} s",
                remedy="look for a stalled disk or device; engine.lane_timeout_seconds is the "
                "bound",
            ) from None
        except HeadraceError:
            raise
        except Exception as error:
            raise LaneError(
                f"the {self._lane.name} lane failed: {type(error).__name__}: {error}",
                remedy="the state may hold a part of this step: go on from the last checkpoint",
            ) from error

    def wait_on_stream(self) -> None:
        """Block the host until the job ran, and the current stream until its work is done."""
        event = self._result()
        if event is not None:
            event.wait()

    def synchronize(self) -> None:
        """Block the host until the job and its device work are done."""
        event = self._result()
        if event is not None:
            event.synchronize()


class Lane:
    """One ordered queue of work."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        timeout_seconds: float,
        jitter: Callable[[], float] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Start the lane's thread.

        Args:
            name: used in messages and traces.
            device: the compute device; a CUDA lane owns a stream on it.
            timeout_seconds: the bound of every wait.
            jitter: seconds to sleep before each job (race checks), or None.
            tracer: told of every job, or None.
        """
        self.name = name
        self.timeout_seconds = timeout_seconds
        self._device = device
        self._jitter = jitter
        self._tracer = tracer
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as above
        self._jobs: queue.SimpleQueue[
            tuple[Ticket, tuple[Ticket | Mark, ...], Callable[[], None], str] | None
        ] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"headrace-{name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        work: Callable[[], None],
        after: Iterable[Ticket | Mark | None] = (),
        *,
        label: str = "",
    ) -> Ticket:
        """Queue ``work`` to run once everything in ``after`` is done; traces show ``label``."""
        ticket = Ticket(self)
        waits = tuple(item for item in after if item is not None)
        self._jobs.put((ticket, waits, work, label))
        return ticket

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout=self.timeout_seconds)

    def _run(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._device)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            self._error = error
        while (job := self._jobs.get()) is not None:
            ticket, waits, work, label = job
            if self._error is not None:
                ticket._fail(self._error)  # noqa: SLF001 - one class in two halves
                continue
            try:
                ticket._finish(self._carry_out(ticket, waits, work, label))  # noqa: SLF001 - as above
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                self._error = error
                ticket._fail(error)  # noqa: SLF001 - one class in two halves
            del job, ticket, waits, work  # let buffers go before waiting for the next job

    def _carry_out(
        self,
        ticket: Ticket,
        waits: tuple[Ticket | Mark, ...],
        work: Callable[[], None],
        label: str,
    ) -> torch.cuda.Event | None:
        if self._stream is None:
            for item in waits:
                item.wait_on_stream()
            self._delay()
            ticket.work_started = time.perf_counter()
            with torch.no_grad():
                work()
            if self._tracer is not None:
                self._tracer.add_host(self.name, label, ticket.work_started)
            return None
        with torch.cuda.stream(self._stream), torch.no_grad():
            for item in waits:
                item.wait_on_stream()
            self._delay()
            ticket.work_started = time.perf_counter()
            anchor = None if self._tracer is None else self._tracer.anchor
            begun = ticket.begun = timed_event()
            work()
            ended = timed_event()
            if self._tracer is not None and anchor is not None:
                self._tracer.add(self.name, label, begun, ended, anchor)
            return ended

    def _delay(self) -> None:
        if self._jitter is not None:
            time.sleep(self._jitter())


def indexed_device(device: torch.device) -> torch.device:
    """``cuda`` with its number: lanes of other threads must name the same one."""
    if device.type != "cuda":
        return device
    index = device.index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def random_delay(seconds: float) -> Callable[[], float] | None:
    """A jitter of up to ``seconds`` for :class:`Lane`, or None for none."""
    if seconds <= 0:
        return None
    rng = random.Random(0)  # noqa: S311 - delays, not secrets
    return lambda: rng.uniform(0.0, seconds)
