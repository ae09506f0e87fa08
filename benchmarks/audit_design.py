"""Four choices of the audit that simulation decided: the figures of docs/audit.md.

    python benchmarks/audit_design.py --panels 400

*Normalisation*: how often the contrast at the cutoff rejects when skill is constant, tested with
the variance of each side, with the pooled one, and with both (the larger p-value). *Penalties*:
how often a leak is found when purged k-fold chooses penalties by leaving out one more block, and
by windows that go forward in time. Common channel, level 5%, no reference, panels of 300
entities x 30 of 1,171 dates. *Clusters*: how often the entity channel's contrast rejects when all
there is are effects of entities that come and go, with date blocks alone and with entities as
clusters too, and how often either finds a leak; 30 entities x 420 dates, cutoff after 70% of them.
*Drifts*: how often a model that reads the date and the date before is called one that knows the
future, with and without the condition that half of a contrast is left within runs of dates, and
how often either finds a leak; 30 entities x 420 dates, the common channel, three twins.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from headrace.audit import AuditConfig, make_panel, run_audit, verdict
from headrace.audit.boundary import contrast
from headrace.audit.channels import channel_book
from headrace.audit.conclude import channel_contrast
from headrace.audit.config import parse_date
from headrace.audit.folds import Plan, forward_windows
from headrace.audit.measure import Layout, build_layout
from headrace.audit.skill import purged_skill
from headrace.audit.synthetic import SyntheticAudit, SyntheticConfig, simulate
from headrace.audit.tables import total_variance

if TYPE_CHECKING:
    from headrace.audit.panel import Panel

# The entity channel is left out: it takes most of the time, and dates are what is asked about.
CONFIG = AuditConfig(tables=False, num_shifts=19, min_dates_entity=10**9)
ENTITY_CONFIG = AuditConfig(tables=False, num_shifts=19, min_dates_common=10**9)
LEVEL = 0.05
EFFECTS: dict[str, dict[str, object]] = {
    "entity effects 0.1, half-life 69 sessions": {
        "entity_effect": 0.1, "effect_persistence": 0.99,
    },
    "entity effects 0.2, half-life 138 sessions": {"entity_effect": 0.2},
    "leak 0.02, entity": {"leak": 0.02, "channels": ("entity",)},
}  # fmt: skip
DRIFTS = [
    ("trend", 0.0), ("random walk", 0.0), ("momentum", 0.0), ("nothing", 0.0),
    ("nothing", 0.2), ("momentum", 0.2), ("random walk", 0.2),
]  # fmt: skip
CONSTANT: dict[str, dict[str, object]] = {
    "constant skill 0.03, share": {"skill": 0.03},
    "constant skill 0.10, share": {"skill": 0.10},
    "constant skill 0.10, share, 120 sessions after": {"skill": 0.10, "cutoff_fraction": 0.8975},
    "constant skill 0.10, share, volatility doubles": {"skill": 0.10, "volatility_break": 2.0},
    "constant skill 0.03, units, volatility doubles": {
        "skill": 0.03, "skill_constant_in": "units", "volatility_break": 2.0,
    },
}  # fmt: skip


def draw(changes: dict[str, object], seed: int) -> tuple[SyntheticAudit, Layout]:
    """A panel without twins, and its plans."""
    config = SyntheticConfig(seed=seed, num_twins=0, channels=("common",), **changes)  # type: ignore[arg-type]  # names are checked by the class
    drawn = simulate(config)
    return drawn, build_layout(drawn.panel, CONFIG)


def contrast_p(drawn: SyntheticAudit, layout: Layout, plan: Plan) -> dict[str, float]:
    """p-values of the common channel by normalisation, and the larger one."""
    book = channel_book(drawn.panel, drawn.embedding, "common")
    skill = purged_skill(book, layout.views["common"].unshifted(), plan)
    session = drawn.panel.session_of(parse_date(drawn.cutoff, "cutoff"))
    found = channel_contrast(skill.deviation, layout, "common", session)
    return found.p_by_normalisation | {"both": found.p_value}


def clusters_p(changes: dict[str, object], seed: int) -> dict[str, float]:
    """p-values of the entity channel's contrast, with either kind of clusters alone in charge."""
    config = SyntheticConfig(
        seed=seed, num_entities=30, num_sessions=420, rows_per_entity=420, dimension=8,
        num_twins=0, cutoff_fraction=0.7, **changes,  # type: ignore[arg-type]  # names are checked by the class
    )  # fmt: skip
    drawn = simulate(config)
    layout = build_layout(drawn.panel, ENTITY_CONFIG)
    view = layout.views["entity"]
    book = channel_book(drawn.panel, drawn.embedding, "entity")
    gain = purged_skill(book, view.unshifted(), layout.purged["entity"]).deviation
    session = drawn.panel.session_of(parse_date(drawn.cutoff, "cutoff"))
    by_date = contrast(
        gain=gain, target=view.target, session=view.session, cutoff_session=session,
        gap=ENTITY_CONFIG.gap_sessions, length=layout.length,
        total_variance=total_variance(layout),
    )  # fmt: skip
    both = channel_contrast(gain, layout, "entity", session)
    return {"dates": by_date.p_value, "dates and entities": both.p_value}


