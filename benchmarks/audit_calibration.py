"""Size and power of the audit's verdicts on simulated panels: the figures of docs/audit.md.

    python benchmarks/audit_calibration.py --panels 1000 --out calibration.json

Every cell is a kind of panel; what is counted is how many panels get ``knows_the_future``. A
null cell passes at 67 of 1,000 (a true rate of 5% exceeds that 0.7% of the time) or at 18 of
200, where nothing can be known also by its claims of skill; a power cell passes at 75%. Cells
grow together, 20 panels a turn, and a run that is started again with the same file goes on
where it stopped. ``--report`` prints the file.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from headrace.audit import AuditConfig, make_panel, run_audit
from headrace.audit.synthetic import SyntheticConfig, simulate

if TYPE_CHECKING:
    from headrace.audit.panel import Panel as AuditPanel

NULLS: dict[str, dict[str, object]] = {
    "digits network": {},
    "calendar network": {"network": "calendar"},
    "honest skill in features": {"feature_skill": 0.1},
    "constant skill, share": {"skill": 0.05},
    "constant skill, units": {"skill": 0.05, "skill_constant_in": "units"},
    "volatility doubles": {"network": "calendar", "volatility_break": 2.0},
    "volatility doubles, honest skill": {"feature_skill": 0.1, "volatility_break": 2.0},
    "volatility doubles, skill in share": {"skill": 0.05, "volatility_break": 2.0},
    "volatility doubles, skill in units": {
        "skill": 0.05, "skill_constant_in": "units", "volatility_break": 2.0,
    },
    "volatility halves, skill in share": {"skill": 0.05, "volatility_break": 0.5},
    "volatility halves, skill in units": {
        "skill": 0.05, "skill_constant_in": "units", "volatility_break": 0.5,
    },
    "calendar network, 120 sessions after": {"network": "calendar", "cutoff_fraction": 0.8975},
    "constant skill, 120 sessions after": {"skill": 0.05, "cutoff_fraction": 0.8975},
    "entity effects that come and go": {"entity_effect": 0.1},
    # Only the rows with a vector are in the panel: shifted dates are refused, and a purged
    # walk-forward with date blocks stands in for them.
    "sampled, digits network": {"sampled": True},
    "sampled, calendar network": {"sampled": True, "network": "calendar"},
    "sampled, constant skill": {"sampled": True, "skill": 0.05},
}  # fmt: skip
# Where nothing can be known, skill is a false claim too.
NOTHING_KNOWN = {
    "digits network", "calendar network", "volatility doubles",
    "calendar network, 120 sessions after", "sampled, digits network",
    "sampled, calendar network",
}  # fmt: skip
POWER: dict[str, dict[str, object]] = {
    "leak 0.03 a channel": {"leak": 0.03},
    "leak 0.03 a channel, 120 sessions after": {"leak": 0.03, "cutoff_fraction": 0.8975},
    "leak 0.03, common only": {"leak": 0.03, "channels": ("common",)},
    "leak 0.03, entity only": {"leak": 0.03, "channels": ("entity",)},
    "leak 0.01 a channel": {"leak": 0.01},
    "sampled, leak 0.03 a channel": {"sampled": True, "leak": 0.03},
}
NOT_PROMISED = {"leak 0.01 a channel"}
SMALL = {"num_entities": 60, "num_sessions": 500, "rows_per_entity": 60, "dimension": 32}
ROUND = 20

Panel = dict[str, object]


def one_panel(changes: dict[str, object], seed: int, *, small: bool) -> Panel:
    """Simulate and judge one panel; the figures behind the verdict are kept."""
    size = SMALL if small else {}
    planted = {key: value for key, value in changes.items() if key != "sampled"}
    config = SyntheticConfig(seed=seed, **(size | planted))  # type: ignore[arg-type]  # names are checked by the class
    drawn = simulate(config)
    result = run_audit(
        embedded_only(drawn.panel) if changes.get("sampled") else drawn.panel,
        {"model": drawn.embedding},
        {"model": drawn.cutoff},
        twins=drawn.twins,
        config=AuditConfig(tables=False, num_shifts=39, positive_control=0.0),
    )
    model = result.models[0]
    contrasts = {
        name: {
            "share": record.contrast.value,
            "before": record.before.value,
            "p": record.contrast.p_value,
            "p_adjusted": record.contrast.p_adjusted,
            "p_own": record.own.p_value if record.own else None,
            "detectable": record.detectable,
        }
        for name, record in model.contamination.items()
    }
    skill = {name: [figure.value, figure.p_adjusted] for name, figure in model.skill.items()}
    return {"seed": seed, "verdict": model.verdict, "contrasts": contrasts, "skill": skill}


def embedded_only(panel: AuditPanel) -> AuditPanel:
    """The panel without the rows that have no vector."""
    rows = panel.embedded_rows
    return make_panel(
        entity=panel.entities[panel.entity[rows]],
        date=panel.sessions[panel.session[rows]],
        label_start=panel.label_start[rows],
        label_end=panel.label_end[rows],
        y=panel.y[rows],
        features=panel.features[rows],
        feature_names=panel.feature_names,
        name=panel.name,
    )


def kinds(names: list[str] | None) -> dict[str, tuple[str, dict[str, object]]]:
    """Cells by name, with their kind."""
    cells = {name: ("null", changes) for name, changes in NULLS.items()}
    cells |= {name: ("power", changes) for name, changes in POWER.items()}
    return {name: cell for name, cell in cells.items() if not names or name in names}


def summary(name: str, kind: str, panels: list[Panel]) -> dict[str, object]:
    """What the file says of a cell."""
    count = len(panels)
    claims = sum(panel["verdict"] == "knows_the_future" for panel in panels)
    skill = sum(panel["verdict"] == "skill" for panel in panels)
    # 67 of 1,000 and 18 of 200 are the limits at 5%; between, the same tail by Poisson.
    limit = 0.05 * count + 2.5 * (0.05 * 0.95 * count) ** 0.5
    passed = claims <= limit if kind == "null" else claims >= 0.75 * count
    if name in NOTHING_KNOWN:
        passed &= skill <= limit
    shares: dict[str, object] = {}
    for channel in ("common", "entity"):
        found = [panel["contrasts"] for panel in panels]
        values = [c[channel]["share"] for c in found if channel in c]  # type: ignore[index,operator]  # JSON
        if values:
            shares[channel] = [round(float(q), 5) for q in np.quantile(values, [0.05, 0.5, 0.95])]
    return {
        "kind": kind, "panels": count, "knows_the_future": claims, "skill": skill,
        "passed": passed or name in NOT_PROMISED, "contrast_share_5_50_95": shares,
    }  # fmt: skip


def report(done: dict[str, list[Panel]], names: list[str] | None) -> bool:
    """Print every cell; whether all of them passed."""
    passed = True
    table: dict[str, object] = {}
    for name, (kind, _) in kinds(names).items():
        panels = done.get(name, [])
        if not panels:
            continue
        cell = summary(name, kind, panels)
        table[name] = cell
        passed &= bool(cell["passed"])
        claims, count = cell["knows_the_future"], len(panels)
        print(
            f"{kind:5} {name:42} knows_the_future {claims:4d} of {count:4d} "
            f"({100 * claims / count:5.1f}%), skill {cell['skill']:4d}, "  # type: ignore[operator]  # counts
            f"{'pass' if cell['passed'] else 'FAIL'}  "
            f"contrast share 5/50/95%: {cell['contrast_share_5_50_95']}"
        )
    print(json.dumps(table))
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--panels", type=int, default=1000)
    parser.add_argument("--power-panels", type=int, default=200)
    parser.add_argument("--small", action="store_true", help="the panels that CI draws")
    parser.add_argument("--cells", nargs="*", help="names of cells; all by default")
    parser.add_argument("--out", type=Path, default=Path("audit_calibration.json"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, one panel each")
    parser.add_argument("--report", action="store_true", help="print the file and draw nothing")
    arguments = parser.parse_args()
    done: dict[str, list[Panel]] = {}
    if arguments.out.exists():
        done = json.loads(arguments.out.read_text())
    cells = kinds(arguments.cells)
    wanted = {
        name: arguments.panels if kind == "null" else arguments.power_panels
        for name, (kind, _) in cells.items()
    }
    start = time.perf_counter()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        while not arguments.report:
            open_cells = [name for name in cells if len(done.get(name, [])) < wanted[name]]
            if not open_cells:
                break
            for name in open_cells:
                panels = done.setdefault(name, [])
                work = functools.partial(one_panel, cells[name][1], small=arguments.small)
                stop = min(len(panels) + ROUND, wanted[name])
                panels += pool.map(work, range(len(panels), stop))
                # Written beside and renamed: a run that is cut never leaves half a file.
                fresh = arguments.out.with_suffix(".new")
                fresh.write_text(json.dumps(done))
                fresh.replace(arguments.out)
            total = sum(len(panels) for panels in done.values())
            print(f"{total} panels, {time.perf_counter() - start:.0f} s", flush=True)
    raise SystemExit(0 if report(done, arguments.cells) else 1)


if __name__ == "__main__":
    main()
