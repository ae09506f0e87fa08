"""What a run measures: sums between logged rows, and the file they go to.

Owns ``metrics.jsonl``. The invariant: after a resume at step N the file holds exactly the rows
up to N that an undisturbed run would have written, timings apart, because sums of an unfinished
interval are part of the checkpoint and later rows of a killed run are cut off. Counts of tokens
never include padding. Does not display anything.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace.engine import StepResult


@dataclass(kw_only=True)
class Meter:
    """Sums since the beginning of the run and since the last logged row.

    Attributes:
        num_tokens: since the beginning, padding not counted.
        num_supervised_tokens: since the beginning.
        seconds: since the beginning, spent in steps; not in evaluation or saving.
        num_skipped_steps: since the beginning, steps whose gradient was not finite.
        loss_sum: nats over the interval's supervised tokens.
        loss_tokens: supervised tokens behind ``loss_sum``.
        interval_tokens: tokens of the interval.
        interval_supervised_tokens: supervised tokens of the interval.
        interval_steps: steps of the interval.
        interval_seconds: seconds of the interval.
        exposed_seconds: seconds of the interval that compute waited, by lane.
        interval_flops: model FLOPs of the interval.
    """

    num_tokens: int = 0
    num_supervised_tokens: int = 0
    seconds: float = 0.0
    num_skipped_steps: int = 0
    loss_sum: float = 0.0
    loss_tokens: int = 0
    interval_tokens: int = 0
    interval_supervised_tokens: int = 0
    interval_steps: int = 0
    interval_seconds: float = 0.0
    exposed_seconds: dict[str, float] = field(default_factory=dict)
    interval_flops: float = 0.0

    def add(
        self, result: StepResult, *, num_tokens: int, seconds: float, flops: float = 0.0
    ) -> None:
        """Count one step; ``num_tokens`` without padding, ``flops`` as ``models.flops`` counts."""
        supervised = result.num_supervised_tokens
        self.num_tokens += num_tokens
        self.num_supervised_tokens += supervised
        self.seconds += seconds
        self.num_skipped_steps += result.skipped
        if math.isfinite(result.loss):
            self.loss_sum += result.loss * supervised
            self.loss_tokens += supervised
        self.interval_tokens += num_tokens
        self.interval_supervised_tokens += supervised
        self.interval_steps += 1
        self.interval_seconds += seconds
        self.interval_flops += flops
        for lane, waited in result.exposed_seconds.items():
            self.exposed_seconds[lane] = self.exposed_seconds.get(lane, 0.0) + waited

    def row(
        self, result: StepResult, *, learning_rate: float, peaks: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """The figures of a logged row; the interval begins anew.

        The loss is the mean over the interval's supervised tokens; the norm, the learning rate and
        the experts' load are those of the last step.

        Args:
            result: of the last step.
            learning_rate: of the last step.
            peaks: FLOP/s that utilisation is a share of, by the name of that share.
        """
        seconds = max(self.interval_seconds, 1e-9)
        row = {
            "loss": self.loss_sum / self.loss_tokens if self.loss_tokens else None,
            "learning_rate": learning_rate,
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "tokens_per_second": self.interval_tokens / seconds,
            "supervised_tokens_per_second": self.interval_supervised_tokens / seconds,
            "interval_steps": self.interval_steps,
            "step_seconds": self.interval_seconds / max(1, self.interval_steps),
            "model_tflops": self.interval_flops / seconds / 1e12,
            **{name: self.interval_flops / seconds / peak for name, peak in (peaks or {}).items()},
            "num_tokens": self.num_tokens,
            "num_supervised_tokens": self.num_supervised_tokens,
            "num_skipped_steps": self.num_skipped_steps,
            "exposed_seconds": dict(self.exposed_seconds),
        } | _routing(result)
        self.loss_sum = self.interval_seconds = self.interval_flops = 0.0
        self.loss_tokens = self.interval_tokens = self.interval_supervised_tokens = 0
        self.interval_steps = 0
        self.exposed_seconds = {}
        return row

    def to_dict(self) -> dict[str, Any]:
        """JSON types; ``Meter(**d)`` restores it exactly."""
        return asdict(self)


def _routing(result: StepResult) -> dict[str, Any]:
    """What the routers of a mixture did, by layer; nothing for a dense model."""
    if not result.busiest_expert:
        return {}
    row: dict[str, Any] = {
        "busiest_expert": {str(k): round(v, 4) for k, v in result.busiest_expert.items()},
        "num_idle_experts": {str(k): v for k, v in result.num_idle_experts.items()},
    }
    if result.auxiliary_loss is not None:
        row["auxiliary_loss"] = result.auxiliary_loss
    return row


class MetricsLog:
    """Appends rows to ``metrics.jsonl``, each complete on the disk before the next step.

    Args:
        path: the file; created when absent.
        last_step: rows of later steps are removed: they are of a run that was killed after its
            last checkpoint. 0 begins the file anew.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self.path = path
        kept = [row for row in read_rows(path) if row["step"] <= last_step]
        temporary = path.with_name(f".{path.name}.writing")
        temporary.write_text("".join(map(_line, kept)), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._is_whole = True

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, a JSON object with a ``step``.

        Raises:
            OSError: it cannot be written, such as on a full disk; nothing is written later.
        """
        self._is_whole = False
        self._file.write(_line(row))
        self._file.flush()
        self._is_whole = True

    def sync(self) -> None:
        """Make every row durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def give_up(self) -> None:
        """Write nothing more: the disk does not answer."""
        self._is_whole = False

    def close(self) -> None:
        """Make every row durable and close."""
        if self._file.closed:
            return
        if self._is_whole:
            self.sync()
            self._file.close()
        else:  # the first error is the one to show, and closing would write again
            with contextlib.suppress(OSError):
                self._file.close()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; what a kill left half written at its end is no row."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break  # damage, as half a row is
        rows.append(row)
    return rows
