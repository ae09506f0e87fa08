"""Three choices of the audit that simulation decided: the figures of docs/audit.md.

    python benchmarks/audit_design.py --panels 400

*Normalisation*: how often the contrast at the cutoff rejects when skill is constant, tested with
the variance of each side, with the pooled one, and with both (the larger p-value). *Penalties*:
how often a leak is found when purged k-fold chooses penalties by leaving out one more block, and
by windows that go forward in time. Common channel, level 5%, no reference, panels of 300
entities x 30 of 1,171 dates. *Clusters*: how often the entity channel's contrast rejects when all
there is are effects of entities that come and go, with date blocks alone and with entities as
clusters too, and how often either finds a leak; 30 entities x 420 dates, cutoff after 70% of them.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from headrace.audit import AuditConfig
from headrace.audit.boundary import contrast
from headrace.audit.channels import channel_book
from headrace.audit.conclude import channel_contrast
from headrace.audit.config import parse_date
from headrace.audit.folds import Plan, forward_windows
from headrace.audit.measure import Layout, build_layout
from headrace.audit.skill import purged_skill
from headrace.audit.synthetic import SyntheticAudit, SyntheticConfig, simulate
from headrace.audit.tables import total_variance

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
