"""Where a step's time goes, read from a trace: how long each lane worked, what compute did.

``python -m benchmarks.lanes TRACE`` prints it. A lane's seconds are those in which at least one of
its spans was open, inside the steps that the trace holds whole; what compute did not work is idle.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def summarise(trace: dict[str, Any]) -> dict[str, Any]:
    """Seconds a step: of the step, of each lane, of compute by what it did.

    Args:
        trace: as the engine writes it.
    """
    spans: dict[str, list[tuple[Interval, str]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            begun = event["ts"] / 1e6
            spans[event["cat"]].append(((begun, begun + event["dur"] / 1e6), event["name"]))
    steps = [interval for interval, _ in spans.pop("step", [])]
    if not steps:
        raise ValueError("the trace holds no step")
    window = (min(begun for begun, _ in steps), max(ended for _, ended in steps))
    length = (window[1] - window[0]) / len(steps)

    def a_step(intervals: Iterable[Interval]) -> float:
        return covered(intervals, window) / len(steps)

    kinds: dict[str, list[Interval]] = defaultdict(list)
    for interval, name in spans["compute"]:
        kinds[kind_of(name)].append(interval)
    busy = {lane: a_step(interval for interval, _ in found) for lane, found in spans.items()}
    return {
        "steps": len(steps),
        "step_seconds": length,
        "busy_seconds": busy,
        "compute_seconds": {kind: a_step(found) for kind, found in sorted(kinds.items())},
        "idle_compute_seconds": length - busy.get("compute", 0.0),
    }


def kind_of(name: str) -> str:
    """What a span of compute did: every layer's forward is one kind."""
    first, _, unit = name.partition(" ")
    return f"{first} of layers" if unit.startswith("layers.") else name


def covered(intervals: Iterable[Interval], window: Interval) -> float:
    """Seconds of ``window`` that at least one interval covers."""
    total, reached = 0.0, window[0]
    for begun, ended in sorted(intervals):
        fresh = min(ended, window[1]) - max(begun, reached)
        if fresh > 0:
            total += fresh
            reached = ended
    return total


def lines(summary: dict[str, Any], floor_seconds: float | None = None) -> list[str]:
    """A summary as a table; the floor is the model's FLOPs at the run's matmul rate."""
    step = summary["step_seconds"]

    def row(name: str, seconds: float) -> str:
        return f"  {name:<34}{1e3 * seconds:>10.1f} ms{seconds / step:>8.1%}"

    result = [f"{summary['steps']} steps of {1e3 * step:.1f} ms"]
    if floor_seconds is not None:
        result.append(row("floor: model FLOPs at matmul rate", floor_seconds))
    result += [row(f"compute: {kind}", s) for kind, s in summary["compute_seconds"].items()]
    result.append(row("compute: idle", summary["idle_compute_seconds"]))
    others = {k: v for k, v in summary["busy_seconds"].items() if k != "compute"}
    return result + [row(f"lane {lane}", seconds) for lane, seconds in sorted(others.items())]


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("python -m benchmarks.lanes TRACE", file=sys.stderr)
        return 2
    print("\n".join(lines(summarise(json.loads(Path(arguments[0]).read_text())))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
