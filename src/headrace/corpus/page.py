"""A corpus as one self-contained HTML page: histogram, account of records, checks, examples.

Everything is escaped text and inline SVG; nothing is fetched, and no script runs.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from headrace.corpus.files import write_text
from headrace.corpus.inspect import account, by_period
from headrace.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from headrace.corpus.manifest import Manifest

# A palette that colour-blind readers can tell apart (Okabe and Ito 2008).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#666666")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 920, 260, 56, 44
_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2.2rem}
.sub{opacity:.75}.wide{overflow-x:auto}
svg{width:100%;min-width:620px;height:auto}svg text{fill:currentColor;font:11px system-ui}
table{border-collapse:collapse;width:100%;display:block;overflow-x:auto}
td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
.passed{color:#0a7d45}.warned{color:#b36b00}.failed{color:#c22}.noted{opacity:.7}
details{margin:.2rem 0}summary{cursor:pointer}code{background:var(--soft);padding:0 .2em}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .35em 0 1em}
.snip{opacity:.8;font-size:.9em;overflow-wrap:anywhere}
"""


def write_page(manifest: Manifest, path: Path) -> None:
    """Write the page of a corpus; with several vintages, a section for each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page(manifest))


def page(manifest: Manifest) -> str:
    """The page as text."""
    vintages = manifest.vintages
    name = html.escape(manifest.path.resolve().name)
    body = [f"<h1>Corpus {name}</h1>"]
    if len(vintages) > 1:
        body.append(_vintage_table(vintages))
    body += [_vintage(vintage, headed=len(vintages) > 1) for vintage in reversed(vintages)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Corpus {name}</title><style>{_STYLE}</style></head><body>"
        + "".join(body)
        + "</body></html>\n"
    )


def _vintage_table(vintages: Sequence[Manifest]) -> str:
    names = [html.escape(vintage.data["cutoff_name"]) for vintage in vintages]
    rows = [
        [
            f"<a href='#{name}'>{name}</a>",
            v.cutoff,
            f"{v.num_documents:,}",
            "none" if v.num_tokens is None else f"{v.num_tokens:,}",
            format_bytes(v.counts["bytes"]),
        ]
        for name, v in zip(names, vintages, strict=True)
    ]
    return _table(["vintage", "cutoff", "documents", "tokens", "text"], rows, numeric=(2, 3, 4))


def _vintage(manifest: Manifest, *, headed: bool) -> str:
    data, counts = manifest.data, manifest.counts
    name = html.escape(data["cutoff_name"])
    tokens = "" if counts["tokens"] is None else f", {format_count(counts['tokens'])} tokens"
    summary = (
        f"<p class='sub'>Available by {data['cutoff']}: {counts['documents']:,} documents, "
        f"{format_bytes(counts['bytes'])}{tokens}. "
        f"Content <code>{data['content_sha256'][:16]}</code>.</p>"
    )
    parts = [
        f"<h2 id='{name}'>Vintage {name}</h2>" if headed else "",
        summary,
        _histogram(data["histogram"]),
        "<h3>Checks</h3>",
        *(_check(check) for check in data["checks"]),
        "<h3>How every record ended</h3>",
        _account(counts),
        "<h3>Sources</h3>",
        _sources(data["sources"]),
    ]
    return "".join(parts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[int]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=n' if i in numeric else ''}>{cell}</td>" for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _account(counts: Mapping[str, Any]) -> str:
    rows = [
        ("in the corpus", counts["documents"]),
        *account(counts),
        ("<b>records read</b>", counts["records"]),
    ]
    shown = [[what, f"{n:,}"] for what, n in rows if n or what == "in the corpus"]
    return _table(["", "records"], shown, numeric=(1,))


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            f"{html.escape(s['name'])}<br><span class=sub>{html.escape(s['type'])}</span>",
            html.escape(s["available_at"]),
            html.escape(s["license"]),
            f"{s['files']:,}",
            f"{s['records']:,}",
            f"{s['bad']:,} ({s['bad_share']:.2%})",
        ]
        for s in sources
    ]
    return _table(
        ["source", "available at", "license", "files", "records", "bad"], rows, numeric=(3, 4, 5)
    )


def _check(check: Mapping[str, Any]) -> str:
    status = check["status"]
    limit = (
        ""
        if check["limit"] is None
        else f" (value {check['value']:.4g}, limit {check['limit']:.4g})"
    )
    head = (
        f"<b class={status}>{status}</b> {html.escape(check['name'].replace('_', ' '))}: "
        f"{html.escape(check['message'])}{limit}"
    )
    if not check["examples"]:
        return f"<p>{head}</p>"
    items = "".join(f"<li class=snip>{_example(example)}</li>" for example in check["examples"])
    return f"<details><summary>{head}</summary><ul>{items}</ul></details>"


def _example(example: Any) -> str:
    if not isinstance(example, dict):
        return html.escape(str(example))
    return "; ".join(
        f"{html.escape(str(key))} <code>{html.escape(str(value))}</code>"
        for key, value in example.items()
    )


def _histogram(histogram: Sequence[Mapping[str, Any]]) -> str:
    if not histogram:
        return "<p>No documents.</p>"
    periods = by_period(histogram, most=240)
    unit = "bytes" if histogram[0]["tokens"] is None else "tokens"
    names = sorted({row["source"] for row in histogram})
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    largest = max(sum(sources.values()) for _, sources in periods) or 1
    step = (_WIDTH - _LEFT) / len(periods)
    scale = (_HEIGHT - _BOTTOM - 12) / largest
    floor = _HEIGHT - _BOTTOM
    bars, labels = [], []
    every = max(1, len(periods) // 12)
    for index, (period, sources) in enumerate(periods):
        x, y = _LEFT + index * step, float(floor)
        for name in names:
            size = sources.get(name, 0)
            if size:
                height = max(size * scale, 0.5)
                y -= height
                bars.append(
                    f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(step - 1, 0.7):.1f}' "
                    f"height='{height:.1f}' fill='{colours[name]}'>"
                    f"<title>{period} {html.escape(name)}: {size:,} {unit}</title></rect>"
                )
        if index % every == 0:
            labels.append(f"<text x='{x:.1f}' y='{floor + 16}'>{period}</text>")
    ticks = "".join(
        f"<text x='{_LEFT - 6}' y='{floor - part * largest * scale + 4:.1f}' text-anchor='end'>"
        f"{format_count(part * largest)}</text>"
        f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{floor - part * largest * scale:.1f}' "
        f"y2='{floor - part * largest * scale:.1f}' stroke='currentColor' stroke-opacity='.15'/>"
        for part in (0.0, 0.5, 1.0)
    )
    legend = "".join(
        f"<span class=key style='background:{colours[name]}'></span>{html.escape(name)}"
        for name in names
    )
    return (
        f"<p>When the text became available, in {unit} {legend}</p>"
        f"<div class=wide><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' "
        "aria-label='effective dates'>"
        f"{ticks}{''.join(bars)}{''.join(labels)}</svg></div>"
    )
