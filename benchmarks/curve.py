"""Tokens per second against tokens per step: points from records, a JSON file, an SVG plot.

A system that must move or update something every step gains from larger steps; one that keeps
everything on the device gains little. ``python -m benchmarks.curve results.json`` draws what a
results' file holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runner import read_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.runner import Record

Points = dict[str, dict[str, dict[int, float]]]
"""Model, system, tokens a step, tokens a second."""


def points(records: Sequence[Record]) -> Points:
    """The fastest result of each system at each number of tokens."""
    found: Points = {}
    for record in records:
        arguments, result = record["arguments"], record["result"]
        if record["kind"] not in ("train", "rival", "rival-curve") or "device_gib" in arguments:
            continue
        system = system_name(record)
        measured = result.get("points", [result])
        for point in measured:
            if "tokens_per_second" not in point:
                continue
            tokens = int(point.get("tokens", arguments["tokens"]))
            line = found.setdefault(arguments["model"], {}).setdefault(system, {})
            line[tokens] = max(line.get(tokens, 0.0), point["tokens_per_second"])
    return {
        model: {system: dict(sorted(line.items())) for system, line in sorted(lines.items())}
        for model, lines in sorted(found.items())
    }


def system_name(record: Record) -> str:
    """The system in words; FSDP2's ways of checkpointing are one system, its best counts."""
    arguments = record["arguments"]
    if record["kind"] == "train":
        return "headrace"
    name = {
        "fsdp2": "FSDP2",
        "fsdp2-offload": "FSDP2 CPU offload",
        "zero-offload": f"ZeRO-{arguments.get('stage', 2)} offload",
    }[arguments["rival"]]
    if (arguments.get("options") or {}).get("compiled"):
        name += ", compiled"
    if arguments.get("precision") == "bfloat16":
        name += ", bf16 state"
    return name


def save(records: Sequence[Record], out: Path) -> list[Path]:
    """Write ``out`` with suffix ``.curve.json``, and a plot a model where matplotlib is there."""
    found = points(records)
    data = out.with_suffix(".curve.json")
    data.write_text(json.dumps(found, indent=1))
    written = [data]
    try:
        import matplotlib as mpl
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return written
    mpl.use("Agg")
    for model, lines in found.items():
        path = out.with_suffix(f".curve-{model}.svg")
        _draw(model, lines, path)
        written.append(path)
    return written


def _draw(model: str, lines: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    ticks: set[int] = set()
    for system, line in lines.items():
        mine = system == "headrace"
        axes.plot(
            list(line), list(line.values()), marker="o", markersize=4,
            linewidth=2.4 if mine else 1.4, zorder=3 if mine else 2, label=system,
        )  # fmt: skip
        ticks |= set(line)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [_short(count) for count in sorted(ticks)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per step")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"Qwen3 {model.upper()}, one GPU, sequences of 4096", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _short(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def main(arguments: Sequence[str]) -> int:
    files: list[Any] = [Path(name) for name in arguments]
    if not files:
        print("python -m benchmarks.curve RESULTS [RESULTS ...]", file=sys.stderr)
        return 2
    for path in save(read_records(files), files[-1]):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
