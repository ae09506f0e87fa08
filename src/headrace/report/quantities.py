"""Every number of an audit that a reader may quote, with what is needed to quote it.

Walks an audit record and gives each figure a key, the model it belongs to and a label in
words. The appendix table, the pictures and ``report.json`` all draw on this one list, so
none of them can show a number that the others do not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.report.text import with_interval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.report.records import Node

CHANNEL_NAMES = {"common": "common channel", "entity": "entity channel"}
"""Channel → words: moves that all entities share on a date, and the rest."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number. Fields are those of the audit's figures; ``key`` is its place in the record.

    Attributes:
        key: dotted path, ``"models.cutoff.skill.common"``.
        group: section of the report it belongs to.
        model: the model, or ``"base → trained"``, or empty.
        label: what it is, in words.
        value, low, high, level: estimate and interval.
        n, n_unit: observations behind it.
        method, num_blocks: how the interval was made.
        p_value, p_adjusted, adjustment: the test.
        null, twins: values under shifted dates and of untrained twins.
        null_median, null_sd: of the shifted-date values.
        protocol, stack, note: version, fingerprint, and what must be read beside it.
    """

    key: str
    group: str
    model: str
    label: str
    value: float | None
    low: float | None
    high: float | None
    level: float
    n: int
    n_unit: str
    method: str
    num_blocks: int | None
    p_value: float | None
    p_adjusted: float | None
    adjustment: str
    null: tuple[float, ...]
    twins: tuple[float, ...]
    null_median: float | None
    null_sd: float | None
    protocol: str
    stack: str
    note: str

    def written(self) -> str:
        """Value and interval as the page shows them."""
        return with_interval(self.value, self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """All fields, distributions included."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"null": list(self.null), "twins": list(self.twins)}


def read(node: Node, *, key: str, group: str, model: str, label: str) -> Quantity:
    """One figure of the record.

    Raises:
        DataError: a field is missing or of a wrong kind.
    """
    null, twins = node.maybe("null"), node.maybe("twins")
    level = node.number("level")
    return Quantity(
        key=key,
        group=group,
        model=model,
        label=label,
        value=node.number("value"),
        low=node.number("low"),
        high=node.number("high"),
        level=0.95 if level is None else level,
        n=node.integer("n"),
        n_unit=node.text("n_unit"),
        method=node.text("method", ""),
        num_blocks=node.integer("num_blocks") if "num_blocks" in node else None,
        p_value=node.number("p_value"),
        p_adjusted=node.number("p_adjusted"),
        adjustment=node.text("adjustment", ""),
        null=tuple(null.numbers("values")) if null else (),
        twins=tuple(twins.numbers("values")) if twins else (),
        null_median=null.number("median") if null else None,
        null_sd=null.number("sd") if null else None,
        protocol=node.text("protocol"),
        stack=node.text("stack"),
        note=node.text("note", ""),
    )


_EVALUATION = (
    ("premium", "leakage premium Π"),
    ("premium_matched", "matched premium"),
    ("r2_on", "R², dates mixed (leakage on)"),
    ("r2_off", "R², chronological (leakage off)"),
    ("leakage", "evaluation leakage C"),
)
_SIDES = (("before", "gain before the cutoff"), ("after", "gain after the cutoff"))


def collect(audit: Node) -> dict[str, Quantity]:
    """All quantities of an audit by key, in reading order."""
    found: dict[str, Quantity] = {}
    for index, model in enumerate(audit.children("models")):
        name = model.text("name")
        for key, group, label, node in _of_model(model):
            path = f"models[{index}].{key}"
            found[path] = read(node, key=path, group=group, model=name, label=label)
    for index, reduction in enumerate(audit.children("reductions")):
        pair = f"{reduction.text('base')} → {reduction.text('trained')}"
        for key, label, node in _of_reduction(reduction):
            path = f"reductions[{index}].{key}"
            found[path] = read(node, key=path, group="reduction", model=pair, label=label)
    for index, control in enumerate(audit.children("controls")):
        for channel, node in control.items("contrasts"):
            path = f"controls[{index}].contrasts.{channel}"
            words = CHANNEL_NAMES.get(channel, channel)
            label = f"planted leak, before minus after {control.text('cutoff')}, {words}"
            found[path] = read(
                node, key=path, group="controls", model="positive control", label=label
            )
    for name, node in audit.items("slope"):
        path = f"slope.{name}"
        label = f"gain per year of cutoff, {CHANNEL_NAMES.get(name, name)}"
        found[path] = read(node, key=path, group="slope", model="", label=label)
    return found


