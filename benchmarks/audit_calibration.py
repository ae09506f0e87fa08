"""Size and power of the audit's verdicts on simulated panels: the figures of docs/audit.md.

    python benchmarks/audit_calibration.py --panels 1000 --out calibration.json

Every cell is a kind of panel; what is counted is how many panels get ``knows_the_future``. A
null cell passes at 67 of 1,000 (a true rate of 5% exceeds that 0.7% of the time) or at 18 of
200; a power cell passes at 75%. Results are written after every 20 panels, and a run that is
started again with the same file goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from headrace.audit import AuditConfig, run_audit
from headrace.audit.synthetic import SyntheticConfig, simulate

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
}  # fmt: skip
POWER: dict[str, dict[str, object]] = {
    "leak 0.03 a channel": {"leak": 0.03},
    "leak 0.03 a channel, 120 sessions after": {"leak": 0.03, "cutoff_fraction": 0.8975},
    "leak 0.03, common only": {"leak": 0.03, "channels": ("common",)},
    "leak 0.03, entity only": {"leak": 0.03, "channels": ("entity",)},
    "leak 0.01 a channel": {"leak": 0.01},
}
SMALL = {"num_entities": 60, "num_sessions": 500, "rows_per_entity": 60, "dimension": 32}


def one_panel(changes: dict[str, object], seed: int, *, small: bool) -> dict[str, object]:
    size = SMALL if small else {}
    config = SyntheticConfig(seed=seed, **(size | changes))  # type: ignore[arg-type]  # names are checked by the class
    drawn = simulate(config)
    result = run_audit(
        drawn.panel,
        {"model": drawn.embedding},
        {"model": drawn.cutoff},
        twins=drawn.twins,
        config=AuditConfig(tables=False, num_shifts=39, positive_control=0.0),
    )
    model = result.models[0]
    p = {name: record.contrast.p_value for name, record in model.contamination.items()}
    skill = {name: figure.p_value for name, figure in model.skill.items()}
    return {"seed": seed, "verdict": model.verdict, "contrast_p": p, "skill_p": skill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--panels", type=int, default=1000)
    parser.add_argument("--power-panels", type=int, default=200)
    parser.add_argument("--small", action="store_true", help="the panels that CI draws")
    parser.add_argument("--cells", nargs="*", help="names of cells; all by default")
    parser.add_argument("--out", type=Path, default=Path("audit_calibration.json"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, one panel each")
    arguments = parser.parse_args()
    done: dict[str, list[dict[str, object]]] = {}
    if arguments.out.exists():
        done = json.loads(arguments.out.read_text())
    failed = []
    for kind, cells, count in (
        ("null", NULLS, arguments.panels),
        ("power", POWER, arguments.power_panels),
    ):
        for name, changes in cells.items():
            if arguments.cells and name not in arguments.cells:
                continue
            results = done.setdefault(name, [])
            start = time.perf_counter()
            work = functools.partial(one_panel, changes, small=arguments.small)
            with ProcessPoolExecutor(arguments.jobs) as pool:
                for result in pool.map(work, range(len(results), count)):
                    results.append(result)
                    if len(results) % 20 == 0 or len(results) == count:
                        arguments.out.write_text(json.dumps(done))
            claims = sum(r["verdict"] == "knows_the_future" for r in results)
            # 67 of 1,000 and 18 of 200 are the limits at 5%; between, the same tail by Poisson.
            limit = 0.05 * len(results) + 2.5 * (0.05 * 0.95 * len(results)) ** 0.5
            passed = claims <= limit if kind == "null" else claims >= 0.75 * len(results)
            if name == "leak 0.01 a channel":
                passed = True  # not promised
            failed += [] if passed else [name]
            print(
                f"{kind:5} {name:42} knows_the_future {claims:4d} of {len(results)} "
                f"({100 * claims / len(results):5.1f}%) {'pass' if passed else 'FAIL'} "
                f"[{time.perf_counter() - start:.0f} s]",
                flush=True,
            )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
