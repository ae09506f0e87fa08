"""Time and memory of a whole audit: 1,000 entities x 30 dates x 2,048 dimensions.

    python benchmarks/audit_speed.py --out audit_speed.json

All protocols, ``vessl-2026`` with its 200 refits included, 199 shifts, intervals and 19 twins,
embeddings given as files. The target is 5 minutes and 4 GiB on two cores. Processor seconds
stand beside the wall's, because on a machine that is shared only they can be compared: what the
main thread used (``alone_cpu_s``) and half of what the others used is the wall's time on two
idle cores, but for what they wait for each other. Plain scikit-learn is timed on a few refits of
the published bootstrap and on a few fits of the
audit's own estimator, and extrapolated to the number of them in the run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.linear_model import Ridge
from sklearn.model_selection import GroupKFold

from headrace.audit import AuditConfig, run_audit
from headrace.audit.published import NUM_DRAWS, PublishedRows
from headrace.audit.published_defects import PublishedOptions
from headrace.audit.synthetic import SyntheticConfig, simulate
from headrace.audit.threads import num_workers, single_blas

SPLIT = "2018-06-30"  # the simulated dates end before the published split


class Clock:
    """Wall and processor seconds of what is named, and those of the main thread alone."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, float]] = {}
        self._name = ""
        self._start = (0.0, 0.0, 0.0)

    def __call__(self, name: str) -> None:
        """Book what has passed on the part before, and start ``name``."""
        now = (time.perf_counter(), time.process_time(), time.thread_time())
        if self._name:
            none = {"wall_s": 0.0, "cpu_s": 0.0, "alone_cpu_s": 0.0}
            part = self.parts.setdefault(self._name, none)
            for key, then, at in zip(part, self._start, now, strict=True):
                part[key] = round(part[key] + at - then, 1)
            print(f"{self._name}: {part}", file=sys.stderr, flush=True)
        self._name, self._start = ("twins" if name.startswith("twin ") else name), now

    def total(self) -> dict[str, float]:
        """Over all parts."""
        self("")
        return {
            key: round(sum(part[key] for part in self.parts.values()), 1)
            for key in ("wall_s", "cpu_s", "alone_cpu_s")
        }


def published_refit(values: np.ndarray, rows: PublishedRows, rng: np.random.Generator) -> None:
    """One bootstrap draw of the published protocol with scikit-learn: six fits on copied rows."""
    entities = np.unique(rows.entity)
    picked = rng.choice(entities, size=len(entities), replace=True)
    index = np.concatenate([np.flatnonzero(rows.entity == entity) for entity in picked])
    x, y, train = values[index], rows.targets[index, 0], rows.train[index]
    Ridge(alpha=1.0).fit(x[train], y[train]).predict(x[~train])
    for fit, test in GroupKFold(5).split(x, groups=rows.entity[index]):
        Ridge(alpha=1.0).fit(x[fit], y[fit]).predict(x[test])


def seconds(work: object, times: int) -> float:
    """Processor seconds of one call, from ``times`` of them."""
    start = time.process_time()
    for _ in range(times):
        work()  # type: ignore[operator]  # a callable
    return (time.process_time() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entities", type=int, default=1000)
    parser.add_argument("--dimension", type=int, default=2048)
    parser.add_argument("--twins", type=int, default=19)
    parser.add_argument("--refits", type=int, default=3, help="scikit-learn refits to time")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    drawn = simulate(
        SyntheticConfig(
            num_entities=arguments.entities, dimension=arguments.dimension, num_twins=1, leak=0.03
        )
    )
    panel, cutoff = drawn.panel, drawn.cutoff
    found: dict[str, object] = {"cores": len(os.sched_getaffinity(0)), "workers": num_workers()}
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.npy"
        np.save(model, drawn.embedding)
        twins = {}
        rng = np.random.default_rng(0)
        for k in range(arguments.twins):
            # Twins differ by a rotation of the first: the same geometry, another network.
            path = Path(folder) / f"twin{k}.npy"
            turn = rng.standard_normal((arguments.dimension, arguments.dimension), np.float32)
            np.save(path, drawn.twins["twin 0"] @ turn)
            twins[f"twin {k}"] = path
        del drawn
        # What the simulation held is given back, so that the peak is the audit's.
        Path("/proc/self/clear_refs").write_text("5")
        clock("layout")
        result = run_audit(
            panel, {"m": model}, {"m": cutoff}, twins=twins, config=AuditConfig(),
            published=PublishedOptions(split_date=SPLIT), progress=clock,
        )  # fmt: skip
        total = clock.total()
        spread = total["cpu_s"] - total["alone_cpu_s"]
        found["audit"] = total | {
            "two_idle_cores_s": round(total["alone_cpu_s"] + spread / 2, 1),
            "verdict": result.models[0].verdict,
        }
        found["parts"] = clock.parts
        status = Path("/proc/self/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        found["peak_rss_gib"] = round(int(peak.split()[1]) / 2**20, 2)
        found["peak_rss_with_simulation_gib"] = round(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2
        )
        print(json.dumps(found), flush=True)
        vectors = np.load(model)
    rows = PublishedRows.of_panel(panel, split_date=SPLIT)
    values = np.column_stack([vectors.astype(np.float64), rows.features])
    del vectors
    rng = np.random.default_rng(123)
    with single_blas():
        refit = seconds(lambda: published_refit(values, rows, rng), arguments.refits)
        fit = seconds(lambda: Ridge(alpha=10.0).fit(values, rows.targets[:, 0]), arguments.refits)
    # A model's own fits: (10 + 45) training sets of a channel and their 6 penalties, 200 targets.
    num_fits = 55 * 6 * (1 + AuditConfig().num_shifts)
    ours = clock.parts["model m, vessl-2026"]["cpu_s"]
    found["scikit_learn"] = {
        "published_refit_cpu_s": round(refit, 2),
        "published_draws": NUM_DRAWS,
        "published_extrapolated_cpu_s": round(refit * NUM_DRAWS),
        "published_ratio": round(refit * NUM_DRAWS / ours, 1),
        "one_fit_cpu_s": round(fit, 2),
        "entity_channel_fits": num_fits,
        "entity_channel_extrapolated_cpu_s": round(fit * num_fits),
        "entity_channel_ratio_at_least": round(fit * num_fits / clock.parts["model m"]["cpu_s"]),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
