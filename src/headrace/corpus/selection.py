"""Which documents a vintage holds: not a duplicate, available in time, inside the token budget.

Sampling is spread over the allowed period: a budget is shared among months (or years) as
water fills a vessel, every month alike until its documents are used up. Inside a month the
documents with the lowest priority are taken, a hash of text and seed: the choice depends on
no other document, on no order, and is the same when sources are added.

Masks are uint64 a document, one bit a vintage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.corpus.unit_files import read_index

if TYPE_CHECKING:
    from headrace.corpus.config import Sampling
    from headrace.corpus.cutoff import Cutoff
    from headrace.corpus.duplicates import DuplicateSearch, IndexedUnit

SELECTION_VERSION = 1

# No tokenizer in use makes tokens of more bytes on average: a budget filled with documents
# counted at this rate holds every document that the exact count can want.
MOST_BYTES_A_TOKEN = 12
_BINS = 1024
_BIN_SHIFT = np.uint64(64 - 10)

Stratum = tuple[str, int]
Weigher = Callable[[int], NDArray[np.int64]]
"""Unit number to a weight (tokens) for each of its document rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """In a stratum, documents with ``priority <= last`` are taken; ``None`` takes none."""

    last: int | None
    quota: int
    available: int


def water_fill(
    available: Mapping[Stratum, int], weights: Mapping[Stratum, float], budget: int
) -> dict[Stratum, int]:
    """Quotas ``min(available, weight * level)`` whose sum is the budget (or all there is).

    Examples:
        >>> water_fill({("", 1): 10, ("", 2): 100, ("", 3): 100},
        ...            {("", 1): 1, ("", 2): 1, ("", 3): 1}, 110)
        {('', 1): 10, ('', 2): 50, ('', 3): 50}
    """
    quotas: dict[Stratum, int] = {}
    left = budget
    open_weight = sum(weights[key] for key in available)
    for key in sorted(available, key=lambda k: (available[k] / weights[k], k)):
        share = left * weights[key] / open_weight if open_weight > 0 else 0.0
        quotas[key] = min(available[key], int(share))
        left -= quotas[key]
        open_weight -= weights[key]
    return {key: quotas[key] for key in available}


