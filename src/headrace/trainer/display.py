"""What a person sees of a run: a live panel on a terminal, one line an interval elsewhere.

Owns words and layout only. The invariant: every figure shown is one that ``metrics.jsonl`` holds
or that follows from it, and what goes to a file or a pipe has no control characters. Measures
nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.units import format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 48


class Display(Protocol):
    """What the loop tells a display."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def step(self, step: int, seconds: float) -> None:
        """A step ended; ``seconds`` is its duration."""

    def row(self, row: dict[str, Any]) -> None:
        """A row was logged."""

    def close(self) -> None:
        """Nothing follows."""


def make_display(kind: str, console: Console, *, num_steps: int, title: str) -> Display:
    """The display that ``progress:`` names; ``auto`` looks at the console."""
    if kind == "none":
        return _Silent()
    if kind == "live" or (kind == "auto" and console.is_terminal):
        return _LivePanel(console, num_steps=num_steps, title=title)
    return _Lines(console, num_steps=num_steps)


def describe(row: dict[str, Any], num_steps: int) -> str:
    """One line for a logged row; figures that the row lacks are left out."""
    parts = [f"step {row['step']}/{num_steps}"]
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.4f}")
    if row.get("eval_loss") is not None:
        parts.append(f"eval loss {row['eval_loss']:.4f}")
    if "learning_rate" in row:
        norm = row["grad_norm"]
        parts.append(f"lr {row['learning_rate']:.2e}")
        parts.append("gradient not finite" if norm is None else f"gradient norm {norm:.3f}")
        parts.append(f"{format_count(row['tokens_per_second'])} tokens/s")
        if exposed := describe_exposed(row):
            parts.append(exposed)
        if row["num_skipped_steps"]:
            parts.append(f"{row['num_skipped_steps']} skipped")
    return "  ".join(parts)


def describe_exposed(row: dict[str, Any]) -> str:
    """The lane that compute waited for most, as a share of the interval; empty below 1%."""
    waits = {lane: seconds for lane, seconds in row["exposed_seconds"].items() if seconds > 0}
    rate = row["tokens_per_second"]
    if not waits or not rate or not row["step_seconds"]:
        return ""
    lane = max(waits, key=lambda name: waits[name])
    interval = row["step_seconds"] * row["interval_steps"]
    share = waits[lane] / interval
    return f"waits {share:.0%} for {lane}" if share >= 0.01 else ""


class _Silent:
    def say(self, text: str) -> None:
        pass

    def step(self, step: int, seconds: float) -> None:
        pass

    def row(self, row: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, seconds: float) -> None:
        pass

    def row(self, row: dict[str, Any]) -> None:
        left = (self._num_steps - row["step"]) * row.get("step_seconds", 0.0)
        eta = f"  {format_duration(left)} left" if left else ""
        self.say(describe(row, self._num_steps) + eta)

    def close(self) -> None:
        pass


def sparkline(values: list[float]) -> str:
    """Values as bars of eight heights."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in finite)


class _LivePanel:
    def __init__(self, console: Console, *, num_steps: int, title: str) -> None:
        self._num_steps = num_steps
        self._title = title
        self._step = 0
        self._pace: float | None = None
        self._row: dict[str, Any] = {}
        self._eval: dict[str, float] = {}
        self._losses: list[float] = []
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, transient=False
        )
        self._live.start()

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def step(self, step: int, seconds: float) -> None:
        self._step = step
        # About the last ten steps: recent enough to follow a change, long enough to be calm.
        self._pace = seconds if self._pace is None else 0.9 * self._pace + 0.1 * seconds

    def row(self, row: dict[str, Any]) -> None:
        self._step = row["step"]
        if "learning_rate" in row:
            self._row = row
            if row["loss"] is not None:
                self._losses = [*self._losses, row["loss"]][-_HISTORY:]
        self._eval |= {key: value for key, value in row.items() if key.startswith("eval_loss")}

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        left = self._pace * (self._num_steps - self._step) if self._pace else None
        bar.add_row(
            f"step {self._step}/{self._num_steps}",
            ProgressBar(total=self._num_steps, completed=self._step),
            f"{format_duration(left)} left" if left is not None else "first step",
        )
        return Panel(Group(bar, *self._figures()), title=Text(self._title), title_align="left")

    def _figures(self) -> list[RenderableType]:
        grid = Table.grid(padding=(0, 3))
        row = self._row
        if not row:
            return []
        norm = row["grad_norm"]
        loss = "none" if row["loss"] is None else f"{row['loss']:.4f}"
        cells = {
            "loss": loss,
            "learning rate": f"{row['learning_rate']:.2e}",
            "gradient norm": "not finite" if norm is None else f"{norm:.3f}",
            "tokens/s": format_count(row["tokens_per_second"]),
            "tokens": format_count(row["num_tokens"]),
            **{
                key.replace("_", " "): f"{value:.4f}"
                for key, value in self._eval.items()
                if value is not None
            },
        }
        if row["num_skipped_steps"]:
            cells["skipped"] = str(row["num_skipped_steps"])
        grid.add_row(*(Text(name, style="dim") for name in cells))
        grid.add_row(*(Text(value, style="bold") for value in cells.values()))
        waits = describe_exposed(row)
        return [grid, Text(f"{sparkline(self._losses)}  {waits}")]