def drifting(kind: str, leak: float, seed: int) -> tuple[Panel, dict[str, np.ndarray], str]:
    """A panel, the vectors of a model and of three twins, and the cutoff.

    Args:
        kind: what all entities have in common besides noise: a trend, the level of a random walk,
            noise that persists, or nothing.
        leak: R2 of one column for that noise, before the cutoff.
        seed: of the panel.
    """
    num_dates, num_entities, size = 420, 30, 8
    cutoff = 7 * num_dates // 10
    rng = np.random.default_rng(seed)
    shock = rng.standard_normal(num_dates)
    if kind == "momentum":
        for at in range(1, num_dates):
            shock[at] += 0.3 * shock[at - 1]
    levels = {"trend": np.linspace(-1, 1, num_dates),
              "random walk": np.cumsum(0.1 * rng.standard_normal(num_dates))}  # fmt: skip
    common = shock + levels.get(kind, 0.0)
    y = common[:, None] + rng.standard_normal((num_dates, num_entities))
    time = np.linspace(0, 1, num_dates)
    columns = [np.cos(np.pi * wave * time) for wave in range(4)] + [np.r_[0.0, common[:-1]]]
    columns += [rng.standard_normal(num_dates) for _ in range(size - len(columns))]
    if leak:
        known = np.where(np.arange(num_dates) < cutoff, shock, rng.standard_normal(num_dates))
        columns[-1] = known + np.sqrt(1 / leak - 1) * rng.standard_normal(num_dates)
    shape = (num_dates, num_entities, size)
    vectors = np.stack(columns, axis=1)[:, None, :] + 0.3 * rng.standard_normal(shape)
    named = {"model": vectors} | {f"twin {n}": rng.standard_normal(shape) for n in range(3)}
    days = np.busday_offset("2018-01-01", np.arange(num_dates), roll="forward")
    date = np.repeat(days.astype("datetime64[us]"), num_entities)
    panel = make_panel(
        entity=np.tile([f"e{number:02}" for number in range(num_entities)], num_dates),
        date=date, label_start=date, label_end=date, y=y.ravel(),
        features=np.empty((y.size, 0)), feature_names=(), name=kind,
    )  # fmt: skip
    return panel, {name: v.reshape(y.size, size) for name, v in named.items()}, str(days[cutoff])


def drift_claims(kind: str, leak: float, seed: int) -> dict[str, bool]:
    """Whether the model is said to know the future, with and without the condition."""
    panel, vectors, cutoff = drifting(kind, leak, seed)
    model, condition = vectors.pop("model"), verdict.BRIEF_PART
    found = {}
    for name, part in (("without", -np.inf), ("with", condition)):
        verdict.BRIEF_PART = part
        config = replace(CONFIG, positive_control=0.0)
        result = run_audit(panel, {"m": model}, {"m": cutoff}, twins=vectors, config=config)
        found[name] = result.models[0].verdict == "knows_the_future"
    verdict.BRIEF_PART = condition
    return found


def forward_plan(layout: Layout) -> Plan:
    """The purged folds, their penalties chosen by windows that go forward in time."""
    plan, times = layout.purged["common"], layout.views["common"].times
    folds, windows = [], []
    for fold in plan.folds:
        own = forward_windows(times, fold.train, num_windows=3)
        held = tuple(range(len(windows), len(windows) + len(own)))
        windows += own
        folds.append(replace(fold, windows=held))
    return Plan(
        protocol="forward", folds=tuple(folds), windows=tuple(windows), num_rows=plan.num_rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--panels", type=int, default=400)
    parser.add_argument("--power-panels", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table: dict[str, dict[str, object]] = {}
    for name, changes in CONSTANT.items():
        claims = dict.fromkeys(("own", "pooled", "both"), 0)
        for seed in range(arguments.panels):
            drawn, layout = draw(changes, seed)
            found = contrast_p(drawn, layout, layout.purged["common"])
            for key in claims:
                claims[key] += found[key] <= LEVEL
        table[name] = {"panels": arguments.panels} | claims
        print(name, table[name], flush=True)
    for name, changes in EFFECTS.items():
        rejected = {"dates": 0, "dates and entities": 0}
        for seed in range(arguments.panels):
            for key, p_value in clusters_p(changes, seed).items():
                rejected[key] += p_value <= LEVEL
        table[name] = {"panels": arguments.panels} | rejected
        print(name, table[name], flush=True)
    for kind, leak in DRIFTS:
        called = {"without": 0, "with": 0}
        for seed in range(arguments.panels):
            for key, claim in drift_claims(kind, leak, seed).items():
                called[key] += claim
        name = f"{kind}, leak {leak:g}" if leak else kind
        table[name] = {"panels": arguments.panels} | called
        print(name, table[name], flush=True)
    found_by = {"one more block left out": 0, "windows that go forward": 0}
    for seed in range(arguments.power_panels):
        drawn, layout = draw({"leak": 0.03}, seed)
        plans = (layout.purged["common"], forward_plan(layout))
        for key, plan in zip(found_by, plans, strict=True):
            found_by[key] += contrast_p(drawn, layout, plan)["both"] <= LEVEL
    table["leak 0.03, penalties chosen by"] = {"panels": arguments.power_panels} | found_by
    text = json.dumps(table, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
