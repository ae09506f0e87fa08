"""Every record that is not in the corpus: counted by source and reason, listed with position.

Positions inside one range of a split file are made absolute here, and documents dated after
the day of the build are told from those that are merely after the cutoff.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.corpus.document import BAD_REASONS
from headrace.corpus.duplicates import NEAR, REASON_OF_KIND, DuplicateSearch, IndexedUnit
from headrace.corpus.unit_files import REJECTED, UnitIds, read_index
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from headrace.corpus.sources.units import Unit

_EXAMPLES = 5
_OPEN_UNITS = 256
_NEAR = REASON_OF_KIND[NEAR]


@dataclass(slots=True)
class SourceTally:
    """What happened to one source's records."""

    num_records: int = 0
    num_text_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        """Records that speak of a broken input."""
        return sum(count for reason, count in self.reasons.items() if reason in BAD_REASONS)

    @property
    def bad_share(self) -> float:
        """Bad records among all."""
        return self.num_bad / self.num_records if self.num_records else 0.0

    def note(self, reason: str, row: Mapping[str, Any]) -> None:
        """Count one more rejection found after the unit pass."""
        self.reasons[reason] += 1
        self.example(reason, row)

    def example(self, reason: str, row: Mapping[str, Any]) -> None:
        """Keep the first few of a reason."""
        kept = self.examples.setdefault(reason, [])
        if len(kept) < _EXAMPLES:
            kept.append(
                {
                    key: row[key]
                    for key in ("source", "file", "position", "byte", "doc_id", "detail")
                    if row.get(key) is not None
                }
            )


class Rejections:
    """Rejections of all units, with absolute positions."""

    def __init__(self, units: Sequence[Unit], places: Sequence[Path], latest_us: int) -> None:
        """``latest_us`` is the end of the day of the build: no true date is later."""
        self._units = units
        self._places = places
        self._latest_us = latest_us
        self.bases = position_bases(units, places)

    def tables(self, number: int) -> Iterator[pa.Table]:
        """A unit's rejections in the form of :data:`REJECTED`."""
        bases = self.bases[number]
        with pq.ParquetFile(self._places[number] / "rejected.parquet") as file:
            for batch in file.iter_batches(4096):
                table = pa.Table.from_batches([batch])
                parts = table.column("part").to_pylist()
                base = pa.array([bases[part] for part in parts], pa.int64())
                position = pc.add(table.column("position"), base)
                table = table.set_column(
                    table.schema.get_field_index("position"), "position", position
                )
                yield self._with_future(table.select(REJECTED.names))

    def _with_future(self, table: pa.Table) -> pa.Table:
        instants = table.column("available_at").cast(pa.int64())
        beyond = pc.fill_null(pc.greater(instants, self._latest_us), False)
        is_later = pc.equal(table.column("reason"), "after_cutoff")
        reasons = pc.if_else(pc.and_(beyond, is_later), "future_date", table.column("reason"))
        return table.set_column(table.schema.get_field_index("reason"), "reason", reasons)

    def tally(self) -> dict[str, SourceTally]:
        """Counts and first examples by source, before duplicates are known."""
        tallies: dict[str, SourceTally] = {}
        for number, unit in enumerate(self._units):
            tally = tallies.setdefault(unit.source, SourceTally())
            stats = read_stats(self._places[number])
            tally.num_records += stats["num_records"]
            tally.num_text_bytes += stats["num_text_bytes"]
            tally.languages.update(stats["languages"])
            if not stats["reasons"]:
                continue
            for table in self.tables(number):
                counts = Counter(table.column("reason").to_pylist())
                tally.reasons.update(counts)
                for reason in counts:
                    if len(tally.examples.get(reason, ())) < _EXAMPLES:
                        rows = table.filter(pc.equal(table.column("reason"), reason))
                        for row in rows.slice(0, _EXAMPLES).to_pylist():
                            tally.example(reason, row)
        return tallies

    def write(self, path: Path, names: DocumentNames) -> int:
        """The list of everything that is not in the corpus; the number of rows."""
        num_rows = 0
        with pq.ParquetWriter(path, REJECTED, compression="zstd") as writer:
            for number in range(len(self._units)):
                for table in self.tables(number):
                    writer.write_table(table.cast(REJECTED))
                    num_rows += table.num_rows
                table = names.duplicates_in(number)
                if table.num_rows:
                    writer.write_table(table)
                    num_rows += table.num_rows
        return num_rows


