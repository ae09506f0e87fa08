"""Runs cases one after another, each in a process of its own with a bound, and keeps every result.

Invariant: a case that fails, hangs or is killed loses nothing but itself; the results' file is
complete after every case. Memory of host and device starts empty for each. This module measures
nothing and knows no case.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

LEAST_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement.

    Attributes:
        name: what ``--cases`` selects by and tables look up.
        kind: which function runs it.
        arguments: of that function, as JSON.
        seconds: what it takes on the machine it is meant for; it is not begun with less left.
        limit: seconds after which it is ended.
    """

    name: str
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float = 60
    limit: float = 300


Record = dict[str, Any]


def run_cases(
    cases: Iterable[Case],
    *,
    command: Sequence[str],
    out: Path,
    budget_seconds: float | None = None,
    earlier: Sequence[Record] = (),
    show: Callable[[Record], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Record]:
    """Run ``cases`` and write ``out`` after each.

    Args:
        cases: in order of importance.
        command: gets a case as JSON behind it and prints results as JSON lines, the last counts.
        out: the results' file.
        budget_seconds: of the whole run; cases that would not fit are skipped, and say so.
        earlier: records of other runs, kept; a case that runs again replaces its own.
        show: called with each new record.
        clock: of the budget.
    """
    run, begun = time.strftime("%Y-%m-%dT%H:%M:%S"), clock()
    records = list(earlier)
    for case in cases:
        left = None if budget_seconds is None else budget_seconds - (clock() - begun)
        started = clock()
        if left is not None and left < max(case.seconds, LEAST_SECONDS):
            result = {"error": "skipped", "detail": f"{left:.0f} s of the budget were left"}
        else:
            limit = case.limit if left is None else min(case.limit, left - LEAST_SECONDS / 4)
            result = run_case(case, command, limit)
        record = {
            "case": case.name, "kind": case.kind, "arguments": case.arguments, "run": run,
            "wall_seconds": clock() - started, "result": result,
        }  # fmt: skip
        if result.get("error") != "skipped":  # an earlier result is better than a skipped one
            records = [entry for entry in records if entry["case"] != case.name]
        if all(entry["case"] != case.name for entry in records):
            records.append(record)
        _write(out, records)
        show(record)
    return records


def run_case(case: Case, command: Sequence[str], limit: float) -> Record:
    """Run one case in a process group of its own; what it printed last is its result."""
    request = json.dumps({"kind": case.kind, "arguments": case.arguments})
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, request], stdout=output, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit)
            problem = None if code == 0 else _explain(code)
        except subprocess.TimeoutExpired:
            problem = f"took longer than {limit:.0f} s"
        finally:
            _end(process)
        result = _last_line(output)
    if result is None:
        return {"error": problem or "printed no result"}
    if problem and "error" not in result:
        # What it had measured until then stands, and the table says that it is not all.
        result = {**result, "incomplete": problem}
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the case's own process group, children included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _explain(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed: most likely the host ran out of memory"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _last_line(output: IO[str]) -> Record | None:
    """The last JSON object on a line of its own; libraries print around it."""
    output.seek(0)
    for line in reversed(output.read().splitlines()):
        if line.startswith("{"):
            try:
                result: Record = json.loads(line)
            except json.JSONDecodeError:
                continue
            return result
    return None


def _write(out: Path, records: list[Record]) -> None:
    """Replace the file as a whole: a run may be cut at any moment."""
    partial = out.with_name(out.name + ".part")
    partial.write_text(json.dumps({"records": records}, indent=1))
    partial.replace(out)


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Records of earlier files; of two with one name the later counts."""
    by_name: dict[str, Record] = {}
    for path in paths:
        for record in json.loads(path.read_text())["records"]:
            by_name[record["case"]] = record
    return list(by_name.values())


def python_command(module: str) -> list[str]:
    """How a case's process is started."""
    return [sys.executable, "-m", module, "--case"]