def _of_model(model: Node) -> Iterator[tuple[str, str, str, Node]]:
    for channel, node in model.items("skill"):
        words = CHANNEL_NAMES.get(channel, channel)
        yield f"skill.{channel}", "skill", f"skill (correlation), {words}", node
    for channel, contamination in model.items("contamination"):
        words = CHANNEL_NAMES.get(channel, channel)
        key = f"contamination.{channel}"
        for side, label in (*_SIDES, ("contrast", "gain before minus after")):
            node = contamination.child(side)
            yield f"{key}.{side}", "contamination", f"{label}, {words}", node
    evaluation = model.maybe("evaluation")
    for name, label in _EVALUATION if evaluation is not None else ():
        assert evaluation is not None
        yield f"evaluation.{name}", "evaluation", label, evaluation.child(name)
    recall = model.maybe("recall")
    for side in ("before", "after") if recall is not None else ():
        node_or_none = recall.maybe(side) if recall is not None else None
        if node_or_none is not None:
            yield f"recall.{side}", "recall", f"recall probe, {side} the cutoff", node_or_none
    yield from _over_time(model)
    published = model.maybe("published")
    for name in ("premium", "r2_on", "r2_off") if published is not None else ():
        assert published is not None
        label = f"{dict(_EVALUATION)[name]}, as published"
        yield f"published.{name}", "published", label, published.child(name)


def _over_time(model: Node) -> Iterator[tuple[str, str, str, Node]]:
    for index, period in enumerate(model.children("periods")):
        span = f"{period.text('start')} to {period.text('end')}"
        for channel in ("common", "entity"):
            node = period.maybe(channel)
            if node is not None:
                label = f"gain, {CHANNEL_NAMES[channel]}, {span}"
                yield f"periods[{index}].{channel}", "periods", label, node
    for index, split in enumerate(model.children("walk_forward")):
        span = f"{split.text('test_start')} to {split.text('test_end')}"
        label = f"walk-forward R², {split.text('label')}, tested {span}"
        yield f"walk_forward[{index}].r2", "walk_forward", label, split.child("r2")
    for index, row in enumerate(model.children("embargo")):
        sessions = row.integer("embargo_sessions")
        for name, label in (("r2_off", "R², chronological"), ("premium", "leakage premium Π")):
            words = f"{label}, embargo {sessions} sessions"
            yield f"embargo[{index}].{name}", "embargo", words, row.child(name)
    for index, row in enumerate(model.children("perplexity")):
        words = f"loss on documents of {row.text('month')}"
        yield f"perplexity[{index}].loss", "perplexity", words, row.child("loss")


def _of_reduction(reduction: Node) -> Iterator[tuple[str, str, Node]]:
    for channel, node in reduction.items("skill"):
        words = CHANNEL_NAMES.get(channel, channel)
        yield f"skill.{channel}", f"skill (correlation), {words}", node
    yield "premium", "leakage premium Π", reduction.child("premium")
    walk_forward = reduction.maybe("walk_forward")
    if walk_forward is not None:
        yield "walk_forward", "walk-forward R², pooled", walk_forward
    for index, row in enumerate(reduction.children("embargo")):
        sessions = row.integer("embargo_sessions")
        for name, label in (("r2_off", "R², chronological"), ("premium", "matched premium")):
            yield (
                f"embargo[{index}].{name}",
                f"{label}, embargo {sessions} sessions",
                row.child(name),
            )
    published = reduction.maybe("published")
    if published is not None:
        yield "published", "premium reduction as published", published
