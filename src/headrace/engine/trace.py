"""What each lane did when, as a Chrome trace that Perfetto and chrome://tracing open.

Owns the spans of the last steps of a run and the file they are written to when the engine closes.
Invariant: nothing waits for a trace: on CUDA a span is two events on the stream that did the work,
and their times are read only after they have passed. Who has no tracer pays one comparison.

Lanes: ``compute`` (layers, embedding, head), ``h2d`` and ``d2h`` (a unit, a chunk), ``offload`` and
``reload`` (what a layer saved), ``update`` (a chunk, on the host), ``clip`` (waiting for the norm,
queueing what is left to update) and ``host``, the thread that launches compute: what it waited for,
and how long launching took.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig

KEPT_STEPS = 5  # of a run, the last ones: the first compile, and a long run's file must open
LANES = (
    "step",
    "compute",
    "h2d",
    "d2h",
    "offload",
    "reload",
    "update",
    "clip",
    "host",
)  # from top to bottom

Stamp: TypeAlias = "float | torch.cuda.Event"


@dataclass(frozen=True)
class Span:
    """A piece of work; device stamps are read against the event ``anchor`` at ``anchor_seconds``.

    Attributes:
        lane: one of :data:`LANES`.
        name: what was worked on.
        begun: host clock in seconds, or an event of the device.
        ended: likewise.
        anchor: the step in which it began.
    """

    lane: str
    name: str
    begun: Stamp
    ended: Stamp
    anchor: Anchor

    def seconds(self) -> tuple[float, float]:
        """Begin and end on the host's clock; device work must be done."""
        return self.anchor.seconds_of(self.begun), self.anchor.seconds_of(self.ended)


class Anchor:
    """A point that ties the device's clock to the host's, new every step: floats stay precise."""

    def __init__(self, before: Anchor | None, *, cuda: bool) -> None:
        """Mark the present; only the first one of a run waits for the device."""
        self._event: torch.cuda.Event | None = None
        self._before: Anchor | None = None
        self._seconds: float | None = None
        if not cuda:
            return
        self._before = before
        self._event = timed_event()
        if before is None:
            self._event.synchronize()
            self._seconds = time.perf_counter()

    def seconds_of(self, stamp: Stamp) -> float:
        """A stamp on the host's clock; device work up to it must be done."""
        if isinstance(stamp, float):
            return stamp
        assert self._event is not None, "an event of a run without a device"
        milliseconds: float = self._event.elapsed_time(stamp)
        return self.resolve() + milliseconds / 1e3

    def resolve(self) -> float:
        """This point on the host's clock; the anchor before it is let go."""
        if self._seconds is None:
            assert self._before is not None
            assert self._event is not None
            self._seconds = self._before.seconds_of(self._event)
            self._before = None
        return self._seconds

    def shorten(self) -> None:
        """Let go of what came before, if the device has passed this point: it has after a step."""
        if self._event is not None and self._event.query():  # type: ignore[no-untyped-call]  # ditto
            self.resolve()


class Tracer:
    """Collects spans from the engine's threads; :meth:`close` writes the file."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Check that ``path`` can be written, and tie the clocks.

        Raises:
            ConfigError: it cannot.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        except OSError as error:
            raise ConfigError(
                f"engine.trace: {path} cannot be written: {error.strerror}",
                remedy="name a file in a folder that can be written",
            ) from error
        self._path = path
        self._cuda = device.type == "cuda"
        self._name = torch.cuda.get_device_name(device) if self._cuda else "cpu"
        self._steps: deque[list[Span]] = deque([[]], maxlen=KEPT_STEPS)
        self.anchor = Anchor(None, cuda=self._cuda)
        self._compute: tuple[str, Stamp, float, Anchor] | None = None
        self._step: tuple[int, float] | None = None

    @classmethod
    def wanted(cls, config: EngineConfig, device: torch.device) -> Tracer | None:
        """What the configuration asks for."""
        return None if config.trace is None else cls(Path(config.trace), device)

    def begin_step(self, number: int) -> None:
        """Everything from here on belongs to the step; the last one has ended on the host."""
        self._end_step()
        self.anchor.shorten()
        self.anchor = Anchor(self.anchor, cuda=self._cuda)
        self._step = (number, time.perf_counter())
        self._steps.append([])

    def stamp(self) -> Stamp:
        """Now: on the device, in the current stream; without one, on the host."""
        return timed_event() if self._cuda else time.perf_counter()

    def add(self, lane: str, name: str, begun: Stamp, ended: Stamp, anchor: Anchor) -> None:
        """Keep a span; any thread may."""
        self._steps[-1].append(Span(lane, name, begun, ended, anchor))

    def add_host(self, lane: str, name: str, begun: float) -> None:
        """Keep a span of the host's clock that ends now."""
        self.add(lane, name, begun, time.perf_counter(), self.anchor)

    def compute(self, name: str) -> None:
        """The compute stream goes over to ``name``."""
        self.pause()
        self._compute = (name, self.stamp(), time.perf_counter(), self.anchor)

    def pause(self) -> None:
        """The compute stream is about to wait, or is done."""
        if self._compute is None:
            return
        name, begun, launched, anchor = self._compute
        self._compute = None
        self.add("compute", name, begun, self.stamp(), anchor)
        if self._cuda:
            self.add_host("host", f"launch {name}", launched)

    def _end_step(self) -> None:
        self.pause()
        if self._step is not None:
            number, begun = self._step
            self.add_host("step", f"step {number}", begun)

    def close(self) -> None:
        """Write what is kept; the lanes must have ended.

        Raises:
            HeadraceError: the file cannot be written.
        """
        self._end_step()
        self._step = None
        if self._cuda:
            torch.cuda.synchronize()
        spans = [span for step in self._steps for span in step]
        temporary = self._path.with_name(f".{self._path.name}.writing")
        try:
            temporary.write_text(json.dumps(chrome_trace(spans, self._name)), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise HeadraceError(
                f"the trace {self._path} could not be written: {error.strerror}; what was trained "
                "is not touched by that",
                remedy="free space, or write it elsewhere with engine.trace",
            ) from error


def timed_event() -> torch.cuda.Event:
    """An event of the current stream that has a time."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
    event.record()
    return event


def chrome_trace(spans: list[Span], device: str) -> dict[str, object]:
    """Spans in the Trace Event Format: complete events in microseconds, a named thread a lane."""
    timed = sorted(((*span.seconds(), span) for span in spans), key=lambda entry: entry[0])
    first = timed[0][0] if timed else 0.0
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"headrace on {device}"}}
    ]
    for number, lane in enumerate(LANES):
        thread = {"ph": "M", "pid": 0, "tid": number}
        events.append({**thread, "name": "thread_name", "args": {"name": lane}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
    for begun, ended, span in timed:
        events.append({
            "ph": "X",
            "name": span.name,
            "cat": span.lane,
            "pid": 0,
            "tid": LANES.index(span.lane),
            "ts": round(1e6 * (begun - first), 3),
            "dur": round(max(0.0, 1e6 * (ended - begun)), 3),
        })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
