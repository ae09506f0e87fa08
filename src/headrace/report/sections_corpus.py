"""What the models were trained on: effective dates, counts, and the checks of each corpus.

The histogram covers everything that was offered and whose date the records still hold, and
marks each cutoff, so that a corpus that is not what it claims cannot be missed.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

from headrace.errors import DataError
from headrace.report.figures import dates
from headrace.report.page import Block, Heading, Note, Paragraph, Section, Table, picture
from headrace.report.text import MISSING, count, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.report.records import Corpus, Node

_COUNTS = (
    ("Documents", "documents"),
    ("Tokens", "tokens"),
    ("Characters", "characters"),
    ("Left out: after the cutoff", "after_cutoff"),
    ("Left out: damaged or undated", "bad"),
    ("Left out: exact duplicates", "exact_duplicates"),
    ("Left out: near-duplicates", "near_duplicates"),
    ("Left out: not sampled", "not_sampled"),
    ("Dated by a crawl only", "upper_bound"),
)
_MOST_EXAMPLES = 3
_BUILD_AGAIN = "build the corpus again with this version of headrace"


def corpus(corpora: Sequence[Corpus]) -> Section:
    """The section for any number of corpora, none included."""
    blocks: list[Block] = []
    if not corpora:
        blocks.append(
            Note(
                kind="missing",
                text="No corpus manifest was given, so the dates of the training text are not "
                "drawn and its checks were not looked at.",
            )
        )
    for index, each in enumerate(corpora):
        if len(corpora) > 1:
            blocks.append(Heading(text=each.name))
        blocks += _one(each, index)
    return Section(name="corpus", title="What it was trained on", short="Corpus", blocks=blocks)


def cutoff_of(manifest: Node) -> date:
    """The cutoff's day, as it was given where that is a date.

    Raises:
        DataError: it is no date.
    """
    text = manifest.text("cutoff_given", "") or manifest.text("cutoff")
    try:
        return date.fromisoformat(text[:10])
    except ValueError:
        raise DataError(
            f"{manifest.where}.cutoff: {text!r} is not a date", remedy=_BUILD_AGAIN
        ) from None


def _one(each: Corpus, index: int) -> list[Block]:
    blocks: list[Block] = []
    histogram = _histogram(each)
    if histogram is None:
        text = f"{each.name} holds no histogram of dates, so none is drawn."
        blocks.append(Note(kind="missing", text=text))
    else:
        blocks.append(
            picture(
                f"dates-{index}",
                lambda width, identity: dates.draw(
                    histogram, width, identity, f"{each.name}: documents by effective date"
                ),
                "Documents by effective date: the day from which a reader could have had them.",
                data={
                    "kept": {name: dict(months) for name, months in histogram.kept.items()},
                    "cutoffs": {name: day.isoformat() for name, day in histogram.cutoffs},
                },
            )
        )
    blocks.append(_counts(each))
    blocks += _sources(each)
    blocks += _checks(each)
    return blocks


def _months(manifest: Node) -> dict[str, dict[str, int]]:
    months: dict[str, dict[str, int]] = {}
    for row in manifest.children("histogram"):
        source, month = row.text("source"), row.text("month")
        try:
            date.fromisoformat(f"{month}-01")
        except ValueError:
            raise DataError(
                f"{row.where}.month: {month!r} is not YYYY-MM", remedy=_BUILD_AGAIN
            ) from None
        of_source = months.setdefault(source, {})
        of_source[month] = of_source.get(month, 0) + row.integer("documents")
    return months


def _histogram(each: Corpus) -> dates.DateHistogram | None:
    cutoffs = [(name, cutoff_of(manifest)) for name, manifest in each.vintages]
    by_source = [_months(manifest) for _, manifest in each.vintages]
    if not any(by_source):
        return None
    if len(each.vintages) == 1:
        return dates.DateHistogram(kept=by_source[0], cutoffs=cutoffs)
    # Several vintages: what each adds to the one before it.
    kept: dict[str, dict[str, int]] = {}
    before: dict[str, int] = {}
    for (name, _), sources in zip(each.vintages, by_source, strict=True):
        total: dict[str, int] = {}
        for months in sources.values():
            for month, documents in months.items():
                total[month] = total.get(month, 0) + documents
        label = name if not kept else f"added by {name}"
        kept[label] = {
            month: gained
            for month, documents in total.items()
            if (gained := documents - before.get(month, 0)) > 0
        }
        before = total
    return dates.DateHistogram(kept=kept, cutoffs=cutoffs)


def _counts(each: Corpus) -> Table:
    counts = [(name, manifest, manifest.child("counts")) for name, manifest in each.vintages]
    rows = [["Cutoff", *(cutoff_of(manifest).isoformat() for _, manifest, _ in counts)]]
    for label, key in _COUNTS:
        cells = [node.number(key) for _, _, node in counts]
        if any(cell is not None for cell in cells):
            rows.append([label, *(MISSING if cell is None else count(cell) for cell in cells)])
    spans = [sorted({m for s in _months(node).values() for m in s}) for _, node, _ in counts]
    rows += [
        ["First month", *(months[0] if months else MISSING for months in spans)],
        ["Last month", *(months[-1] if months else MISSING for months in spans)],
    ]
    rows.append(
        ["Hash of the content", *(node.text("content_sha256", "")[:12] for _, node, _ in counts)]
    )
    return Table(
        name=f"corpus-{each.name}",
        columns=("", *(name for name, _, _ in counts)),
        rows=rows,
        numeric=frozenset(range(1, len(counts) + 1)),
    )


def _sources(each: Corpus) -> list[Block]:
    _, manifest = each.vintages[-1]
    rows = [
        [
            source.text("name"),
            count(source.integer("records")),
            source.text("available_at", MISSING),
            source.text("license", MISSING),
        ]
        for source in manifest.children("sources")
    ]
    blocks: list[Block] = []
    if rows:
        blocks.append(
            Table(
                name=f"sources-{each.name}",
                columns=("Source", "Records", "Dated by", "Licence"),
                rows=rows,
                numeric=frozenset({1}),
            )
        )
    tokenizer = manifest.maybe("tokenizer")
    if tokenizer is not None:
        size = plural(tokenizer.integer("vocab_size"), "token")
        blocks.append(Paragraph(text=f"Tokenizer: {tokenizer.text('origin')}; {size}."))
    return blocks


def _checks(each: Corpus) -> list[Block]:
    checks = [
        (name, check) for name, manifest in each.vintages for check in manifest.children("checks")
    ]
    if not checks:
        return [Note(kind="missing", text=f"{each.name} has no checks in its manifest.")]
    blocks: list[Block] = [
        Note(kind="failed", text=f"{name}, {_check_name(check)}: {check.text('message')}.")
        for name, check in checks
        if check.text("status") in {"warned", "failed"}
    ]
    blocks.append(_one_vintage(each) if len(each.vintages) == 1 else _several_vintages(each))
    examples: dict[tuple[str, str], None] = {}
    for _, check in checks:
        for example in check.children("examples")[:_MOST_EXAMPLES]:
            examples[_check_name(check), _example(example)] = None
    if examples:
        blocks.append(
            Table(
                name=f"examples-{each.name}",
                columns=("Check", "Example"),
                rows=[list(pair) for pair in examples],
                caption=f"At most {_MOST_EXAMPLES} examples a check; more are in the manifest.",
            )
        )
    return blocks


def _check_name(check: Node) -> str:
    return check.text("name").replace("_", " ")


def _value(check: Node) -> str:
    value = check.number("value")
    return MISSING if value is None or check.number("limit") is None else percent(value)


def _limit(check: Node) -> str:
    limit = check.number("limit")
    return MISSING if limit is None else percent(limit)


def _one_vintage(each: Corpus) -> Table:
    _, manifest = each.vintages[0]
    return Table(
        name=f"checks-{each.name}",
        columns=("Check", "Status", "Value", "Limit", "Finding"),
        rows=[
            [
                _check_name(check), check.text("status"), _value(check), _limit(check),
                check.text("message"),
            ]
            for check in manifest.children("checks")
        ],
        numeric=frozenset({2, 3}),
    )  # fmt: skip


def _several_vintages(each: Corpus) -> Table:
    cells: dict[str, dict[str, str]] = {}
    limits: dict[str, str] = {}
    for name, manifest in each.vintages:
        for check in manifest.children("checks"):
            value = _value(check)
            words = check.text("status") + ("" if value == MISSING else f", {value}")
            cells.setdefault(_check_name(check), {})[name] = words
            limits[_check_name(check)] = _limit(check)
    names = [name for name, _ in each.vintages]
    return Table(
        name=f"checks-{each.name}",
        columns=("Check", *names, "Limit"),
        rows=[
            [check, *(found.get(name, MISSING) for name in names), limits[check]]
            for check, found in cells.items()
        ],
        numeric=frozenset(range(1, len(names) + 2)),
    )


def _example(node: Node) -> str:
    parts = []
    for key in node.names():
        value = node.raw(key)
        if value in (None, "", [], {}):
            continue
        written = number(value) if isinstance(value, float) else str(value)
        parts.append(f"{key.replace('_', ' ')}: {written}")
    return "; ".join(parts)
