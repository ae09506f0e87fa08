"""One finding of the doctor, and how a list of them is summed up and shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Status = Literal["ok", "info", "missing", "warning", "fault"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: part of the machine, such as ``"memory"``.
        name: what was looked at.
        status: ``ok``; ``info`` (a fact); ``missing`` (an optional part); ``warning`` (works, at a
            cost); ``fault`` (will fail or give wrong results).
        value: what was found, for people.
        detail: what it means for a run.
        remedy: a command or setting, None where nothing needs to be done.
    """

    area: str
    name: str
    status: Status
    value: str
    detail: str = ""
    remedy: str | None = None


def summary(findings: Iterable[Finding]) -> str:
    """``"faults"``, ``"warnings"`` or ``"ok"``; missing optional parts change nothing."""
    found = {finding.status for finding in findings}
    return "faults" if "fault" in found else "warnings" if "warning" in found else "ok"


def to_dict(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """The findings as plain values."""
    return [asdict(finding) for finding in findings]


MARKS: dict[Status, str] = {
    "ok": "ok",
    "info": "--",
    "missing": "missing",
    "warning": "WARNING",
    "fault": "FAULT",
}


def render(findings: Iterable[Finding]) -> str:
    """The findings as text, by area, each remedy on a line of its own."""
    lines: list[str] = []
    area = None
    for finding in findings:
        if finding.area != area:
            lines += ["", finding.area] if lines else [finding.area]
            area = finding.area
        tail = f"  ({finding.detail})" if finding.detail else ""
        lines.append(f"  {MARKS[finding.status]:<8} {finding.name}: {finding.value}{tail}")
        if finding.remedy is not None:
            lines.append(f"           -> {finding.remedy}")
    return "\n".join(lines)
