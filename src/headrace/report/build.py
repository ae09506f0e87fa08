"""From result records to a page: which records there are decides which parts there are.

A missing part becomes a sentence that says what is missing and what would supply it; a
record that cannot be read is an error. Owns the order of the report, computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import headrace
from headrace.errors import ConfigError
from headrace.report import (
    appendix,
    cards,
    records,
    sections_audit,
    sections_corpus,
    sections_evaluation,
)
from headrace.report.figures import null
from headrace.report.page import (
    Block,
    Facts,
    Note,
    Page,
    Paragraph,
    Picture,
    Section,
    Table,
    picture,
)
from headrace.report.quantities import Quantity, collect
from headrace.report.sections_training import training
from headrace.report.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from headrace.report.records import Corpus, Node, Run, Source

SCHEMA, SCHEMA_VERSION = "headrace.report", 1
DEFAULT_TITLE = "Point-in-time report"


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a report is made from, read and checked."""

    corpora: Sequence[Corpus] = ()
    runs: Sequence[Run] = ()
    audit: Node | None = None
    sources: Sequence[Source] = field(default_factory=tuple)


def read_records(
    *, corpora: Sequence[Path] = (), runs: Sequence[Path] = (), audit: Path | None = None
) -> Records:
    """Read all records.

    Raises:
        ConfigError: nothing was given, or a path is not there.
        DataError: a record is not what it should be.
    """
    if not corpora and not runs and audit is None:
        raise ConfigError(
            "a report needs at least one record: none was given",
            remedy="name a corpus folder, a run folder or an audit.json: "
            "--corpus DIR --run DIR --audit FILE",
        )
    sources: list[Source] = []
    read_corpora, read_runs = [], []
    for folder in corpora:
        corpus, found = records.read_corpus(folder)
        read_corpora.append(corpus)
        sources += found
    for folder in runs:
        run, found = records.read_run(folder)
        read_runs.append(run)
        sources += found
    node = None
    if audit is not None:
        node, source = records.read_audit(audit)
        sources.append(source)
    return Records(corpora=read_corpora, runs=read_runs, audit=node, sources=sources)


def build_page(
    found: Records, *, title: str = DEFAULT_TITLE, introduction: str = ""
) -> tuple[Page, list[Quantity]]:
    """The page and all quantities on it; ``introduction`` stands before the verdicts."""
    quantities = {} if found.audit is None else collect(found.audit)
    made = [] if found.audit is None else cards.build(found.audit, quantities)
    sections = [sections_corpus.corpus(found.corpora), training(found.runs)]
    if found.audit is not None:
        sections.append(_panel(found.audit))
        sections.append(sections_audit.around_cutoff(found.audit, quantities))
        sections.append(sections_audit.over_time(found.audit, quantities))
        sections.append(sections_evaluation.reduction(found.audit, quantities))
        sections.append(sections_evaluation.evaluation(found.audit, quantities))
        controls = sections_evaluation.controls(found.audit, quantities)
        sections += [controls] if controls is not None else []
    num_failed = len(_notes(sections, "failed"))
    sections.append(_checks(found, sections))
    if found.audit is not None:
        sections.append(appendix.every_figure(found.audit, quantities))
    sections.append(appendix.provenance(found.audit, found.runs, found.sources))
    page = Page(
        title=title,
        headline=cards.headline(made, trained=bool(found.runs)),
        subtitle=_subtitle(found),
        cards=made,
        front=[
            *([Paragraph(text=introduction)] if introduction else []),
            *_front(found, quantities, num_failed),
        ],
        sections=sections,
        footer=(
            (
                f"Made by headrace {headrace.__version__} from result records only; nothing was "
                "computed here and nothing was loaded from elsewhere."
            ),
        ),
    )
    return page, list(quantities.values())


def _subtitle(found: Records) -> str:
    parts = []
    if found.audit is not None:
        panel = found.audit.child("panel")
        parts.append(
            f"{panel.text('name')}: {plural(panel.integer('num_entities'), 'entity', 'entities')}, "
            f"{panel.text('first_date')} to {panel.text('last_date')}, "
            f"{plural(panel.integer('num_dates'), 'date')} and "
            f"{plural(panel.integer('num_rows'), 'forecast')} with embeddings"
        )
    if found.corpora:
        parts.append(f"{plural(len(found.corpora), 'corpus', 'corpora')}")
    if found.runs:
        parts.append(f"{plural(len(found.runs), 'training run')}")
    return "; ".join(parts) + "."


