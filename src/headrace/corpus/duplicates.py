"""Which documents repeat an earlier one: exactly, by id, or nearly.

The invariant that makes one pass serve every cutoff: **only an earlier document displaces a
later one**, "earlier" by ``(available_at, position in the corpus)``. Whether a document stays
is therefore decided by what was available before it, and nothing from after a cutoff changes
what is kept before it. (Clusters by transitive closure do not have this property: a later
document can join two earlier ones.)

A near-duplicate is sought among documents that share a band of the signature, compared with
the first three of the band and with the one just before it, and kept as a duplicate when the
estimated Jaccard similarity reaches the threshold. Ordinals number the index rows of all
units, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.corpus.fingerprints import band_keys, short_key, similarity
from headrace.corpus.spill import Spill, bucket_of, num_buckets_for
from headrace.corpus.unit_files import read_index

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.corpus.config import NearDuplicates

DUPLICATE_VERSION = 1

EXACT, SAME_ID, NEAR, REVISION = 1, 2, 3, 4
REASON_OF_KIND = {EXACT: "exact_duplicate", SAME_ID: "duplicate_id", NEAR: "near_duplicate"}

_KEYED = np.dtype([("key", "<u8"), ("key2", "<u8"), ("available_at", "<i8"), ("ordinal", "<i8")])
MATCH = np.dtype(
    [
        ("ordinal", "<i8"),
        ("of", "<i8"),
        ("available_at", "<i8"),
        ("of_available_at", "<i8"),
        ("similarity", "<f4"),
        ("kind", "u1"),
    ]
)
_UNITS_A_BUCKET = 16
_PAIRS = 1 << 15
_SIGNATURE_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedUnit:
    """A finished unit in the order of the corpus."""

    place: Path
    source: str
    first_ordinal: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateRules:
    """What counts as a duplicate; ``keep_ids`` are sources whose ids may come again."""

    near: NearDuplicates
    keep_ids: frozenset[str]


class DuplicateSearch:
    """Finds all matches; they are then read back unit by unit."""

    def __init__(self, units: Sequence[IndexedUnit], rules: DuplicateRules, folder: Path) -> None:
        """Nothing is read yet; ``folder`` takes what does not fit into memory."""
        self._units = units
        self._rules = rules
        self._folder = folder
        self._first = np.array([unit.first_ordinal for unit in units], dtype=np.int64)
        self._total = sum(unit.num_rows for unit in units)
        num_buckets = max(1, -(-len(units) // _UNITS_A_BUCKET))
        self._matches = Spill(folder / "matches", MATCH, num_buckets)

    def run(self) -> None:
        """Exact and id matches first: what they remove takes no part in the near search."""
        for kind, name in ((EXACT, "exact"), (SAME_ID, "ids"), (REVISION, "revisions")):
            self._by_key(kind, name)
        if self._rules.near.enabled:
            self._near()

    def matches_of(self, number: int) -> NDArray[np.void]:
        """Matches whose later document is in a unit, one a document, sorted by ordinal.

        Exact goes before same id, same id before near; of several near ones the earliest.
        """
        found = self._of_unit(number)
        found = found[found["kind"] != REVISION]
        order = np.lexsort((found["of"], found["of_available_at"], found["kind"], found["ordinal"]))
        found = found[order]
        first = np.ones(found.size, dtype=np.bool_)
        first[1:] = found["ordinal"][1:] != found["ordinal"][:-1]
        result: NDArray[np.void] = found[first]
        return result

    def revisions_of(self, number: int) -> NDArray[np.void]:
        """Later versions in a unit, each with the first version it follows."""
        found = self._of_unit(number)
        found = found[found["kind"] == REVISION]
        result: NDArray[np.void] = found[np.argsort(found["ordinal"], kind="stable")]
        return result

    def _of_unit(self, number: int) -> NDArray[np.void]:
        unit = self._units[number]
        found = self._matches.bucket(number // _UNITS_A_BUCKET)
        inside = (found["ordinal"] >= unit.first_ordinal) & (
            found["ordinal"] < unit.first_ordinal + unit.num_rows
        )
        return found[inside]

    def close(self) -> None:
        """Remove the files."""
        self._matches.close()

    def unit_of(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the units that ordinals belong to."""
        return np.searchsorted(self._first, ordinals, side="right") - 1

    def _add(self, matches: NDArray[np.void]) -> None:
        self._matches.add(self.unit_of(matches["ordinal"]) // _UNITS_A_BUCKET, matches)

    def _by_key(self, kind: int, name: str) -> None:
        num_buckets = num_buckets_for(self._total, _KEYED)
        spill = Spill(self._folder / name, _KEYED, num_buckets)
        for unit in self._units:
            index = read_index(unit.place)
            keyed = np.zeros(index.size, dtype=_KEYED)
            keyed["available_at"] = index["available_at"]
            keyed["ordinal"] = unit.first_ordinal + np.arange(index.size)
            if kind == EXACT:
                keyed["key"], keyed["key2"] = index["text_key"][:, 0], index["text_key"][:, 1]
            else:
                given = index["revision_key"] if kind == REVISION else index["id_key"]
                if kind == SAME_ID and unit.source in self._rules.keep_ids:
                    continue
                if kind == REVISION and unit.source in self._rules.keep_ids:
                    given = np.where(given == 0, index["id_key"], given)
                keyed["key"] = _scatter(given ^ np.uint64(short_key(unit.source)))
                keyed["key2"] = short_key(unit.source)
                keyed = keyed[given != 0]
            spill.add(bucket_of(keyed["key"], num_buckets), keyed)
        for records in spill:
            self._add(_group_matches(records, kind))
        spill.close()

    def _near(self) -> None:
        near = self._rules.near
        num_buckets = num_buckets_for(self._total * near.num_bands, _KEYED)
        spill = Spill(self._folder / "bands", _KEYED, num_buckets)
        for number, unit in enumerate(self._units):
            index = read_index(unit.place)
            alone = np.ones(index.size, dtype=np.bool_)
            alone[self.matches_of(number)["ordinal"] - unit.first_ordinal] = False
            for start in range(0, index.size, _SIGNATURE_ROWS):
                rows = np.flatnonzero(alone[start : start + _SIGNATURE_ROWS]) + start
                if rows.size == 0:
                    continue
                signatures = self._signatures(unit, rows)
                # A text without words has no signature to compare.
                sound = (signatures != 0xFFFFFFFF).any(axis=1)
                rows, signatures = rows[sound], signatures[sound]
                keys = band_keys(signatures, near.num_bands)
                keyed = np.zeros(keys.size, dtype=_KEYED)
                keyed["key"] = keys.reshape(-1)
                keyed["available_at"] = np.repeat(index["available_at"][rows], near.num_bands)
                keyed["ordinal"] = np.repeat(unit.first_ordinal + rows, near.num_bands)
                spill.add(bucket_of(keyed["key"], num_buckets), keyed)
        for records in spill:
            self._verify(_band_pairs(records))
        spill.close()

    def _verify(self, pairs: NDArray[np.void]) -> None:
        for start in range(0, pairs.size, _PAIRS):
            chunk = pairs[start : start + _PAIRS]
            ordinals, places = np.unique(
                np.concatenate([chunk["ordinal"], chunk["of"]]), return_inverse=True
            )
            signatures = self._gather(ordinals)
            later, earlier = places[: chunk.size], places[chunk.size :]
            chunk["similarity"] = similarity(signatures[later], signatures[earlier])
            self._add(chunk[chunk["similarity"] >= self._rules.near.threshold])

    def _gather(self, ordinals: NDArray[np.int64]) -> NDArray[np.uint32]:
        result = np.empty((ordinals.size, self._rules.near.num_perm), dtype=np.uint32)
        numbers = self.unit_of(ordinals)
        edges = np.flatnonzero(np.diff(numbers)) + 1
        for start, end in zip([0, *edges], [*edges, ordinals.size], strict=True):
            unit = self._units[int(numbers[start])]
            result[start:end] = self._signatures(unit, ordinals[start:end] - unit.first_ordinal)
        return result

    def _signatures(self, unit: IndexedUnit, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        stored = np.memmap(
            unit.place / "signatures.bin",
            dtype=np.uint32,
            mode="r",
            shape=(unit.num_rows, self._rules.near.num_perm),
        )
        return np.array(stored[rows])


def _scatter(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return keys * np.uint64(0x9E3779B97F4A7C15)


def _ordered(records: NDArray[np.void]) -> NDArray[np.void]:
    """Records whose key another one has too, by key, then from the earliest to the latest."""
    # Most keys are alone: they leave before the costly sort by four fields.
    order = np.argsort(records["key"])
    keys = records["key"][order]
    twice = np.zeros(keys.size, dtype=np.bool_)
    np.equal(keys[1:], keys[:-1], out=twice[1:])
    twice[:-1] |= twice[1:]
    records = records[np.sort(order[twice])]
    order = np.lexsort(
        (records["ordinal"], records["available_at"], records["key2"], records["key"])
    )
    return records[order]


def _first_of_group(records: NDArray[np.void]) -> NDArray[np.int64]:
    """For each record the position of the first one with the same key."""
    new = np.ones(records.size, dtype=np.bool_)
    new[1:] = (records["key"][1:] != records["key"][:-1]) | (
        records["key2"][1:] != records["key2"][:-1]
    )
    return np.maximum.accumulate(np.where(new, np.arange(records.size), 0))


def _matches(
    records: NDArray[np.void], later: NDArray[np.int64], earlier: NDArray[np.int64], kind: int
) -> NDArray[np.void]:
    matches = np.zeros(later.size, dtype=MATCH)
    matches["ordinal"], matches["of"] = records["ordinal"][later], records["ordinal"][earlier]
    matches["available_at"] = records["available_at"][later]
    matches["of_available_at"] = records["available_at"][earlier]
    matches["similarity"] = 1.0
    matches["kind"] = kind
    return matches


def _group_matches(records: NDArray[np.void], kind: int) -> NDArray[np.void]:
    records = _ordered(records)
    first = _first_of_group(records)
    later = np.flatnonzero(first != np.arange(records.size))
    return _matches(records, later, first[later], kind)


def _band_pairs(records: NDArray[np.void]) -> NDArray[np.void]:
    """Candidate pairs: each with the first three of its band and with its predecessor."""
    records = _ordered(records)
    first = _first_of_group(records)
    here = np.arange(records.size)
    places = []
    for partner in (first, first + 1, first + 2, here - 1):
        later = np.flatnonzero((partner < here) & (partner >= first))
        places.append(np.stack([later, partner[later]]))
    later, earlier = np.concatenate(places, axis=1)
    # The same two texts meet in several bands: each pair once, before anything is copied.
    ordinals, others = records["ordinal"][later], records["ordinal"][earlier]
    order = np.lexsort((others, ordinals))
    ordinals, others = ordinals[order], others[order]
    new = np.ones(order.size, dtype=np.bool_)
    new[1:] = (ordinals[1:] != ordinals[:-1]) | (others[1:] != others[:-1])
    once = order[new]
    return _matches(records, later[once], earlier[once], NEAR)