def position_bases(units: Sequence[Unit], places: Sequence[Path]) -> list[list[int]]:
    """For each unit and part, what to add to its positions: lines in the ranges before it.

    Only a unit that is one range of a file has any; other parts are files from their start.
    """
    seen: dict[tuple[str, str], int] = {}
    bases = []
    for unit, place in zip(units, places, strict=True):
        counts = read_stats(place)["num_positions"]
        row = []
        for part, count in zip(unit.parts, counts, strict=True):
            key = (unit.source, part.file.name)
            row.append(seen.get(key, 0))
            seen[key] = row[-1] + count
        bases.append(row)
    return bases


def read_stats(place: Path) -> dict[str, Any]:
    """Counts of a finished unit."""
    stats: dict[str, Any] = json.loads((place / "stats.json").read_text(encoding="utf-8"))
    return stats


class DocumentNames:
    """What documents are called, by ordinal, and the listing of those an earlier one displaces."""

    def __init__(
        self,
        units: Sequence[IndexedUnit],
        duplicates: DuplicateSearch,
        bases: Sequence[Sequence[int]],
    ) -> None:
        """Nothing is read yet; ``bases`` are those of :func:`position_bases`."""
        self._units = units
        self._bases = bases
        self._duplicates = duplicates
        self._ids = functools.lru_cache(maxsize=_OPEN_UNITS)(self._open)

    def _open(self, number: int) -> UnitIds:
        return UnitIds(self._units[number].place)

    def label(self, ordinal: int) -> str:
        """Source and id of one index row."""
        number = int(self._duplicates.unit_of(ordinal))  # type: ignore[arg-type]  # one is an array of none
        unit = self._units[number]
        return f"{unit.source}:{self._ids(number).of(ordinal - unit.first_ordinal)}"

    def duplicates_in(self, number: int, kind: int | None = None) -> pa.Table:
        """Documents of a unit that an earlier one displaces, in the form of :data:`REJECTED`.

        Args:
            number: the unit's.
            kind: of the matches; ``None`` for all.

        Those after the latest cutoff are not there: they are listed as such.
        """
        unit = self._units[number]
        matches = self._duplicates.matches_of(number)
        if kind is not None:
            matches = matches[matches["kind"] == kind]
        if matches.size == 0:
            return REJECTED.empty_table()
        rows = read_index(unit.place)["row"][matches["ordinal"] - unit.first_ordinal]
        matches, rows = matches[rows >= 0], rows[rows >= 0]
        columns = ["source", "file", "position", "doc_id"]
        documents = pq.read_table(unit.place / "documents.parquet", columns=columns)
        named = documents.take(pa.array(rows))
        reasons = [REASON_OF_KIND[int(k)] for k in matches["kind"].tolist()]
        details = [
            f"of {self.label(of)}" + (f", similarity {alike:.2f}" if reason == _NEAR else "")
            for of, alike, reason in zip(
                matches["of"].tolist(), matches["similarity"].tolist(), reasons, strict=True
            )
        ]
        arrays = {
            **{name: named.column(name) for name in columns},
            "position": pc.add(named.column("position"), self._bases[number][0]),
            "byte": pa.nulls(len(reasons), pa.int64()),
            "reason": pa.array(reasons, pa.string()),
            "detail": pa.array(details, pa.string()),
            "available_at": pa.array(matches["available_at"].astype("datetime64[us]")),
        }
        return pa.table({name: arrays[name] for name in REJECTED.names}).cast(REJECTED)


def refuse_bad_sources(
    tallies: Mapping[str, SourceTally], limits: Mapping[str, float], listing: str
) -> None:
    """Fail the build where a source has more bad records than its stated share.

    Raises:
        DataError: naming the sources, their worst reasons and first positions.
    """
    lines = []
    for name, tally in tallies.items():
        if tally.bad_share <= limits[name]:
            continue
        lines.append(
            f"source {name!r}: {tally.num_bad} of {tally.num_records} records are bad "
            f"({tally.bad_share:.1%}, limit {limits[name]:.1%})"
        )
        bad = [(reason, n) for reason, n in tally.reasons.most_common() if reason in BAD_REASONS]
        for reason, count in bad[:4]:
            first = tally.examples[reason][0]
            where = first.get("file", "")
            if "position" in first:
                where += f", record {first['position']}"
            elif "byte" in first:
                where += f", byte {first['byte']}"
            lines.append(f"  {count} of {reason}, first at {where}: {first.get('detail', '')}")
    if lines:
        raise DataError(
            "\n    ".join(lines),
            remedy=(
                f"see {listing}; mend the input or its rule for available_at, "
                "or raise max_bad_share"
            ),
        )
