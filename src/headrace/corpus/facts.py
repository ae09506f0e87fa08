"""Counting what a vintage's checks and manifest speak of.

The invariant is an account that balances: every record of the inputs is a document of the
vintage, or is counted under exactly one reason.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.corpus.document import BAD_REASONS
from headrace.corpus.duplicates import EXACT, NEAR, SAME_ID, DuplicateSearch, IndexedUnit
from headrace.corpus.shards import MentionCounts
from headrace.corpus.unit_files import read_index

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.corpus.config import CorpusConfig
    from headrace.corpus.cutoff import Cutoff
    from headrace.corpus.rejections import DocumentNames, SourceTally

_EXAMPLES = 10
_FILTERS = ("too_short", "over_length", "language", "boilerplate")


@dataclass(slots=True)
class VintageCounts:
    """Counts of one vintage over all units, by source where a source's share matters."""

    available: int = 0
    after_cutoff: int = 0
    kinds: Counter[int] = field(default_factory=Counter)
    same_id: Counter[str] = field(default_factory=Counter)
    across: int = 0
    later_versions: int = 0
    revised: set[int] = field(default_factory=set)
    near_pairs: list[tuple[float, int, int]] = field(default_factory=list)
    across_pairs: list[tuple[float, int, int]] = field(default_factory=list)
    revision_pairs: list[tuple[int, int]] = field(default_factory=list)


def count_vintages(
    units: Sequence[IndexedUnit], duplicates: DuplicateSearch, cutoffs: Sequence[Cutoff]
) -> list[VintageCounts]:
    """One walk over indices and matches for all vintages."""
    counts = [VintageCounts() for _ in cutoffs]
    for number, unit in enumerate(units):
        index = read_index(unit.place)
        matches = duplicates.matches_of(number)
        revisions = duplicates.revisions_of(number)
        stays = np.ones(index.size, dtype=np.bool_)
        stays[matches["ordinal"] - unit.first_ordinal] = False
        for vintage, cutoff in zip(counts, cutoffs, strict=True):
            limit = cutoff.instant_us
            inside = index["available_at"] <= limit
            vintage.available += int((stays & inside).sum())
            # Sound documents of a later vintage; those after all cutoffs are rejected rows.
            vintage.after_cutoff += int((~inside & (index["row"] >= 0)).sum())
            _count_matches(vintage, matches, limit, unit.source)
            # A version counts where the first version is in the vintage too.
            versions = revisions[stays[revisions["ordinal"] - unit.first_ordinal]]
            versions = versions[versions["available_at"] <= limit]
            vintage.later_versions += versions.size
            room = _EXAMPLES - len(vintage.revision_pairs)
            vintage.revision_pairs += [(int(m["ordinal"]), int(m["of"])) for m in versions[:room]]
            if len(vintage.revised) < 1 << 20:
                vintage.revised.update(versions["of"].tolist())
    return counts


def _count_matches(
    vintage: VintageCounts, matches: NDArray[np.void], limit: int, source: str
) -> None:
    inside = matches[matches["available_at"] <= limit]
    for kind in (EXACT, SAME_ID, NEAR):
        vintage.kinds[kind] += int((inside["kind"] == kind).sum())
    vintage.same_id[source] += int((inside["kind"] == SAME_ID).sum())
    across = matches[
        (matches["available_at"] > limit)
        & (matches["of_available_at"] <= limit)
        & (matches["kind"] != SAME_ID)
    ]
    vintage.across += across.size
    for pairs, found in (
        (vintage.near_pairs, inside[inside["kind"] == NEAR]),
        (vintage.across_pairs, across),
    ):
        room = _EXAMPLES - len(pairs)
        pairs += [(float(m["similarity"]), int(m["ordinal"]), int(m["of"])) for m in found[:room]]


def source_facts(
    config: CorpusConfig, tallies: Mapping[str, SourceTally], vintage: VintageCounts
) -> dict[str, dict[str, Any]]:
    """Records and bad records by source, with the ids that came twice by this cutoff."""
    facts = {}
    for source in config.sources:
        tally = tallies[source.name]
        bad = Counter(
            {r: n for r, n in tally.reasons.items() if r in BAD_REASONS and r != "duplicate_id"}
        )
        if vintage.same_id[source.name]:
            bad["duplicate_id"] = vintage.same_id[source.name]
        total = sum(bad.values())
        facts[source.name] = {
            "records": tally.num_records,
            "text_chars": tally.num_text_bytes,
            "bad": total,
            "bad_share": round(total / tally.num_records, 6) if tally.num_records else 0.0,
            "max_bad_share": bad_limit(config, source.name),
            "bad_reasons": dict(sorted(bad.items())),
        }
    return facts


def bad_limit(config: CorpusConfig, name: str) -> float:
    """The share of bad records a source may have."""
    source = next(source for source in config.sources if source.name == name)
    return config.max_bad_share if source.max_bad_share is None else source.max_bad_share


