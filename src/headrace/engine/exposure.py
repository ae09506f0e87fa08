"""How long compute waited, and for which lane.

Invariant: on CUDA the time is that of the compute stream, between two events around each wait, and
is read only after they have passed, so that measuring waits for nothing. On the CPU compute is the
calling thread, and its clock is the measure. Only what a step waits for counts, not evaluation.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.trace import timed_event

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from headrace.engine.slots import GradientSlot, Slot
    from headrace.engine.trace import Tracer


@dataclass(frozen=True)
class Stall:
    """One wait of the compute stream.

    Attributes:
        lane: that it waited for.
        begun: the stream came to the wait.
        ended: it went on.
        copying: for weights, the copy began; what was spent before was the unit's update.
    """

    lane: str
    begun: torch.cuda.Event
    ended: torch.cuda.Event
    copying: torch.cuda.Event | None = None

    def parts(self) -> dict[str, float]:
        """Seconds by lane; every event must have passed."""
        seconds = self.begun.elapsed_time(self.ended) / 1e3
        if self.copying is None:
            return {self.lane: seconds}
        updating = min(max(self.begun.elapsed_time(self.copying) / 1e3, 0.0), seconds)
        return {"update": updating, self.lane: seconds - updating}


class Exposure:
    """Seconds that compute waited, by lane, in the step that runs or ran last."""

    def __init__(self, device: torch.device, tracer: Tracer | None = None) -> None:
        self.seconds = dict.fromkeys(("h2d", "update", "d2h", "offload"), 0.0)
        self.tracer = tracer
        self._cuda = device.type == "cuda"
        self._stalls: list[Stall] = []
        self._in_step = False

    def begin_step(self, number: int) -> None:
        """Count from here on."""
        if self.tracer is not None:
            self.tracer.begin_step(number)
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self._stalls.clear()
        self._in_step = True

    def end_compute(self) -> None:
        """Add up what the step's compute waited for; the compute stream must have passed it."""
        for stall in self._stalls:
            for lane, seconds in stall.parts().items():
                self.seconds[lane] += seconds
        self._stalls.clear()
        self._in_step = False

    def wait(self, slot: Slot) -> None:
        """Wait until a weight slot is filled."""
        if slot.ready is None or slot.sent is None:  # the unit's own weights
            return
        begun = self._stamp()
        started = time.perf_counter()
        slot.ready.wait_on_stream()
        if begun is not None:
            self._stalls.append(Stall("h2d", begun, timed_event(), slot.sent.begun))
        elif self._in_step:
            ended = time.perf_counter()
            # What was spent before the copy could start was spent on the unit's update.
            copying = min(max(slot.sent.work_started or started, started), ended)
            self.seconds["update"] += copying - started
            self.seconds["h2d"] += ended - copying
        if self.tracer is not None:
            self.tracer.add_host("host", "wait for weights", started)

    def reuse(self, slot: GradientSlot) -> GradientSlot:
        """Wait until a gradient slot was returned, so that it may be overwritten."""
        if slot.returned is not None:
            with self.waiting("d2h", "a gradient slot"):
                slot.returned.wait_on_stream()
            slot.returned = None
        return slot

    @contextlib.contextmanager
    def waiting(self, lane: str, what: str = "") -> Iterator[None]:
        """Account what happens inside to a lane; ``what`` names it in a trace."""
        begun = self._stamp()
        started = time.perf_counter()
        yield
        if begun is not None:
            self._stalls.append(Stall(lane, begun, timed_event()))
        elif self._in_step:
            self.seconds[lane] += time.perf_counter() - started
        if self.tracer is not None:
            self.tracer.add_host("host", f"wait for {what or lane}", started)

    def _stamp(self) -> torch.cuda.Event | None:
        """Where the compute stream begins to wait; None where the host's clock says it."""
        return timed_event() if self._cuda and self._in_step else None
