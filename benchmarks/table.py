"""Targets against results, and the printed tables. Pure but for the printing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import lanes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.runner import Record
    from benchmarks.suites import Target


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A target with what was measured; ``value`` is None where nothing was."""

    target: Target
    value: float | None
    note: str

    @property
    def word(self) -> str:
        """``pass``, ``gap`` or ``not run``."""
        if self.value is None:
            return "not run"
        met = (
            self.value >= self.target.bound
            if self.target.reading == "at least"
            else self.value <= self.target.bound
        )
        return "pass" if met else "gap"


def judge(targets: Iterable[Target], records: Sequence[Record]) -> list[Verdict]:
    """Hold each target against the records."""
    return [_judge(target, records) for target in targets]


def _judge(target: Target, records: Sequence[Record]) -> Verdict:
    record = next((r for r in records if r["case"] == target.case), None)
    value = None if record is None else measure(record["result"], target.measure)
    if record is None or value is None:
        return Verdict(target=target, value=None, note=_why(record))
    if target.over is None:
        return Verdict(target=target, value=value, note=record["result"].get("incomplete", ""))
    start, name = target.over
    model = record["arguments"].get("model")
    others = [
        other
        for other in records
        if other["case"].startswith(start)
        and other["arguments"].get("model") in (None, model)
        and other["arguments"].get("precision") != "bfloat16"
    ]
    rates = [(measure(other["result"], name), other) for other in others]
    known = [(rate, other) for rate, other in rates if rate]
    together = [pair for pair in known if pair[1]["run"] == record["run"]] or known
    if not together:
        if others:
            return Verdict(target=target, value=None, note=f"{start}: {_why(others[0])}")
        return Verdict(target=target, value=None, note=f"no result of {start}")
    rate, other = max(together, key=lambda pair: pair[0] or 0.0)
    assert rate
    note = "" if other["case"] == start else f"best is {other['case']}"
    if other["run"] != record["run"]:
        note = f"{note or other['case']}, of another run"
    return Verdict(target=target, value=value / rate, note=note)


def measure(result: dict[str, Any], path: str) -> float | None:
    """The number at ``path``, dots between levels; None where a level is missing."""
    value: Any = result
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return float(value) if isinstance(value, int | float) else None


def _why(record: Record | None) -> str:
    if record is None:
        return "not in this run"
    result = record["result"]
    return ": ".join(str(result[k]) for k in ("error", "detail") if k in result) or "not measured"


def target_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """The headline's table."""
    lines = [f"{'target':<40}{'measured':>16}{'bound':>12}   verdict"]
    for verdict in verdicts:
        target = verdict.target
        value = "-" if verdict.value is None else f"{verdict.value:.4g} {target.unit}".strip()
        sign = ">=" if target.reading == "at least" else "<="
        end = f"   ({verdict.note})" if verdict.note else ""
        lines.append(
            f"{target.row:<40}{value:>16}{f'{sign} {target.bound:g}':>12}   {verdict.word}{end}"
        )
    return lines


CEILINGS = (
    ("bf16 matmul", "matmul_tflops", "TFLOP/s"),
    ("bf16 matmul, over seconds", "matmul_sustained_tflops", "TFLOP/s"),
    ("layer of 4B", "shapes_tflops.4b.layer", "TFLOP/s"),
    ("layer of 8B", "shapes_tflops.8b.layer", "TFLOP/s"),
    ("H2D", "h2d_gbps", "GB/s"),
    ("D2H", "d2h_gbps", "GB/s"),
    ("both at once, each way", "duplex_each_way_gbps", "GB/s"),
    ("device memory, read and written", "device_read_write_gbps", "GB/s"),
    ("host update", "alone.gparameters_per_second", "Gparam/s"),
    ("  torch's and casts", "alone.torch_gparameters_per_second", "Gparam/s"),
    ("host update under DMA", "under_dma.gparameters_per_second", "Gparam/s"),
    ("  torch's and casts", "under_dma.torch_gparameters_per_second", "Gparam/s"),
    ("  bytes moved", "under_dma.gigabytes_per_second", "GB/s"),
    ("  H2D meanwhile", "under_dma.h2d_gbps", "GB/s"),
    ("  D2H meanwhile", "under_dma.d2h_gbps", "GB/s"),
)


def ceiling_lines(records: Sequence[Record]) -> list[str]:
    """What the machine can do, by the last record that says so."""
    lines = []
    for name, path, unit in CEILINGS:
        values = [measure(record["result"], path) for record in records]
        known = [value for value in values if value is not None]
        if known:
            lines.append(f"{name:<40}{known[-1]:>10.4g} {unit}")
    return lines


def profile_lines(records: Sequence[Record]) -> list[str]:
    """Where the time of every traced case went, against the floor at the run's matmul rate."""
    result = []
    for record in records:
        found = record["result"]
        if "lanes" not in found:
            continue
        rate = _ceiling(record, records, "matmul_tflops")
        floor = None if rate is None else found["floor_flops"] / rate / 1e12
        result += ["", f"{record['case']}: " + "\n".join(lanes.lines(found["lanes"], floor))]
    return result


def speed_lines(records: Sequence[Record]) -> list[str]:
    """A row a training case: rates, both MFUs, peaks; failures with their reason."""
    head = ("tok/s", "TFLOP/s", "spread", "matmul", "sheet", "device", "host")
    lines = [f"{'case':<46}" + "".join(f"{name:>9}" for name in head) + "   rows"]
    for record in records:
        if record["kind"] not in ("train", "rival"):
            continue
        result = record["result"]
        if "tflops" not in result:
            lines.append(f"{record['case']:<46}   {_why(record)}")
            continue
        spread = (result["slowest_seconds"] - result["fastest_seconds"]) / result["seconds"]
        cells = (
            f"{result['tokens_per_second']:.0f}",
            f"{result['tflops']:.1f}",
            f"{spread:.1%}",
            _share(record, records, "matmul_tflops"),
            _share(record, records, "data_sheet_tflops"),
            f"{result['device_peak_gib']:.1f}",
            f"{result['host_peak_gib']:.1f}",
        )
        end = f"   {result['rows']}"
        if "incomplete" in result:
            end += f"   ({result['incomplete']})"
        lines.append(f"{record['case']:<46}" + "".join(f"{cell:>9}" for cell in cells) + end)
    return lines


def _share(record: Record, records: Sequence[Record], name: str) -> str:
    """MFU: model FLOPs over a ceiling."""
    rate = _ceiling(record, records, name)
    return "-" if rate is None else f"{record['result']['tflops'] / rate:.3f}"


def _ceiling(record: Record, records: Sequence[Record], name: str) -> float | None:
    """Of the same run, else of any."""
    ceilings = [r for r in records if r["kind"] == "ceilings" and measure(r["result"], name)]
    same = [r for r in ceilings if r["run"] == record["run"]] or ceilings
    return measure(same[0]["result"], name) if same else None