def _front(found: Records, quantities: Mapping[str, Quantity], num_failed: int) -> list[Block]:
    blocks: list[Block] = []
    if num_failed:
        checks = plural(num_failed, "check")
        words = f"{checks} failed: see the section “Checks that failed”."
        blocks.append(Note(kind="warning", text=words))
    if found.audit is None:
        blocks.append(
            Note(
                kind="missing",
                text="No audit was given: this report shows what was trained and says nothing "
                "about what the models know of the future.",
            )
        )
        return blocks
    at_panel = found.audit.child("panel").texts("notes")
    blocks += [
        Note(kind="warning", text=text)
        for text in found.audit.texts("warnings")
        if text not in at_panel
    ]
    if any(item.null for item in quantities.values()):
        twins = any(item.twins for item in quantities.values())
        circles = " Open circles are networks that never read a text." if twins else ""
        blocks.append(
            Paragraph(
                text="Look first at where each line falls. Grey is what the same numbers become "
                "when every cross-section of targets is moved to another date, so that there is "
                f"nothing to know.{circles} A line inside the grey is chance."
            )
        )
        blocks.append(
            picture("key", lambda width, identity: null.key(width, identity, twins=twins), "")
        )
    return blocks


def _panel(audit: Node) -> Section:
    blocks: list[Block] = [appendix.panel_facts(audit), *appendix.panel_notes(audit)]
    return Section(name="panel", title="What was audited", short="Panel", blocks=blocks)


def _notes(sections: Sequence[Section], kind: str) -> list[str]:
    return [
        block.text
        for section in sections
        for block in section.blocks
        if isinstance(block, Note) and block.kind == kind
    ]


def _checks(found: Records, sections: Sequence[Section]) -> Section:
    failed, missing = _notes(sections, "failed"), _notes(sections, "missing")
    listed: list[Block] = [
        Table(name="failed", columns=("Check that failed",), rows=[[text] for text in failed])
    ]
    if not failed:
        listed.clear()
        listed.append(Paragraph(text=_nothing_failed(found)))
    if missing:
        listed.append(
            Table(
                name="missing",
                columns=("What this report does not show",),
                rows=[[text] for text in missing],
            )
        )
    return Section(
        name="checks",
        title="Checks that failed, and what is missing",
        short="Checks",
        blocks=listed,
    )


def _nothing_failed(found: Records) -> str:
    if not found.corpora:
        return "No corpus was given, so none of its checks was looked at."
    return "No check of the corpora failed."


def to_json(
    page: Page,
    quantities: Sequence[Quantity],
    sources: Sequence[Source],
    *,
    created_at: datetime | None = None,
) -> dict[str, Any]:
    """The same report for programs; every number in it is on the page.

    ``created_at`` is now unless given.
    """
    moment = (created_at or datetime.now(UTC)).isoformat(timespec="seconds")
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "headrace_version": headrace.__version__,
        "created_at": moment,
        "title": page.title,
        "headline": page.headline,
        "models": [
            {
                "name": card.model,
                "cutoff": card.cutoff,
                "verdict": card.verdict,
                "headline": card.headline,
                "meaning": card.meaning,
                "summary": list(card.sentences),
                "cautions": list(card.cautions),
            }
            for card in page.cards
        ],
        "figures": [item.to_json() for item in quantities],
        "sections": [
            {"name": section.name, "title": section.title, "blocks": _blocks(section.blocks)}
            for section in page.sections
        ],
        "failed": page.notes("failed"),
        "missing": page.notes("missing"),
        "warnings": page.notes("warning"),
        "sources": [
            {"kind": source.kind, "path": source.path, "sha256": source.sha256}
            for source in sources
        ],
    }


def _blocks(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, Table):
            written.append(
                {
                    "table": block.name,
                    "columns": list(block.columns),
                    "rows": [list(row) for row in block.rows],
                }
            )
        elif isinstance(block, Facts):
            written.append({"facts": dict(block.pairs)})
        elif isinstance(block, Picture):
            written.append({"picture": block.name, "caption": block.caption, "data": block.data})
    return written
