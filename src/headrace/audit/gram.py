"""Gram matrices of any set of rows, from parts that are computed once.

Owns the embedding and its decompositions. The invariant: sums of a set of rows are exact up to
rounding whichever way they are put together; rows are cut into segments (blocks of dates,
folds of entities), each segment's Gram matrix is made once, and a training set is the sum of
whole segments and of what partial ones hold or lack, whichever is less work.

Shape legend: n rows, D embedding dimensions, R rank of a training set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Rows = NDArray[np.intp]


class GramBook:
    """An embedding with the sums from which every training set is standardised."""

    def __init__(self, values: NDArray[np.floating]) -> None:
        """Take ``(n, D)``; centred and scaled once, for the numbers' sake, which changes no fit."""
        self.values: Array = np.array(values, dtype=np.float64, order="C")
        self.values -= self.values.mean(axis=0)
        scale = np.sqrt(np.einsum("nd,nd->d", self.values, self.values) / len(self.values))
        # A dimension without variance carries nothing; 1 keeps it at zero.
        self.values /= np.where(scale > 0, scale, 1.0)
        self._segment: NDArray[np.intp] = np.zeros(len(self.values), dtype=np.intp)
        self._members: list[Rows] = [np.arange(len(self.values))]
        self._kept: dict[int, tuple[Array, Array]] = {}

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.values)

    @property
    def dimension(self) -> int:
        """D."""
        return int(self.values.shape[1])

    def cut(self, segment: NDArray[np.intp]) -> None:
        """Keep Gram matrices by ``segment`` ``(n,)`` from now on."""
        if np.array_equal(segment, self._segment):
            return
        self._segment = segment
        self._members = [np.flatnonzero(segment == k) for k in range(int(segment.max()) + 1)]
        self._kept = {}

    def moments(self, rows: Rows) -> tuple[Array, Array]:
        """Sum ``(D,)`` and Gram matrix ``(D, D)`` of rows."""
        chosen = np.zeros(self.num_rows, dtype=bool)
        chosen[rows] = True
        total = np.zeros(self.dimension)
        gram = np.zeros((self.dimension, self.dimension))
        loose: list[Rows] = []
        for k, members in enumerate(self._members):
            inside = chosen[members]
            count = int(inside.sum())
            if 2 * count > len(members):
                segment_sum, segment_gram = self._whole(k)
                total += segment_sum
                gram += segment_gram
                if count < len(members):
                    lacking = self.values[members[~inside]]
                    total -= lacking.sum(axis=0)
                    gram -= lacking.T @ lacking
            elif count:
                loose.append(members[inside])
        if loose:
            held = self.values[np.concatenate(loose)]
            total += held.sum(axis=0)
            gram += held.T @ held
        return total, gram

    def _whole(self, k: int) -> tuple[Array, Array]:
        if k not in self._kept:
            values = self.values[self._members[k]]
            self._kept[k] = values.sum(axis=0), values.T @ values
        return self._kept[k]


@dataclass(frozen=True)
class Basis:
    """A training set's standardised embedding, decomposed: Z'Z = V diag(eigenvalues) V'."""

    mean: Array
    scale: Array
    eigenvalues: Array
    vectors_DR: Array
    num_rows: int

    def coordinates(self, values: Array) -> Array:
        """``(n, R)``: rows standardised and turned into the basis."""
        turned: Array = ((values - self.mean) / self.scale) @ self.vectors_DR
        return turned


def decompose(book: GramBook, rows: Rows) -> Basis:
    """Standardise and decompose the embedding of a training set."""
    count = len(rows)
    if count <= book.dimension:
        return _decompose_dual(book.values[rows])
    total, gram = book.moments(rows)
    mean = total / count
    gram -= count * np.outer(mean, mean)
    scale = _scale(np.diagonal(gram) / count)
    gram /= np.outer(scale, scale)
    eigenvalues, vectors = np.linalg.eigh(gram)
    return Basis(mean, scale, np.maximum(eigenvalues, 0.0), vectors, count)


def _decompose_dual(values: Array) -> Basis:
    """From the ``(n, n)`` products of rows, where there are fewer rows than dimensions."""
    count = len(values)
    mean = values.mean(axis=0)
    values = values - mean
    scale = _scale(np.einsum("nd,nd->d", values, values) / count)
    values /= scale
    eigenvalues, turned = np.linalg.eigh(values @ values.T)
    # Directions without variance cannot predict and have no unit vector.
    kept = eigenvalues > max(eigenvalues[-1], 1.0) * count * np.finfo(float).eps
    eigenvalues = eigenvalues[kept]
    vectors = values.T @ (turned[:, kept] / np.sqrt(eigenvalues))
    return Basis(mean, scale, eigenvalues, vectors, count)


def _scale(variance: Array) -> Array:
    # Values were scaled to variance 1 over all rows: below 1e-10 only rounding is left.
    scale: Array = np.where(variance > 1e-10, np.sqrt(np.maximum(variance, 0.0)), 1.0)
    return scale