def priorities(text_keys: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """A pseudo-random order of documents that depends on each one's text and the seed."""
    mixed = text_keys + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


class Selector:
    """Makes masks, unit by unit, for all vintages at once."""

    def __init__(
        self,
        units: Sequence[IndexedUnit],
        duplicates: DuplicateSearch,
        cutoffs: Sequence[Cutoff],
        sampling: Sampling,
    ) -> None:
        """``cutoffs`` are sorted; bit v of a mask speaks of ``cutoffs[v]``."""
        assert len(cutoffs) <= 64
        self._units = units
        self._duplicates = duplicates
        self._cutoffs = cutoffs
        self._sampling = sampling

    def available_masks(self, number: int) -> tuple[NDArray[np.uint64], NDArray[np.void]]:
        """Masks of a unit's documents before sampling, and their index rows."""
        unit = self._units[number]
        index = read_index(unit.place)
        stays = index["row"] >= 0
        stays[self._duplicates.matches_of(number)["ordinal"] - unit.first_ordinal] = False
        rows = index[index["row"] >= 0]
        kept = stays[index["row"] >= 0]
        masks = np.zeros(rows.size, dtype=np.uint64)
        for bit, cutoff in enumerate(self._cutoffs):
            chosen = kept & (rows["available_at"] <= cutoff.instant_us)
            masks[chosen] |= np.uint64(1 << bit)
        return masks, rows

    def sampled_masks(
        self,
        number: int,
        thresholds: Sequence[Mapping[Stratum, Threshold]] | None,
    ) -> NDArray[np.uint64]:
        """Masks after sampling; ``None`` means that there is no budget."""
        masks, rows = self.available_masks(number)
        if thresholds is None:
            return masks
        ranks = priorities(rows["text_key"][:, 0], self._sampling.seed)
        for bit in range(len(self._cutoffs)):
            for key, members in self._strata(number, rows):
                threshold = thresholds[bit].get(key)
                last = None if threshold is None else threshold.last
                out = members if last is None else members[ranks[members] > np.uint64(last)]
                masks[out] &= ~np.uint64(1 << bit)
        return masks

    def thresholds(
        self, budget: int, weigh: Weigher, within: Sequence[Mapping[Stratum, Threshold]] | None
    ) -> list[dict[Stratum, Threshold]]:
        """Fill the budget by the weights given; ``within`` restricts to an earlier selection."""
        totals: list[dict[Stratum, int]] = [{} for _ in self._cutoffs]
        bins: list[dict[Stratum, NDArray[np.int64]]] = [{} for _ in self._cutoffs]
        for number in range(len(self._units)):
            for bit, key, ranks, weights in self._members(number, weigh, within):
                totals[bit][key] = totals[bit].get(key, 0) + int(weights.sum())
                counts = bins[bit].setdefault(key, np.zeros(_BINS, dtype=np.int64))
                np.add.at(counts, (ranks >> _BIN_SHIFT).astype(np.int64), weights)
        quotas = [water_fill(total, self._weights(total), budget) for total in totals]
        # The bin in which each quota is reached; its documents are then looked at one by one.
        crossing: list[dict[Stratum, tuple[int, int]]] = []
        for bit, quota in enumerate(quotas):
            found = {}
            for key, limit in quota.items():
                filled = np.cumsum(bins[bit][key])
                where = int(np.searchsorted(filled, limit, side="right"))
                if where < _BINS:
                    found[key] = where, int(filled[where - 1]) if where else 0
            crossing.append(found)
        edge: list[dict[Stratum, list[tuple[NDArray[np.uint64], NDArray[np.int64]]]]] = [
            {} for _ in self._cutoffs
        ]
        for number in range(len(self._units)):
            for bit, key, ranks, weights in self._members(number, weigh, within):
                if key in crossing[bit]:
                    here = (ranks >> _BIN_SHIFT) == np.uint64(crossing[bit][key][0])
                    edge[bit].setdefault(key, []).append((ranks[here], weights[here]))
        return [
            {
                key: Threshold(
                    last=self._last(quota, crossing[bit].get(key), edge[bit].get(key, [])),
                    quota=quota,
                    available=totals[bit][key],
                )
                for key, quota in quotas[bit].items()
            }
            for bit in range(len(self._cutoffs))
        ]

    @staticmethod
    def _last(
        quota: int,
        crossing: tuple[int, int] | None,
        edge: list[tuple[NDArray[np.uint64], NDArray[np.int64]]],
    ) -> int | None:
        if crossing is None:
            return (1 << 64) - 1
        bin_number, filled = crossing
        ranks = np.concatenate([r for r, _ in edge]) if edge else np.zeros(0, np.uint64)
        weights = np.concatenate([w for _, w in edge]) if edge else np.zeros(0, np.int64)
        order = np.argsort(ranks, kind="stable")
        inside = filled + np.cumsum(weights[order]) <= quota
        taken = int(inside.sum()) if inside.all() else int(np.argmin(inside))
        if taken:
            return int(ranks[order[taken - 1]])
        return (bin_number << 54) - 1 if bin_number else None

    def _members(
        self, number: int, weigh: Weigher, within: Sequence[Mapping[Stratum, Threshold]] | None
    ) -> list[tuple[int, Stratum, NDArray[np.uint64], NDArray[np.int64]]]:
        masks, rows = self.available_masks(number)
        if within is not None:
            masks = self.sampled_masks(number, within)
        ranks = priorities(rows["text_key"][:, 0], self._sampling.seed)
        weights = weigh(number)
        found = []
        for key, members in self._strata(number, rows):
            for bit in range(len(self._cutoffs)):
                chosen = members[(masks[members] >> np.uint64(bit)) & np.uint64(1) == 1]
                if chosen.size:
                    found.append((bit, key, ranks[chosen], weights[chosen]))
        return found

    def _strata(
        self, number: int, rows: NDArray[np.void]
    ) -> list[tuple[Stratum, NDArray[np.int64]]]:
        source = self._units[number].source if self._sampling.weights else ""
        months = (
            rows["available_at"].astype("datetime64[us]").astype("datetime64[M]").astype(np.int64)
        )
        if self._sampling.spread == "year":
            months //= 12
        elif self._sampling.spread == "none":
            months[:] = 0
        return [
            ((source, int(period)), np.flatnonzero(months == period))
            for period in np.unique(months)
        ]

    def _weights(self, totals: Mapping[Stratum, int]) -> dict[Stratum, float]:
        if not self._sampling.weights:
            return dict.fromkeys(totals, 1.0)
        num_periods: dict[str, int] = {}
        for source, _ in totals:
            num_periods[source] = num_periods.get(source, 0) + 1
        least = min(self._sampling.weights.values())
        return {
            (source, period): max(self._sampling.weights.get(source, least), 1e-9)
            / num_periods[source]
            for source, period in totals
        }
