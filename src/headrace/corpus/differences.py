"""What differs between two corpora, by their manifests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.corpus.inspect import FILTERS, by_period
from headrace.units import format_bytes

if TYPE_CHECKING:
    from headrace.corpus.manifest import Manifest

_MOST_PERIODS = 12
_COUNTS = {
    "documents": "documents",
    "tokens": "tokens",
    "bytes": "text",
    "records": "records read",
    "after_cutoff": "after the cutoff",
    "bad": "damaged or undated",
    "exact_duplicates": "same text as an earlier one",
    "near_duplicates": "nearly the same text",
    "not_sampled": "beyond the token budget",
    "upper_bound": "dated by a crawl time",
    **{f"filtered.{reason}": words for reason, words in FILTERS.items()},
}


def diff_manifests(first: Manifest, second: Manifest) -> dict[str, Any]:
    """What differs between the latest vintages of two corpora: the change from first to second."""
    old, new = first.vintages[-1].data, second.vintages[-1].data
    return {
        "identical": old["content_sha256"] == new["content_sha256"],
        "cutoff": _changed(old["cutoff"], new["cutoff"]),
        "settings": _changed_leaves(old["config"], new["config"]),
        "rule_versions": _changed_leaves(old["rule_versions"], new["rule_versions"]),
        "counts": _changed_leaves(old["counts"], new["counts"]),
        "sources": _changed_sources(old["sources"], new["sources"]),
        "inputs": {
            name: _input_of(old, name) != _input_of(new, name)
            for name in dict.fromkeys(s["name"] for s in (*old["sources"], *new["sources"]))
        },
        "histogram": _changed_months(old["histogram"], new["histogram"]),
        "checks": _changed_leaves(
            {check["name"]: check["status"] for check in old["checks"]},
            {check["name"]: check["status"] for check in new["checks"]},
        ),
        "tokenizer": _changed(
            (old["tokenizer"] or {}).get("sha256"), (new["tokenizer"] or {}).get("sha256")
        ),
    }


def _changed(old: Any, new: Any) -> list[Any] | None:
    return None if old == new else [old, new]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, value


def _changed_leaves(old: Any, new: Any) -> dict[str, list[Any]]:
    before, after = dict(_leaves(old)), dict(_leaves(new))
    keys = [*before, *(key for key in after if key not in before)]
    return {
        key: [before.get(key), after.get(key)] for key in keys if before.get(key) != after.get(key)
    }


def _changed_sources(old: Sequence[Any], new: Sequence[Any]) -> dict[str, Any]:
    before = {source["name"]: source for source in old}
    after = {source["name"]: source for source in new}
    return {
        name: _changed_leaves(before.get(name, {}), after.get(name, {}))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    }


def _changed_months(old: Sequence[Any], new: Sequence[Any]) -> list[dict[str, Any]]:
    before = {(row["source"], row["month"]): row for row in old}
    after = {(row["source"], row["month"]): row for row in new}
    changed = []
    for source, month in sorted(before.keys() | after.keys()):
        counts = [(side.get((source, month)) or {}).get("documents", 0) for side in (before, after)]
        if counts[0] != counts[1]:
            changed.append({"source": source, "month": month, "documents": counts})
    return changed


def _input_of(data: Mapping[str, Any], name: str) -> str | None:
    return next((s["sha256"] for s in data["sources"] if s["name"] == name), None)


def describe_diff(diff: Mapping[str, Any]) -> str:
    """A difference for the terminal."""
    if diff["identical"] and not any(
        diff[key] for key in diff if key not in {"identical", "inputs"}
    ):
        return "the two corpora are the same"
    lines = ["the files are the same" if diff["identical"] else "the files differ"]
    if diff["cutoff"]:
        lines.append(f"cutoff: {diff['cutoff'][0]} -> {diff['cutoff'][1]}")
    lines.append(_told("settings", diff["settings"]))
    lines.append(_told("versions of rules", diff["rule_versions"]))
    changed = [name for name, differs in diff["inputs"].items() if differs]
    lines.append(
        f"inputs: other files or contents in {', '.join(changed)}"
        if changed
        else "inputs: the same"
    )
    lines.append(f"tokenizer: {'another one' if diff['tokenizer'] else 'the same'}")
    lines += ["", *_count_lines(diff["counts"]), "", *_month_lines(diff["histogram"])]
    checks = [
        f"  {name.replace('_', ' ')}: {old} -> {new}" for name, (old, new) in diff["checks"].items()
    ]
    return "\n".join([*lines, *(["", "checks:", *checks] if checks else [])])


def _told(what: str, changes: Mapping[str, Sequence[Any]]) -> str:
    if not changes:
        return f"{what}: the same"
    return "\n".join([f"{what}:", *(f"  {name}: {o} -> {n}" for name, (o, n) in changes.items())])


def _count_lines(counts: Mapping[str, Sequence[Any]]) -> list[str]:
    lines = []
    for name, words in _COUNTS.items():
        if name in counts:
            old, new = (value or 0 for value in counts[name])
            shown = format_bytes if name == "bytes" else "{:,}".format
            sign = "+" if new >= old else "-"
            change = f"({sign}{shown(abs(new - old))})"
            lines.append(f"  {words:<28} {shown(old):>14} -> {shown(new):>14}  {change}")
    return ["counts:", *lines] if lines else ["counts: the same"]


def _month_lines(months: Sequence[Mapping[str, Any]]) -> list[str]:
    """Documents by source and period: months, years or decades, whichever are few."""
    if not months:
        return ["documents by period: the same"]
    lines = ["documents by period, more and fewer:"]
    for source in dict.fromkeys(row["source"] for row in months):
        changes = [
            {"source": source, "month": row["month"], "tokens": None, "bytes": new - old}
            for row in months
            if row["source"] == source
            for old, new in [row["documents"]]
        ]
        more, fewer = (
            dict(by_period([{**row, "bytes": max(0, sign * row["bytes"])} for row in changes],
                           most=_MOST_PERIODS))
            for sign in (1, -1)
        )  # fmt: skip
        for period, added in more.items():
            gone = fewer[period].get(source, 0)
            told = [f"{s}{n:,}" for s, n in (("+", added.get(source, 0)), ("-", gone)) if n]
            if told:
                lines.append(f"  {source} {period}: {', '.join(told)}")
    return lines
