"""How the models were trained: curve, speed, and the facts of each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.report.figures import curves, theme
from headrace.report.page import Block, Note, Section, Table, picture
from headrace.report.text import MISSING, count, number
from headrace.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.report.records import Node, Run


def training(runs: Sequence[Run]) -> Section:
    """The section for any number of runs, none included."""
    if not runs:
        note = Note(kind="missing", text="No training run was given, so no curve is drawn.")
        return Section(name="training", title="Training", short="Training", blocks=[note])
    blocks: list[Block] = []
    losses = [line for index, run in enumerate(runs) if (line := _loss(run, index)) is not None]
    if losses:
        blocks.append(
            picture(
                "loss",
                lambda width, identity: curves.draw(
                    losses, width, identity, "Training loss",
                    y_title="loss per token, nats", x_title="optimizer step",
                ),
                "Training loss as logged"
                + ("; open circles are the evaluation loss." if _any_eval(runs) else "."),
                data={line.name: [list(line.x), list(line.y)] for line in losses},
            )
        )  # fmt: skip
    speeds = [line for index, run in enumerate(runs) if (line := _speed(run, index)) is not None]
    if speeds:
        blocks.append(
            picture(
                "speed",
                lambda width, identity: curves.draw(
                    speeds, width, identity, "Training speed",
                    y_title="tokens per second", x_title="optimizer step", height=170,
                    from_zero=True,
                ),
                "Tokens per second over each logged interval; padding is not counted.",
                data={line.name: [list(line.x), list(line.y)] for line in speeds},
            )
        )  # fmt: skip
    blocks += [
        Note(kind="missing", text=f"{run.name} logged no steps, so it has no curve.")
        for run in runs
        if not run.metrics
    ]
    blocks += filter(None, map(_outcome, runs))
    blocks.append(_facts(runs))
    exposed = _exposed(runs)
    if exposed is not None:
        blocks.append(exposed)
    return Section(name="training", title="Training", short="Training", blocks=blocks)


def _any_eval(runs: Sequence[Run]) -> bool:
    return any("eval_loss" in row for run in runs for row in run.metrics)


def _series(run: Run, key: str) -> tuple[list[float], list[float]]:
    x, y = [], []
    for row in run.metrics:
        step, value = row.number("step"), row.number(key)
        if step is not None and value is not None:
            x.append(step)
            y.append(value)
    return x, y


def _loss(run: Run, index: int) -> curves.Line | None:
    x, y = _series(run, "loss")
    if not x:
        return None
    points_x, points_y = _series(run, "eval_loss")
    return curves.Line(
        name=run.name,
        x=x,
        y=y,
        points_x=points_x,
        points_y=points_y,
        colour=theme.series_colour(index),
    )


def _speed(run: Run, index: int) -> curves.Line | None:
    x, y = _series(run, "tokens_per_second")
    return curves.Line(name=run.name, x=x, y=y, colour=theme.series_colour(index)) if x else None


def _last(run: Run, key: str) -> float | None:
    values = _series(run, key)[1]
    return values[-1] if values else None


def _facts(runs: Sequence[Run]) -> Table:
    labels: tuple[tuple[str, Callable[[Run], str]], ...] = (
        ("Model", lambda run: run.record.text("architecture", MISSING)),
        ("Weights held as", lambda run: run.record.text("dtype", MISSING)),
        ("Parameters", lambda run: _count(run.record.number("num_parameters"))),
        ("Trained parameters", _trained),
        ("State (weights, moments)", lambda run: _bytes(run.record.number("state_bytes"))),
        ("Optimizer steps", lambda run: _exact(_last(run, "step"))),
        ("Tokens", lambda run: _exact(_last(run, "num_tokens"))),
        ("Supervised tokens", lambda run: _exact(_last(run, "num_supervised_tokens"))),
        ("Last training loss", lambda run: number(_last(run, "loss"))),
        ("Last evaluation loss", lambda run: number(_last(run, "eval_loss"))),
        ("Tokens per second, median", lambda run: _exact(_median(run, "tokens_per_second"))),
        ("Duration, all sessions", lambda run: _duration(run.record)),
        ("Peak host memory", lambda run: _bytes(run.record.number("peak_rss_bytes"))),
        ("Skipped steps", lambda run: _exact(run.record.number("num_skipped_steps"))),
        ("Processor", _processor),
        ("Hash of the weights", lambda run: _short(run.record.text("model_hash", ""))),
    )
    rows = []
    for label, read in labels:
        cells = [read(run) for run in runs]
        if any(cell != MISSING for cell in cells):
            rows.append([label, *cells])
    return Table(
        name="runs",
        columns=("", *(run.name for run in runs)),
        rows=rows,
        numeric=frozenset(range(1, len(runs) + 1)),
    )


def _count(value: float | None) -> str:
    return MISSING if value is None else format_count(value)


def _exact(value: float | None) -> str:
    return MISSING if value is None else count(value)


def _bytes(value: float | None) -> str:
    return MISSING if value is None else format_bytes(value)


def _short(text: str) -> str:
    return text[:12] if text else MISSING


def _median(run: Run, key: str) -> float | None:
    values = sorted(_series(run, key)[1])
    return values[len(values) // 2] if values else None


def _duration(record: Node) -> str:
    seconds = record.number("seconds")
    return MISSING if seconds is None else format_duration(seconds)


def _trained(run: Run) -> str:
    """Said where they are not all: of adapters, with their rank."""
    trained = run.record.number("num_trained_parameters")
    if trained is None or trained == run.record.number("num_parameters"):
        return MISSING
    adapters = run.record.maybe("adapters")
    return format_count(trained) + (
        "" if adapters is None else f", adapters of rank {adapters.integer('rank')}"
    )


def _processor(run: Run) -> str:
    hardware = run.record.maybe("hardware")
    if hardware is None:
        return MISSING
    gpu, cpu = hardware.text("gpu", ""), hardware.text("cpu", "")
    cores = hardware.number("num_cores")
    host = f"{cpu}, {count(cores)} cores" if cores is not None else cpu
    return gpu or host or MISSING


def _outcome(run: Run) -> Note | None:
    status = run.record.text("status", "finished")
    if status == "finished":
        return None
    last = _last(run, "step")
    done = f" after {count(last)} steps" if last is not None else ""
    return Note(kind="failed", text=f"Training of {run.name} is not finished: {status}{done}.")


def _exposed(runs: Sequence[Run]) -> Table | None:
    totals: list[dict[str, float]] = []
    for run in runs:
        total: dict[str, float] = {}
        for row in run.metrics:
            waits = row.maybe("exposed_seconds")
            for lane in waits.names() if waits is not None else ():
                assert waits is not None
                total[lane] = total.get(lane, 0.0) + (waits.number(lane) or 0.0)
        totals.append(total)
    lanes = sorted({lane for total in totals for lane in total})
    if not lanes:
        return None
    return Table(
        name="exposed",
        columns=("Exposed time", *(run.name for run in runs)),
        rows=[[lane, *(f"{total.get(lane, 0.0):.2f} s" for total in totals)] for lane in lanes],
        numeric=frozenset(range(1, len(runs) + 1)),
        caption="Seconds that compute waited for a lane, summed over the logged steps.",
    )
