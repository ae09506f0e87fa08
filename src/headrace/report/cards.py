"""Page one: each model's verdict in plain words with the picture to look at first.

The verdict is the audit's; nothing here decides. Words are fixed per verdict, and the
audit's own sentences follow them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import DataError
from headrace.report.figures import forest, null, theme
from headrace.report.page import Block, Card, Note, Picture, picture
from headrace.report.quantities import CHANNEL_NAMES, Quantity
from headrace.report.text import count, p_value, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.report.records import Node

VERDICTS = {
    "too_little_data": (
        "Too little data to tell",
        "There is not enough data for a verdict: nothing can be concluded either way.",
    ),
    "not_identified": (
        "Cannot be told apart here",
        (
            "The panel holds no dates that lie clearly after this model's knowledge cutoff, so "
            "honest skill and knowledge of the future would look alike."
        ),
    ),
    "no_detectable_skill": (
        "No detectable skill",
        (
            "Forecasts built on this model do no better than the same forecasts with their dates "
            "shifted. Whatever it may know of the future is too little to be seen here."
        ),
    ),
    "skill": (
        "Skill, and no sign of the future",
        (
            "Forecasts built on this model beat chance, and no more before its knowledge cutoff "
            "than after it."
        ),
    ),
    "knows_the_future": (
        "Knows the future",
        (
            "Part of this model's score comes from texts written after the forecast's date. It "
            "would not be there in live use. Honest skill that fades at the cutoff for another "
            "reason would look the same."
        ),
    ),
}
"""Verdict → headline and what it means to someone who wants to use the model."""

_STRIPS = (
    ("skill.common", "Skill, common channel", "correlation with the market's move"),
    ("skill.entity", "Skill, entity channel", "correlation with the rest"),
    ("evaluation.premium", "Leakage premium Π", "R² mixed minus R² chronological"),
)


def build(audit: Node, quantities: Mapping[str, Quantity]) -> list[Card]:
    """One card a model, in the audit's order.

    Raises:
        DataError: a verdict that this report does not know.
    """
    models = audit.children("models")
    limits = {
        name: null.shared_limits(
            [
                (found.value, found.null, found.twins)
                for index in range(len(models))
                if (found := quantities.get(f"models[{index}].{name}")) and found.value is not None
            ]
        )
        for name, _, _ in _STRIPS
    }
    gains = [_gains(model, index, quantities)[0] for index, model in enumerate(models)]
    scale = forest.shared_limits([group for groups in gains for group in groups])
    return [_card(model, index, quantities, limits, scale) for index, model in enumerate(models)]


def _card(
    model: Node,
    index: int,
    quantities: Mapping[str, Quantity],
    limits: Mapping[str, tuple[float, float]],
    gain_limits: tuple[float, float],
) -> Card:
    verdict = model.text("verdict")
    if verdict not in VERDICTS:
        raise DataError(
            f"{model.where}.verdict: {verdict!r} is none of {', '.join(VERDICTS)}",
            remedy="run the audit again with this version of headrace",
        )
    headline, meaning = VERDICTS[verdict]
    share = model.number("share_of_r2")
    if verdict == "knows_the_future":
        channels = " and the ".join(
            CHANNEL_NAMES.get(name, name) for name in model.texts("channels")
        )
        if channels:
            meaning += f" It shows in the {channels}"
            meaning += f" and is worth {percent(share)} of the variance." if share else "."
    name = model.text("name")
    blocks: list[Block] = [
        block
        for block in (
            _null_picture(name, index, quantities, limits),
            _cutoff_picture(name, index, model, quantities, gain_limits),
        )
        if block is not None
    ]
    return Card(
        model=name,
        cutoff=model.text("cutoff", "") or None,
        verdict=verdict,
        headline=headline,
        meaning=meaning,
        sentences=model.texts("summary"),
        cautions=model.texts("cautions"),
        blocks=blocks,
    )


def _null_picture(
    name: str,
    index: int,
    quantities: Mapping[str, Quantity],
    limits: Mapping[str, tuple[float, float]],
) -> Picture | Note:
    strips: list[null.Strip] = []
    for statistic, title, _ in _STRIPS:
        found = quantities.get(f"models[{index}].{statistic}")
        if found is None or found.value is None:
            continue
        strips.append(
            null.Strip(
                title=title,
                note=_test(found, carries_verdict=statistic.startswith("skill")),
                observed=found.value,
                null=found.null,
                twins=found.twins,
                limits=limits[statistic],
            )
        )
    if not strips:
        return Note(
            kind="missing",
            text=f"{name} has no skill and no premium in this audit, so there is no picture of "
            "them against shifted dates.",
        )
    against = [
        words
        for words, drawn in (
            ("shifted dates", any(len(strip.null) for strip in strips)),
            ("twins", any(len(strip.twins) for strip in strips)),
        )
        if drawn
    ]
    label = f"{name}: statistics" + (f" against {' and '.join(against)}" if against else "")
    return picture(
        f"null-{index}",
        lambda width, identity: null.draw(strips, width, identity, label),
        "",
        data=[strip.title for strip in strips],
    )


def _test(found: Quantity, *, carries_verdict: bool) -> str:
    if not found.null:
        return "not tested by shifted dates"
    tested = p_value(found.p_adjusted if found.p_adjusted is not None else found.p_value)
    if not carries_verdict:
        return f"{tested}; carries no verdict" if tested else "carries no verdict"
    return f"{tested} by {len(found.null)} shifts" if tested else f"{len(found.null)} shifts"


def _gains(
    model: Node, index: int, quantities: Mapping[str, Quantity]
) -> tuple[list[forest.Group], str]:
    groups: list[forest.Group] = []
    reference = ""
    for channel, contamination in model.items("contamination"):
        reference = contamination.text("reference", "")
        key = f"models[{index}].contamination.{channel}"
        groups.append(
            forest.Group(
                heading=f"Gain, {CHANNEL_NAMES.get(channel, channel)}",
                note=_contrast(quantities[f"{key}.contrast"]),
                rows=cutoff_rows(key, quantities),
            )
        )
    return groups, reference


def _cutoff_picture(
    name: str,
    index: int,
    model: Node,
    quantities: Mapping[str, Quantity],
    limits: tuple[float, float],
) -> Picture | None:
    groups, reference = _gains(model, index, quantities)
    if not groups:
        return None
    over = f"over {reference}" if reference else "over its reference"
    return picture(
        f"cutoff-{index}",
        lambda width, identity: forest.draw(
            groups,
            width,
            identity,
            f"{name}: gain before and after the cutoff",
            f"covariance gain {over}, share of variance",
            limits=limits,
        ),
        "",
    )


def _contrast(contrast: Quantity) -> str:
    adjusted = contrast.p_adjusted is not None
    tested = p_value(contrast.p_adjusted if adjusted else contrast.p_value)
    return f"before against after: {tested}" if tested else ""


def cutoff_rows(key: str, quantities: Mapping[str, Quantity]) -> Sequence[forest.Row]:
    """Rows before and after the cutoff of one contamination record."""
    rows = []
    for side, colour in (("before", theme.ACCENT), ("after", theme.FUTURE)):
        found = quantities[f"{key}.{side}"]
        rows.append(
            forest.Row(
                label=f"{side} the cutoff, {count(found.n)} {found.n_unit}",
                value=found.value,
                low=found.low,
                high=found.high,
                colour=colour,
            )
        )
    return rows


def headline(cards: Sequence[Card], *, trained: bool = True) -> str:
    """The finding in one line; ``trained``: there is a run to report on."""
    if not cards:
        return "Trained, and not yet audited" if trained else "A corpus, not yet audited"
    if len(cards) == 1:
        return f"{cards[0].model}: {_lower(cards[0].headline)}"
    verdicts = {card.verdict for card in cards}
    every = "Both models" if len(cards) == 2 else f"All {len(cards)} models"
    if len(verdicts) == 1:
        return f"{every}: {_lower(cards[0].headline)}"
    guilty = [card.model for card in cards if card.verdict == "knows_the_future"]
    if guilty:
        knows = "knows" if len(guilty) == 1 else "know"
        return f"{' and '.join(guilty)} {knows} the future ({len(guilty)} of {len(cards)} models)"
    return "; ".join(f"{card.model}: {_lower(card.headline)}" for card in cards)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
