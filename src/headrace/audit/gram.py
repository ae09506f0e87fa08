"""Sums and Gram matrices of many sets of rows, from parts that are computed once.

Owns the embedding and the parts. The invariant: parts are the coarsest cut of the rows of which
every set of a plan is a union, so a set's sums are those of its parts, exact up to rounding,
and no product of two rows is formed twice. Small parts keep their rows instead of a Gram matrix
that would be larger. It knows neither targets nor penalties.

Shape legend: n rows, S sets, A parts, B sets of a batch, D embedding dimensions.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.threads import spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Rows = NDArray[np.intp]

_NARROW = 256


@dataclass(frozen=True, eq=False)
class Parts:
    """Sets of rows and the parts that they are made of.

    Attributes:
        sets: as given, each array once.
        members: rows of each part; rows of no set are in none.
        holds_SA: 1.0 where a set holds a part.
        counts_S: rows of each set.
    """

    sets: tuple[Rows, ...]
    members: tuple[Rows, ...]
    holds_SA: Array
    counts_S: NDArray[np.int64]

    def find(self, chosen: Sequence[Rows]) -> NDArray[np.intp]:
        """Positions of sets, found by identity."""
        known = {id(rows): s for s, rows in enumerate(self.sets)}
        return np.array([known[id(rows)] for rows in chosen], dtype=np.intp)


def cut_rows(num_rows: int, sets: Sequence[Rows]) -> Parts:
    """Cut rows by which of ``sets`` (arrays of row positions) hold them."""
    unique = tuple({id(rows): rows for rows in sets}.values())
    held_Sn = np.zeros((len(unique), num_rows), dtype=bool)
    for held_n, rows in zip(held_Sn, unique, strict=True):
        held_n[rows] = True
    used = np.flatnonzero(held_Sn.any(axis=0))
    # A row's memberships as one word of bytes: equal words are one part.
    packed = np.ascontiguousarray(np.packbits(held_Sn[:, used], axis=0).T)
    words = packed.view(np.dtype((np.void, packed.shape[1] or 1))).ravel()
    _, first, part = np.unique(words, return_index=True, return_inverse=True)
    order = np.argsort(part, kind="stable")
    edges = np.cumsum(np.bincount(part, minlength=len(first)))[:-1]
    members = tuple(used[rows] for rows in np.split(order, edges)) if len(used) else ()
    return Parts(
        sets=unique,
        members=members,
        holds_SA=held_Sn[:, used[first]].astype(np.float64),
        counts_S=held_Sn.sum(axis=1),
    )


def largest(values_nD: NDArray[np.floating]) -> Array:
    """``(D,)`` largest size of every column, without an array of the size of all."""
    sizes: Array = np.maximum(values_nD.max(axis=0), -values_nD.min(axis=0)).astype(np.float64)
    return sizes


def near_one(sizes_D: Array) -> Array:
    """Powers of two, which round nothing, that bring sizes near 1."""
    powers: Array = np.ldexp(1.0, -np.clip(np.frexp(sizes_D)[1], -1000, 1000))
    return powers


class GramBook:
    """An embedding with the sums from which every training set is standardised."""

    def __init__(self, values: NDArray[np.floating]) -> None:
        """Take ``(n, D)``; centred and scaled once, for the numbers' sake, which changes no fit."""
        self.values: Array = np.array(values, dtype=np.float64, order="C")
        # Squares of huge or tiny numbers are none.
        self.values *= near_one(largest(self.values))
        self.values -= self.values.mean(axis=0)
        scale = np.sqrt(np.einsum("nd,nd->d", self.values, self.values) / len(self.values))
        # A dimension without variance carries nothing; 1 keeps it at zero.
        self.values /= np.where(scale > 0, scale, 1.0)
        self._parts: Parts | None = None
        self._making = threading.Lock()

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.values)

    @property
    def dimension(self) -> int:
        """D."""
        return int(self.values.shape[1])

    def cut(self, parts: Parts) -> None:
        """Answer for the sets of ``parts`` from now on."""
        if parts is self._parts:
            return
        self._parts = parts
        self._totals_AD = np.zeros((len(parts.members), self.dimension))
        for part, rows in enumerate(parts.members):
            self._totals_AD[part] = self.values[rows].sum(axis=0)
        sizes = np.array([len(rows) for rows in parts.members], dtype=np.int64)
        # A kept matrix is D x D to hold and to add: of a wide embedding, few rows are cheaper.
        whole = (4 * sizes >= self.dimension) | (self.dimension <= _NARROW)
        self._whole, self._loose = np.flatnonzero(whole), np.flatnonzero(~whole)
        self._grams_AE: Array | None = None  # E = D x D
        self._all_loose_DD: Array | None = None

    def sums(self, sets: NDArray[np.intp]) -> Array:
        """``(B, D)`` sums of rows."""
        assert self._parts is not None
        totals: Array = self._parts.holds_SA[sets] @ self._totals_AD
        return totals

    def grams(self, sets: NDArray[np.intp]) -> Array:
        """``(B, D, D)`` Gram matrices."""
        assert self._parts is not None
        dimension = self.dimension
        self.make()
        assert self._grams_AE is not None
        holds = self._parts.holds_SA[sets]
        used = np.flatnonzero(holds[:, self._whole].any(axis=0))
        span = slice(used[0], used[-1] + 1) if len(used) else slice(0, 0)
        grams = (holds[:, self._whole[span]] @ self._grams_AE[span]).reshape(
            -1, dimension, dimension
        )
        for gram_DD, held_A in zip(grams, holds, strict=True):
            self._add_loose(gram_DD, held_A)
        return grams

    def make(self) -> None:
        """Make what the Gram matrices are put together from, unless that was done."""
        assert self._parts is not None
        members = self._parts.members
        with self._making:
            if self._grams_AE is not None:
                return
            grams_AE = np.empty((len(self._whole), self.dimension**2))

            def make(position: int) -> None:
                grams_AE[position] = self._product(members[self._whole[position]]).ravel()

            for _ in spread(make, range(len(grams_AE)), dimension=self.dimension):
                pass
            self._grams_AE = grams_AE

    def _product(self, rows: Rows) -> Array:
        values = self.values[rows]
        product: Array = values.T @ values
        return product

    def _rows_of(self, parts: NDArray[np.intp]) -> Rows:
        assert self._parts is not None
        return np.concatenate([self._parts.members[part] for part in parts])

    def _add_loose(self, gram_DD: Array, held_A: Array) -> None:
        """Add the parts that keep their rows; or all of them, less those that are not held."""
        held = self._loose[held_A[self._loose] > 0]
        if not len(held):
            return
        lacking = self._loose[held_A[self._loose] == 0]
        rows, missing = self._rows_of(held), None
        if len(lacking):
            missing = self._rows_of(lacking)
            if len(missing) >= len(rows):
                gram_DD += self._product(rows)
                return
        with self._making:
            if self._all_loose_DD is None:
                self._all_loose_DD = self._product(self._rows_of(self._loose))
        gram_DD += self._all_loose_DD
        if missing is not None:
            gram_DD -= self._product(missing)
