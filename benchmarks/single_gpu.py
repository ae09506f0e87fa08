"""Training steps on one GPU, beside the ceilings and the rivals of the same run.

``python -m benchmarks.single_gpu --suite headline`` runs each case in a process of its own, prints
the table of targets with pass or gap, and writes every figure to ``results.json`` after each case.
Models are random-initialised from their shapes, nothing is downloaded. Correct first: the headline
begins with loss and gradients of the streamed step against plain PyTorch, and with the device
update against the host kernel, bit for bit.

Figures: model FLOPs (``headrace.models.flops``, recompute not counted), full rows, clipping and
the update included; MFU against the 8192 cubed matrix product of the same run and against the data
sheet. Rivals do the same work on the same tokens, at the best of the micro-batches they are given.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.curve import save
from benchmarks.runner import Case, Record, python_command, read_records, run_cases
from benchmarks.suites import SUITES, TARGETS
from benchmarks.table import ceiling_lines, judge, profile_lines, speed_lines, target_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = {
    "parity": ("benchmarks.cases.parity", "parity_case"),
    "ceilings": ("benchmarks.cases.ceilings", "ceilings_case"),
    "host-update": ("benchmarks.cases.host_update", "host_update_case"),
    "train": ("benchmarks.cases.engine", "train_case"),
    "rival": ("benchmarks.cases.rivals", "rival_case"),
    "rival-curve": ("benchmarks.cases.rivals", "curve_case"),
    "agreement": ("benchmarks.cases.agreement", "agreement_case"),
    "start": ("benchmarks.cases.start", "start_case"),
    "experts": ("benchmarks.cases.experts", "experts_case"),
    "recompute": ("benchmarks.cases.recompute", "recompute_case"),
    "families": ("benchmarks.cases.families", "families_case"),
    "hybrid": ("benchmarks.cases.hybrid", "hybrid_case"),
}
"""Where each kind of case lives: imported in the case's own process only."""


def carry_out(request: dict[str, Any]) -> int:
    """Run one case here and print its result; a failure is a result too."""
    module, function = KINDS[request["kind"]]
    try:
        result = getattr(importlib.import_module(module), function)(**request["arguments"])
    except Exception as error:  # noqa: BLE001 - the parent records it
        traceback.print_exc()
        from headrace.errors import CapacityError

        full = isinstance(error, CapacityError) or type(error).__name__ == "OutOfMemoryError"
        said = str(error).strip().splitlines()
        result = {
            "error": "out of memory" if full else type(error).__name__,
            "detail": said[0] if said else "",
        }
    print(json.dumps(result), flush=True)
    return 0


def _offer_to_the_kernel() -> None:
    """If the host runs out of memory, this case is the one to end."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        print("oom_score_adj cannot be set here", file=sys.stderr)


def selected(cases: Sequence[Case], patterns: str | None) -> list[Case]:
    """Those whose name matches one of the comma-separated patterns; all without any.

    Raises:
        SystemExit: a pattern matches none.
    """
    if not patterns:
        return list(cases)
    wanted = patterns.split(",")
    for pattern in wanted:
        if not any(fnmatch(case.name, pattern) for case in cases):
            known = "\n  ".join(case.name for case in cases)
            raise SystemExit(f"no case matches {pattern!r}; there are\n  {known}")
    return [case for case in cases if any(fnmatch(case.name, pattern) for pattern in wanted)]


def beside(case: Case, out: Path) -> Case:
    """The case with its trace, if it has one, in the folder of the results."""
    trace = case.arguments.get("trace")
    if trace is None:
        return case
    return replace(case, arguments={**case.arguments, "trace": str(out.parent / trace)})


def show(record: Record) -> None:
    result = record["result"]
    brief = {k: v for k, v in result.items() if not isinstance(v, list)}
    print(f"{record['case']} ({record['wall_seconds']:.0f} s): {json.dumps(brief)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=sorted(SUITES), default="headline")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--cases", help="names or patterns, commas between, of the suite's cases")
    parser.add_argument("--list", action="store_true", help="print the suite's cases and end")
    parser.add_argument("--budget-seconds", type=float, help="begin no case that would pass this")
    parser.add_argument("--merge", type=Path, action="append", default=[], metavar="RESULTS",
                        help="keep the records of an earlier file; may be given again")  # fmt: skip
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case:
        _offer_to_the_kernel()
        return carry_out(json.loads(given.case))
    cases = selected(SUITES[given.suite], given.cases)
    cases = [beside(case, given.out) for case in cases]
    if given.list:
        print("\n".join(f"{case.name:<48}{case.seconds:>6.0f} s" for case in cases))
        return 0
    records = run_cases(
        cases,
        command=python_command("benchmarks.single_gpu"),
        out=given.out,
        budget_seconds=given.budget_seconds,
        earlier=read_records(given.merge),
        show=show,
    )
    print("\n".join(["", *ceiling_lines(records), "", *speed_lines(records)]))
    print("\n".join(profile_lines(records)))
    if given.suite == "headline":
        print("\n".join(["", *target_lines(judge(TARGETS, records))]))
    if given.suite == "curve":
        print("\n".join(["", *(f"wrote {path}" for path in save(records, given.out))]))
    failed = [r["case"] for r in records if _failed(r)]
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


def _failed(record: Record) -> bool:
    """Running out of memory or of the budget is a result; anything else is a fault."""
    error = record["result"].get("error")
    return error is not None and error not in ("out of memory", "skipped")


if __name__ == "__main__":
    sys.exit(main())
