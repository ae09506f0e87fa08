"""Every figure with its n, interval, protocol and stack; and what the report was made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.report.page import Block, Facts, Heading, Note, Section, Table
from headrace.report.text import MISSING, count, p_cell, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.report.quantities import Quantity
    from headrace.report.records import Node, Run, Source

_STACK_DIGITS = 12


def panel_facts(audit: Node) -> Facts:
    """What was audited, in numbers."""
    panel = audit.child("panel")
    pairs = [
        ("Panel", panel.text("name")),
        ("First date", panel.text("first_date")),
        ("Last date", panel.text("last_date")),
        ("Entities", count(panel.integer("num_entities"))),
        ("Dates", count(panel.integer("num_dates"))),
        ("Rows with embeddings", count(panel.integer("num_rows"))),
        ("Rows with a target", count(panel.integer("num_matrix_rows"))),
        ("Matrix filled", percent(panel.number("coverage") or 0.0, 3)),
        ("Label length", f"{panel.integer('label_sessions')} sessions"),
    ]
    features = panel.texts("features")
    if features:
        pairs.append(("Numeric features", ", ".join(features)))
    return Facts(pairs=pairs)


def panel_notes(audit: Node) -> list[Block]:
    """What the panel's makers say about it, and what was dropped."""
    panel = audit.child("panel")
    blocks: list[Block] = [Note(kind="warning", text=text) for text in panel.texts("notes")]
    dropped = panel.maybe("dropped")
    for reason in dropped.names() if dropped is not None else ():
        assert dropped is not None
        rows = dropped.integer(reason)
        if rows:
            blocks.append(Note(kind="warning", text=f"{count(rows)} rows dropped: {reason}."))
    return blocks


def every_figure(audit: Node, quantities: Mapping[str, Quantity]) -> Section:
    """One row a quantity: value, interval, n, p, method, protocol, stack."""
    blocks: list[Block] = []
    models = list(dict.fromkeys(item.model for item in quantities.values()))
    for model in models:
        mine = [item for item in quantities.values() if item.model == model]
        stacks = list(dict.fromkeys(item.stack for item in mine))
        blocks.append(Heading(text=model or "Over all models"))
        blocks.append(
            Table(
                name=f"figures-{models.index(model)}",
                columns=("Figure", "Value and interval", "n", "p", "Made by"),
                rows=[_row(item, name_stack=len(stacks) > 1) for item in mine],
                numeric=frozenset({1, 2, 3}),
                caption="Stack " + ", ".join(stack[:_STACK_DIGITS] for stack in stacks) + ".",
            )
        )
    if not blocks:
        blocks.append(Note(kind="missing", text="The audit holds no figures."))
    if audit.raw("mixed_stacks") is True:
        blocks.append(
            Note(
                kind="failed",
                text="Models of different stacks are compared here because it was forced. "
                "Differences between stacks alone have been as large as published effects.",
            )
        )
    return Section(name="figures", title="Every figure", short="Figures", blocks=blocks)


def _row(item: Quantity, *, name_stack: bool) -> list[str]:
    level = "" if item.level == 0.95 or item.low is None else f" ({percent(item.level)})"
    tests = [p_cell(item.p_value)] if item.p_value is not None else []
    if item.p_adjusted is not None:
        tests.append(f"{item.adjustment or 'adjusted'} {p_cell(item.p_adjusted)}")
    method = [item.method.replace("_", " ")] if item.method else []
    if item.num_blocks is not None:
        clusters = "entities" if item.method == "entity_cluster_t" else "blocks"
        method.append(f"{item.num_blocks} {clusters}")
    if item.null:
        method.append(f"{len(item.null)} shifts")
    if item.twins:
        method.append(f"{len(item.twins)} twins")
    method.append(item.protocol)
    if name_stack:
        method.append(f"stack {item.stack[:_STACK_DIGITS]}")
    return [
        item.label + (f". {item.note}" if item.note else ""),
        item.written() + level,
        f"{count(item.n)} {item.n_unit}",
        "; ".join(tests) or MISSING,
        ", ".join(method),
    ]


def provenance(audit: Node | None, runs: Sequence[Run], sources: Sequence[Source]) -> Section:
    """Stacks, settings and the files this report was made from."""
    blocks: list[Block] = []
    for run in runs:
        versions = run.record.maybe("versions")
        if versions is not None:
            blocks.append(Heading(text=f"Training stack of {run.name}"))
            pairs = [(name, str(versions.raw(name))) for name in versions.names()]
            blocks.append(Facts(pairs=pairs))
    if audit is not None:
        for fingerprint, stack in audit.items("stacks"):
            blocks.append(Heading(text=f"Stack {fingerprint[:_STACK_DIGITS]}"))
            blocks.append(Facts(pairs=[(key, str(stack.raw(key))) for key in stack.names()]))
        blocks += _embeddings(audit)
        settings = audit.maybe("settings")
        if settings is not None and settings.names():
            blocks.append(Heading(text="Settings of the audit"))
            pairs = [(key, _setting(settings.raw(key))) for key in settings.names()]
            blocks.append(Facts(pairs=pairs))
    blocks.append(Heading(text="Made from"))
    blocks.append(
        Table(
            name="sources",
            columns=("Record", "File", "SHA-256"),
            rows=[[source.kind, source.path, source.sha256[:16]] for source in sources],
        )
    )
    return Section(
        name="provenance", title="Where the numbers come from", short="Provenance", blocks=blocks
    )


def _embeddings(audit: Node) -> list[Block]:
    rows = []
    for model in audit.children("models"):
        node = model.child("embedding")
        layer = node.raw("layer")
        rows.append(
            [
                model.text("name"),
                count(node.integer("dimension")),
                count(node.integer("num_rows")),
                node.text("template", MISSING),
                node.text("pooling", MISSING),
                MISSING if layer is None else str(layer),
                (node.text("weights", "") or node.text("sha256", "") or MISSING)[:_STACK_DIGITS],
                model.text("stack")[:_STACK_DIGITS],
            ]
        )
    return [
        Heading(text="Embeddings"),
        Table(
            name="embeddings",
            columns=(
                "Model", "Dimension", "Rows", "Template", "Pooling", "Layer", "Weights", "Stack",
            ),
            rows=rows,
            numeric=frozenset({1, 2}),
        ),
    ]  # fmt: skip


def _setting(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or MISSING
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or MISSING
    return MISSING if value is None else str(value)
