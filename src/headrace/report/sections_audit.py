"""The audit's sections on time: around the cutoff, by period, walk-forward and embargo.

Each function turns records into a :class:`~headrace.report.page.Section`. A part that the
audit does not hold becomes a sentence that says so and what would supply it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING

from headrace.errors import DataError
from headrace.report.figures import curves, periods, theme
from headrace.report.page import Block, Note, Paragraph, Section, Table, picture
from headrace.report.quantities import CHANNEL_NAMES, Quantity
from headrace.report.text import count, number, p_cell

if TYPE_CHECKING:
    from headrace.report.records import Node

Quantities = Mapping[str, Quantity]


def day(text: str, where: str) -> date:
    """An ISO date of a record.

    Raises:
        DataError: it is none.
    """
    try:
        return date.fromisoformat(text[:10])
    except ValueError:
        raise DataError(
            f"{where}: {text!r} is not a date (YYYY-MM-DD)",
            remedy="make the record again with headrace audit",
        ) from None


def around_cutoff(audit: Node, quantities: Quantities) -> Section:
    """Skill by period, the contrast at the cutoff, and the recall probe."""
    references = list(
        dict.fromkeys(
            node.text("reference", "their reference")
            for model in audit.children("models")
            for _, node in model.items("contamination")
        )
    )
    blocks: list[Block] = [
        Paragraph(
            text="A model that only has honest skill has it on both sides of its own knowledge "
            f"cutoff. One that remembers what happened is better before.{_over(references)}"
        )
    ]
    drawn = _periods(audit, quantities)
    if drawn is not None:
        blocks.append(drawn)
    else:
        blocks.append(
            Note(kind="missing", text="Skill by period is not in this audit, so it is not drawn.")
        )
    rows = []
    for index, model in enumerate(audit.children("models")):
        for channel, node in model.items("contamination"):
            key = f"models[{index}].contamination.{channel}"
            contrast = quantities[f"{key}.contrast"]
            rows.append(
                [
                    model.text("name"),
                    CHANNEL_NAMES.get(channel, channel),
                    number(quantities[f"{key}.before"].value),
                    number(quantities[f"{key}.after"].value),
                    contrast.written(),
                    _tested(contrast),
                    number(node.number("detectable") or None),
                ]
            )
    if rows:
        blocks.append(
            Table(
                name="contamination",
                columns=(
                    "Model", "Channel", "Before", "After", "Difference", "p", "Detectable",
                ),
                rows=rows,
                numeric=frozenset({2, 3, 4, 5, 6}),
                caption=f"Gains over {' or '.join(references)}, as shares of the target's "
                "variance. Difference: before minus after, p one-sided. Detectable: the contrast "
                "that would have been seen with 80% probability; none where a channel predicts "
                "nothing.",
            )
        )  # fmt: skip
    else:
        blocks.append(
            Note(
                kind="missing",
                text="The contrast before and after a cutoff is not in this audit: it needs a "
                "model with a stated cutoff inside the panel's dates.",
            )
        )
    blocks.append(_recall(audit, quantities))
    return Section(
        name="cutoff", title="Before and after the cutoff", short="Cutoff", blocks=blocks
    )


def _tested(found: Quantity) -> str:
    adjusted = found.p_adjusted is not None
    return p_cell(found.p_adjusted if adjusted else found.p_value)


def _over(references: Sequence[str]) -> str:
    """What the gains were measured over, as a sentence with the space before it."""
    if any(reference.startswith("mean of") for reference in references):
        return (
            " The gain is measured over reference networks that cannot know, so that the dates "
            "themselves count for nothing."
        )
    models = [reference for reference in references if reference.startswith("model ")]
    if models:
        return (
            f" The gain is measured over {' or '.join(models)}, named as the reference: a model "
            "of its own time."
        )
    if references:
        return (
            " The gain is measured over the constant, so what the dates themselves tell is still "
            "in it."
        )
    return ""


def _periods(audit: Node, quantities: Quantities) -> Block | None:
    panels = []
    for channel in ("common", "entity"):
        tracks = []
        for index, model in enumerate(audit.children("models")):
            points = []
            for row, period in enumerate(model.children("periods")):
                found = quantities.get(f"models[{index}].periods[{row}].{channel}")
                if found is None or found.value is None:
                    continue
                points.append(
                    periods.Point(
                        start=day(period.text("start"), period.where),
                        end=day(period.text("end"), period.where),
                        value=found.value,
                        low=found.low,
                        high=found.high,
                    )
                )
            cutoff = model.text("cutoff", "")
            if points:
                tracks.append(
                    periods.Track(
                        name=model.text("name"),
                        points=points,
                        cutoff=day(cutoff, model.where) if cutoff else None,
                        colour=theme.series_colour(index),
                    )
                )
        if tracks:
            title = f"gain by period, {CHANNEL_NAMES[channel]}"
            panels.append(periods.Panel(title=title, tracks=tracks))
    if not panels:
        return None
    return picture(
        "periods",
        lambda width, identity: periods.draw(panels, width, identity, "Gain by period"),
        "Each point is one stretch of dates with its interval; a dashed line is that model's "
        "cutoff.",
        data=[
            [panel.title, track.name, point.start.isoformat(), point.end.isoformat(), point.value]
            for panel in panels
            for track in panel.tracks
            for point in track.points
        ],
    )


def _recall(audit: Node, quantities: Quantities) -> Block:
    rows = []
    for index, model in enumerate(audit.children("models")):
        for side in ("before", "after"):
            found = quantities.get(f"models[{index}].recall.{side}")
            if found is not None:
                tested = p_cell(found.p_value)
                words = f"{count(found.n)} {found.n_unit}"
                rows.append([model.text("name"), side, found.written(), tested, words])
    if not rows:
        return Note(
            kind="missing",
            text="No recall probe: the models were not asked to state dated market returns.",
        )
    return Table(
        name="recall",
        columns=("Model", "Cutoff", "Stated against true return", "p", "n"),
        rows=rows,
        numeric=frozenset({2, 3, 4}),
        caption="Recall probe: correlation of the market returns that the model states for given "
        "dates with what happened.",
    )


def over_time(audit: Node, quantities: Quantities) -> Section:
    """Walk-forward scores and the embargo table."""
    lines, rows, embargo = [], [], []
    for index, model in enumerate(audit.children("models")):
        name = model.text("name")
        steps: list[tuple[float, Quantity]] = []
        for row, split in enumerate(model.children("walk_forward")):
            found = quantities[f"models[{index}].walk_forward[{row}].r2"]
            tested = f"{split.text('test_start')} to {split.text('test_end')}"
            rows.append(
                [
                    name, split.text("label"), tested, count(split.integer("num_train")),
                    f"{count(found.n)} {found.n_unit}", found.written(),
                ]
            )  # fmt: skip
            if split.text("label") != "pooled" and found.value is not None:
                start = day(split.text("test_start"), split.where)
                end = day(split.text("test_end"), split.where)
                middle = (start.toordinal() + end.toordinal()) / 2
                steps.append((1 + (middle - 1) / 365.2425, found))
        if steps:
            lines.append(_walk_line(name, steps, theme.series_colour(index)))
        for row, node in enumerate(model.children("embargo")):
            key = f"models[{index}].embargo[{row}]"
            embargo.append(
                [
                    name, count(node.integer("embargo_sessions")),
                    quantities[f"{key}.r2_off"].written(), quantities[f"{key}.premium"].written(),
                ]
            )  # fmt: skip
    blocks: list[Block] = []
    if lines:
        blocks.append(
            picture(
                "walk",
                lambda width, identity: curves.draw(
                    lines, width, identity, "Walk-forward R² by test period",
                    y_title="R² out of sample", x_title="middle of the test period", zero=True,
                ),
                "Trained on what came before, purged and embargoed, tested on the next stretch.",
                data=rows,
            )
        )  # fmt: skip
    if rows:
        blocks.append(
            Table(
                name="walk-forward",
                columns=("Model", "Step", "Tested", "Train rows", "n", "R²"),
                rows=rows,
                numeric=frozenset({3, 4, 5}),
                caption="Walk-forward, expanding window. A negative R² is worse than the mean.",
            )
        )
    else:
        blocks.append(Note(kind="missing", text="Walk-forward scores are not in this audit."))
    if embargo:
        blocks.append(
            Table(
                name="embargo",
                columns=("Model", "Embargo, sessions", "R² chronological", "Matched premium"),
                rows=embargo,
                numeric=frozenset({1, 2, 3}),
                caption="Sessions left out of training before the test period begins.",
            )
        )
    else:
        blocks.append(Note(kind="missing", text="No embargo table: no embargo was asked for."))
    return Section(name="walk-forward", title="Walk-forward", short="Walk-forward", blocks=blocks)


def _walk_line(name: str, steps: Sequence[tuple[float, Quantity]], colour: str) -> curves.Line:
    whole = all(found.low is not None and found.high is not None for _, found in steps)
    x = [place for place, _ in steps]
    return curves.Line(
        name=name,
        x=x,
        y=[found.value or 0.0 for _, found in steps],
        low=[found.low or 0.0 for _, found in steps] if whole else (),
        high=[found.high or 0.0 for _, found in steps] if whole else (),
        points_x=x,
        points_y=[found.value or 0.0 for _, found in steps],
        colour=colour,
    )
