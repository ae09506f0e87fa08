"""Reading a finished corpus: summary, look-ups by text, verification.

Reads only what is in the corpus folder, in bounded memory, and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from headrace.corpus.files import file_sha256
from headrace.corpus.unit_files import row_groups
from headrace.errors import DataError
from headrace.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from headrace.corpus.manifest import Manifest

_BAR = 30
_SNIPPET = 80
PERIODS: Mapping[str, int | None] = {"auto": None, "month": 1, "year": 12, "decade": 120}
FILTERS: Mapping[str, str] = {
    "too_short": "shorter than checks.length.min_chars",
    "over_length": "longer than checks.length.max_chars",
    "language": "in another language than checks.languages.keep",
    "boilerplate": "mostly page furniture (checks.boilerplate)",
}
_MARKS = {"passed": "ok  ", "warned": "WARN", "failed": "FAIL", "noted": "note"}


def describe(manifest: Manifest, *, by: str = "auto") -> str:
    """A summary for the terminal: vintages, counts, histogram by period and source, checks.

    ``by`` is ``month``, ``year``, ``decade`` or ``auto``: the finest with no more than 40 lines.
    """
    vintages = manifest.vintages
    lines = [f"{manifest.path}"]
    if len(vintages) > 1:
        lines.append("vintages:")
        lines += [f"  {v.data['cutoff_name']:>14}  {_size(v)}" for v in vintages]
    lines += ["", *_describe_one(vintages[-1], by)]
    return "\n".join(lines)


def _size(manifest: Manifest) -> str:
    counts = manifest.counts
    tokens = "" if counts["tokens"] is None else f", {format_count(counts['tokens'])} tokens"
    return f"{counts['documents']:,} documents, {format_bytes(counts['bytes'])}{tokens}"


def account(counts: Mapping[str, Any]) -> list[tuple[str, int]]:
    """How the records ended that are not in the corpus, in words, with their numbers."""
    return [
        ("after the cutoff", counts["after_cutoff"]),
        ("damaged, undated or with a wrong clock", counts["bad"]),
        ("the same text as an earlier one", counts["exact_duplicates"]),
        ("nearly the same text as an earlier one", counts["near_duplicates"]),
        *(
            (FILTERS.get(reason, f"filtered: {reason}"), number)
            for reason, number in counts["filtered"].items()
        ),
        ("beyond the token budget", counts["not_sampled"]),
    ]


def _describe_one(manifest: Manifest, by: str) -> list[str]:
    data, counts = manifest.data, manifest.counts
    lines = [f"available by {data['cutoff']}: {_size(manifest)}"]
    left_out = [(what, number) for what, number in account(counts) if number]
    lines.append(
        f"{counts['records']:,} records were read; {sum(n for _, n in left_out):,} are left out"
        + (":" if left_out else "")
    )
    lines += [f"  {number:>10,}  {what}" for what, number in left_out]
    lines += ["", "sources:"]
    for source in data["sources"]:
        others = source.get("files_not_matched", 0)
        also = f" ({others:,} others do not match and were not read)" if others else ""
        lines += [
            (
                f"  {source['name']} ({source['type']}): {source['files']:,} files{also}, "
                f"{source['records']:,} records; licence: {source['license']}"
            ),
            f"      available at: {source['available_at']}",
        ]
    lines += ["", *histogram_lines(data["histogram"], by)]
    lines += ["", "checks:"]
    lines += [
        f"  {_MARKS[c['status']]}  {c['name'].replace('_', ' ')}: {c['message']}"
        for c in manifest.checks
    ]
    return lines


def by_period(
    histogram: Sequence[Mapping[str, Any]], *, most: int = 40, width: int | None = None
) -> list[tuple[str, Mapping[str, int]]]:
    """Tokens (or bytes) by source for each month; for years or decades if months are many.

    ``width`` in months (1, 12 or 120) asks for one of them.

    Empty periods between the first and the last are there too: a gap is to be seen.
    """
    months = [_month_number(row["month"]) for row in histogram]
    if width is None:
        width = next((w for w in (1, 12) if max(months) // w - min(months) // w < most), 120)
    periods: dict[int, dict[str, int]] = {
        number: {} for number in range(min(months) // width, max(months) // width + 1)
    }
    for month, row in zip(months, histogram, strict=True):
        size = row["bytes"] if row["tokens"] is None else row["tokens"]
        held = periods[month // width]
        held[row["source"]] = held.get(row["source"], 0) + size
    return [(_period_name(number, width), sources) for number, sources in periods.items()]


def _month_number(month: str) -> int:
    year, number = month.split("-")
    return 12 * int(year) + int(number) - 1


def _period_name(number: int, width: int) -> str:
    if width == 1:
        return f"{number // 12:04d}-{number % 12 + 1:02d}"
    return f"{number:04d}" if width == 12 else f"{number:03d}0s"


def histogram_lines(histogram: Sequence[Mapping[str, Any]], by: str = "auto") -> list[str]:
    """The effective dates as bars."""
    if not histogram:
        return ["no documents"]
    unit = "bytes" if histogram[0]["tokens"] is None else "tokens"
    periods = by_period(histogram, width=PERIODS[by])
    largest = max(sum(sources.values()) for _, sources in periods)
    lines = [f"when the text became available, in {unit}:"]
    for period, sources in periods:
        total = sum(sources.values())
        bar = "#" * max(1, round(_BAR * total / largest)) if total else ""
        split = ", ".join(f"{name} {format_count(n)}" for name, n in sorted(sources.items()))
        lines.append(f"  {period:>7} {bar:<{_BAR}} {format_count(total):>7}  {split}")
    return lines


def find_text(
    manifest: Manifest, needle: str, *, ignore_case: bool = False, limit: int = 20
) -> Iterator[dict[str, Any]]:
    """Documents that hold ``needle``, with their instants and the text around it."""
    if not needle:
        raise DataError("an empty text is in every document", remedy="give some letters to find")
    columns = ["doc_id", "source", "text", "available_at", "available_at_rule", "file", "position"]
    num_found = 0
    for path in _files(manifest.vintages[-1], "documents"):
        for _, batch in row_groups(path, columns):
            hits = pc.match_substring(batch.column("text"), needle, ignore_case=ignore_case)
            for row in batch.filter(hits).to_pylist():
                text = row.pop("text")
                row["available_at"] = row["available_at"].isoformat().replace("+00:00", "Z")
                row["snippet"] = _snippet(text, needle, ignore_case)
                yield row
                num_found += 1
                if num_found >= limit:
                    return


def _snippet(text: str, needle: str, ignore_case: bool) -> str:
    at = text.lower().find(needle.lower()) if ignore_case else text.find(needle)
    start, end = max(0, at - _SNIPPET), at + len(needle) + _SNIPPET
    return " ".join(text[start:end].split())


def _files(manifest: Manifest, kind: str) -> list[Path]:
    outputs = manifest.data["outputs"]
    return [manifest.path / o["path"] for o in outputs if o["path"].startswith(f"{kind}/")]


def describe_found(found: Sequence[Mapping[str, Any]], needle: str) -> str:
    """Look-up results for the terminal."""
    if not found:
        return f"no document holds {needle!r}"
    lines = []
    for row in found:
        lines.append(f"{row['available_at']}  {row['source']}:{row['doc_id']}  ({row['file']})")
        lines.append(f"    {row['snippet']}")
    return "\n".join(lines)


def verify(manifest: Manifest) -> int:
    """Compare every file of the corpus with its hash; the number of files.

    Raises:
        DataError: a file is missing or differs.
    """
    num_files = 0
    for vintage in manifest.vintages:
        for output in vintage.data["outputs"]:
            path = vintage.path / output["path"]
            if not path.is_file():
                raise DataError(f"{path} is missing", remedy="build the corpus again")
            if path.stat().st_size != output["bytes"] or file_sha256(path) != output["sha256"]:
                raise DataError(
                    f"{path} is not the file the manifest names", remedy="build the corpus again"
                )
            num_files += 1
    return num_files