@dataclass(slots=True)
class ShardSums:
    """What the shards of a vintage counted, added up."""

    histogram: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    languages: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    boilerplate: Counter[str] = field(default_factory=Counter)
    chars: list[int] = field(default_factory=lambda: [0, 0, 0])
    mentions: MentionCounts = field(default_factory=MentionCounts)

    def add(self, source: str, bit: int, stats: Mapping[str, Any]) -> None:
        """Add one segment of a shard."""
        for month, values in stats["months"].items():
            row = self.histogram.setdefault((source, month), [0, 0, 0, 0])
            for i, value in enumerate(values):
                row[i] += value
        self.languages.update(stats["languages"])
        self.rules.update(stats["rules"])
        self.boilerplate.update(stats["boilerplate_tenths"])
        total, shortest, longest = stats["chars"]
        known = [n for n in (self.chars[1], shortest) if n]
        self.chars = [
            self.chars[0] + total, min(known) if known else 0, max(self.chars[2], longest)
        ]  # fmt: skip
        self.mentions.merge(stats["mentions"][str(bit)])

    def totals(self) -> list[int]:
        """Documents, tokens, bytes, documents dated by an upper bound."""
        return [sum(row[i] for row in self.histogram.values()) for i in range(4)]


def read_shard_stats(place: Path) -> dict[int, dict[str, Any]]:
    """Statistics of a shard by mask."""
    loaded = json.loads((place / "stats.json").read_text(encoding="utf-8"))
    return {int(mask, 16): stats for mask, stats in loaded.items()}


def vintage_facts(
    config: CorpusConfig,
    tallies: Mapping[str, SourceTally],
    vintage: VintageCounts,
    sums: ShardSums,
    names: DocumentNames,
    *,
    tokenizer: Mapping[str, Any] | None,
    budget: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that the checks weigh and the manifest prints."""
    documents, tokens, num_bytes, bounds = sums.totals()
    reasons: Counter[str] = Counter()
    for tally in tallies.values():
        reasons.update(tally.reasons)
    sources = source_facts(config, tallies, vintage)
    bad = sum(source["bad"] for source in sources.values())
    filtered = {reason: reasons[reason] for reason in _FILTERS if reasons[reason]}
    counts = {
        "records": sum(tally.num_records for tally in tallies.values()),
        "documents": documents,
        "tokens": tokens if tokenizer is not None else None,
        "bytes": num_bytes,
        "characters": sums.chars[0],
        "upper_bound": bounds,
        "bad": bad,
        "after_cutoff": reasons["after_cutoff"] + vintage.after_cutoff,
        "exact_duplicates": vintage.kinds[EXACT],
        "near_duplicates": vintage.kinds[NEAR],
        "filtered": filtered,
        "not_sampled": vintage.available - documents,
    }
    accounted = (
        documents + bad + counts["after_cutoff"] + counts["exact_duplicates"]
        + counts["near_duplicates"] + sum(filtered.values()) + counts["not_sampled"]
    )  # fmt: skip
    assert accounted == counts["records"], (accounted, counts)
    mentions = sums.mentions.to_json(config.checks.future_mentions.num_examples)
    for example in mentions["examples"]:
        del example["rank"]
    return {
        "counts": counts,
        "sources": sources,
        "bad_examples": [
            {"reason": reason, **example}
            for name in sorted(tallies)
            for reason, examples in sorted(tallies[name].examples.items())
            if reason in BAD_REASONS
            for example in examples
        ][: 4 * _EXAMPLES],
        "mentions": mentions,
        "duplicates": {
            "exact": vintage.kinds[EXACT],
            "near": vintage.kinds[NEAR],
            "across": vintage.across,
            "examples": [
                *(_pair(names, pair, "across the cutoff") for pair in vintage.across_pairs),
                *(_pair(names, pair, "removed") for pair in vintage.near_pairs),
            ],
        },
        "revisions": {
            "later_versions": vintage.later_versions,
            "revised": len(vintage.revised),
            "examples": [
                {"doc_id": names.label(later), "first": names.label(first)}
                for later, first in vintage.revision_pairs
            ],
        },
        "histogram": [
            {
                "source": source,
                "month": month,
                "documents": row[0],
                "tokens": row[1] if tokenizer is not None else None,
                "bytes": row[2],
                "upper_bound_documents": row[3],
            }
            for (source, month), row in sorted(sums.histogram.items())
        ],
        "languages": dict(sorted(sums.languages.items())),
        "rules": dict(sorted(sums.rules.items())),
        "boilerplate_tenths": dict(sorted(sums.boilerplate.items())),
        "chars": {
            "mean": round(sums.chars[0] / documents, 1) if documents else 0.0,
            "shortest": sums.chars[1],
            "longest": sums.chars[2],
        },
        "tokenizer": tokenizer,
        "budget": budget,
    }


def _pair(names: DocumentNames, pair: tuple[float, int, int], what: str) -> dict[str, Any]:
    similarity, later, earlier = pair
    return {
        "what": what,
        "doc_id": names.label(later),
        "earlier": names.label(earlier),
        "similarity": round(similarity, 3),
    }
