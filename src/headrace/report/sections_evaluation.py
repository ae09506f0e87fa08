"""The audit's sections on what training removed, what the field prints, and controls.

Each function turns records into a :class:`~headrace.report.page.Section`. A part that the
audit does not hold becomes a sentence that says so and what would supply it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.report.figures import curves, forest, theme
from headrace.report.page import Block, Note, Paragraph, Section, Table, picture
from headrace.report.sections_audit import day
from headrace.report.text import MISSING, count, number, p_cell, percent

if TYPE_CHECKING:
    from headrace.report.records import Node
    from headrace.report.sections_audit import Quantities


def reduction(audit: Node, quantities: Quantities) -> Section:
    """What training removed, with intervals."""
    groups = []
    rows = []
    for index, node in enumerate(audit.children("reductions")):
        mine = [
            (key, found)
            for key, found in quantities.items()
            if key.startswith(f"reductions[{index}].")
        ]
        title = f"{node.text('base')} minus {node.text('trained')}"
        groups.append(
            forest.Group(
                heading=title,
                rows=[
                    forest.Row(label=found.label, value=found.value, low=found.low, high=found.high)
                    for _, found in mine
                ],
            )
        )
        rows += [
            [
                title, found.label, found.written(), p_cell(found.p_value),
                f"{count(found.n)} {found.n_unit}",
            ]
            for _, found in mine
        ]  # fmt: skip
    if not groups:
        return Section(
            name="reduction",
            title="What training removed",
            short="Reduction",
            blocks=[
                Note(
                    kind="missing",
                    text="No pair of models was compared, so there is no reduction. Name a base "
                    "and a trained model in the audit to get one.",
                )
            ],
        )
    return Section(
        name="reduction",
        title="What training removed",
        short="Reduction",
        blocks=[
            Paragraph(
                text="Skill of unknown origin first, the premium beside it: same rows, same "
                "shifts. Intervals of the width published elsewhere cannot resolve differences "
                "of 0.07."
            ),
            picture(
                "reduction",
                lambda width, identity: forest.draw(
                    groups, width, identity, "Reduction with intervals", "base minus trained"
                ),
                "",
            ),
            Table(
                name="reduction",
                columns=("Pair", "Statistic", "Reduction", "p", "n"),
                rows=rows,
                numeric=frozenset({2, 3, 4}),
            ),
        ],
    )


def evaluation(audit: Node, quantities: Quantities) -> Section:
    """What the field prints, and the leakage of the evaluation itself."""
    rows = []
    for index, model in enumerate(audit.children("models")):
        for name in ("r2_off", "r2_on", "premium", "premium_matched", "leakage"):
            found = quantities.get(f"models[{index}].evaluation.{name}")
            if found is None:
                continue
            shifted = (
                f"{number(found.null_median)} ± {number(found.null_sd)}"
                if found.null_median is not None
                else MISSING
            )
            rows.append(
                [
                    model.text("name"), found.label, found.written(), shifted,
                    f"{count(found.n)} {found.n_unit}",
                ]
            )  # fmt: skip
    blocks: list[Block] = []
    if rows:
        blocks += [
            Paragraph(
                text="R² with dates mixed, R² in order of time, and their difference are printed "
                "because the field prints them. They carry no verdict here: an untrained network "
                "reading the date gets a premium too. C measures what the evaluation itself leaks."
            ),
            Table(
                name="evaluation",
                columns=("Model", "Statistic", "Value", "Shifted dates, ± SD", "n"),
                rows=rows,
                numeric=frozenset({2, 3, 4}),
            ),
        ]
    else:
        blocks.append(Note(kind="missing", text="R² and premium are not in this audit."))
    blocks += _published(audit, quantities)
    return Section(name="evaluation", title="What the field prints", short="Premium", blocks=blocks)


def _published(audit: Node, quantities: Quantities) -> list[Block]:
    rows: list[list[str]] = []
    findings: list[list[str]] = []
    for index, model in enumerate(audit.children("models")):
        published = model.maybe("published")
        if published is None:
            continue
        name = model.text("name")
        draws = published.integer("num_draws")
        failed = published.integer("num_failed_draws")
        for statistic in ("premium", "r2_on", "r2_off"):
            found = quantities[f"models[{index}].published.{statistic}"]
            rows.append([name, found.label, found.written(), f"{draws} draws, {failed} failed"])
        for finding in published.children("findings"):
            present = {True: "present", False: "absent"}.get(finding.raw("present"), "cannot tell")
            findings.append([name, finding.text("name"), present, finding.text("detail")])
    if not rows:
        return [Note(kind="missing", text="The published protocol (vessl-2026) was not run.")]
    return [
        Table(
            name="published",
            columns=("Model", "Statistic", "Value", "Bootstrap"),
            rows=rows,
            numeric=frozenset({2}),
            caption="The published evaluation to the letter, for comparison only.",
        ),
        Table(
            name="findings",
            columns=("Model", "Known defect", "Here", "Detail"),
            rows=findings,
            caption="Defects of the published evaluation, looked for on this panel.",
        ),
    ]


def controls(audit: Node, quantities: Quantities) -> Section | None:
    """Loss by document month and the slope over cutoffs, where the audit has them."""
    lines, rows = [], []
    for index, model in enumerate(audit.children("models")):
        months = model.children("perplexity")
        if not months:
            continue
        found = [quantities[f"models[{index}].perplexity[{i}].loss"] for i in range(len(months))]
        places = [day(f"{m.text('month')}-01", m.where) for m in months]
        name = model.text("name")
        lines.append(
            curves.Line(
                name=name,
                x=[place.year + (place.month - 0.5) / 12 for place in places],
                y=[item.value if item.value is not None else float("nan") for item in found],
                colour=theme.series_colour(index),
            )
        )
        rows += [
            [name, month.text("month"), item.written(), f"{count(item.n)} {item.n_unit}"]
            for month, item in zip(months, found, strict=True)
        ]
    slope = [item for key, item in quantities.items() if key.startswith("slope.")]
    blocks: list[Block] = []
    for control in audit.children("controls"):
        planted = percent(control.number("planted_share") or 0.0)
        verb = "was found" if control.raw("detected") is True else "was not found"
        blocks.append(
            Paragraph(
                text=f"Positive control: a leak worth {planted} of the variance was planted before "
                f"{control.text('cutoff')}, and it {verb}."
                + ("" if verb == "was found" else " The absence of a claim then says little.")
            )
        )
    if lines:
        blocks.append(
            picture(
                "perplexity",
                lambda width, identity: curves.draw(
                    lines, width, identity, "Loss by month of the document",
                    y_title="loss per token, nats", x_title="month of the document",
                ),
                "A model that has read a month's documents finds them easier.",
                data=rows,
            )
        )  # fmt: skip
    if slope:
        blocks.append(
            Table(
                name="slope",
                columns=("Statistic", "Value", "p", "n"),
                rows=[
                    [
                        item.label, item.written(), p_cell(item.p_value),
                        f"{count(item.n)} {item.n_unit}",
                    ]
                    for item in slope
                ],
                numeric=frozenset({1, 2, 3}),
                caption="Slope over models of different knowledge cutoffs.",
            )
        )  # fmt: skip
    return (
        Section(name="controls", title="Controls", short="Controls", blocks=blocks)
        if blocks
        else None
    )
