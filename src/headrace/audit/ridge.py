"""Ridge regressions on sets of rows, many targets and all penalties of a set together.

Owns the algebra of one batch of training sets. The invariant: the coefficients of a column are
those of a ridge fitted to that column alone on the standardised embedding and its own features.
A Cholesky factor a penalty costs less than the eigenvectors that would serve all of them (six
factors 0.7 s, eigenvectors 1.5 s on one core at 2,048 dimensions). Features may differ from
column to column, so they enter through a Schur complement beside the fixed embedding; where a
set has no more rows than dimensions, the factor is that of its rows' products. It chooses no
penalty (:mod:`headrace.audit.regress`).

Shape legend: B sets, A parts, D embedding dimensions, P features, K = 1 + P (a target and its
features), M target columns, Q = K x M.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import lapack

from headrace.audit.threads import spread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.audit.gram import GramBook, Parts
    from headrace.audit.regress import Targets

    Array = NDArray[np.float64]
    Rows = NDArray[np.intp]

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Sums:
    """Cross products of sets of rows."""

    cross_BQD: Array  # [y, F]'X
    totals_BKM: Array
    squares_BKKM: Array  # [y, F]'[y, F]


class CrossBook:
    """Cross products of every part with a slice of columns, made once."""

    def __init__(self, book: GramBook, targets: Targets, parts: Parts, columns: slice) -> None:
        """Read the targets of every part."""
        width, count = columns.stop - columns.start, 1 + targets.num_features
        self._parts = parts
        self._cross_AQD = np.zeros((len(parts.members), count * width, book.dimension))
        self._totals_AKM = np.zeros((len(parts.members), count, width))
        self._squares_AKKM = np.zeros((len(parts.members), count, count, width))

        def read(part: int) -> None:
            members = parts.members[part]
            for start in range(0, len(members), _ROWS_AT_ONCE):
                rows = members[start : start + _ROWS_AT_ONCE]
                block_KnM = without_gaps(targets.block(rows, columns))
                flat_Qn = block_KnM.transpose(0, 2, 1).reshape(count * width, len(rows))
                self._cross_AQD[part] += flat_Qn @ book.values[rows]
                self._totals_AKM[part] += block_KnM.sum(axis=1)
                self._squares_AKKM[part] += np.einsum("jnm,knm->jkm", block_KnM, block_KnM)

        for _ in spread(read, range(len(parts.members)), dimension=book.dimension):
            pass

    def of(self, sets: NDArray[np.intp]) -> Sums:
        """Sums of sets of rows."""
        holds = self._parts.holds_SA[sets]
        return Sums(
            *(
                (holds @ kept.reshape(len(kept), -1)).reshape(len(sets), *kept.shape[1:])
                for kept in (self._cross_AQD, self._totals_AKM, self._squares_AKKM)
            )
        )

    def means(self, sets: NDArray[np.intp]) -> Array:
        """``(B, M)`` of the targets."""
        totals = self._parts.holds_SA[sets] @ self._totals_AKM[:, 0]
        means: Array = totals / self._parts.counts_S[sets][:, None]
        return means


def without_gaps(block: Array) -> Array:
    """Missing values as 0, which is the mean."""
    gaps = np.isnan(block)
    return np.where(gaps, 0.0, block) if gaps.any() else block


@dataclass(frozen=True)
class Heads:
    """Coefficients of one penalty on rows as they are: ``y ~ constant + x'u + f'v``."""

    u_BMD: Array
    v_BMP: Array
    constant_BM: Array


class Training:
    """A batch of standardised training sets, ready to be solved.

    Attributes:
        mean_BD: of the embedding; ``target_mean_BM``, ``feature_mean_BPM`` likewise.
    """

    def __init__(self, book: GramBook, cross: CrossBook, parts: Parts, sets: Rows) -> None:
        """Standardise ``sets``; more than one only where each has more rows than dimensions."""
        self._sums = cross.of(sets)
        count_B = parts.counts_S[sets].astype(np.float64)
        self.mean_BD = book.sums(sets) / count_B[:, None]
        totals_BKM = self._sums.totals_BKM
        mean_BKM = totals_BKM / count_B[:, None, None]
        self.target_mean_BM, self.feature_mean_BPM = mean_BKM[:, 0], mean_BKM[:, 1:]
        self._z_nD: Array | None = None
        if len(sets) == 1 and count_B[0] <= book.dimension:
            z_nD = book.values[parts.sets[sets[0]]] - self.mean_BD[0]
            variance_BD = np.einsum("nd,nd->d", z_nD, z_nD)[None] / count_B[:, None]
            self._scale_BD = _scale(variance_BD)
            z_nD /= self._scale_BD[0]
            self._z_nD = z_nD
            self._gram_BEE = (z_nD @ z_nD.T)[None]
        else:
            grams = book.grams(sets)
            weighted_BD = count_B[:, None] * self.mean_BD
            grams -= weighted_BD[:, :, None] * self.mean_BD[:, None]
            diagonal_BD = np.einsum("bdd->bd", grams)
            self._scale_BD = _scale(diagonal_BD / count_B[:, None])
            grams /= self._scale_BD[:, None]
            grams /= self._scale_BD[:, :, None]
            self._gram_BEE = grams
        num_sets, count, width = totals_BKM.shape
        right = self._sums.cross_BQD
        right -= totals_BKM.reshape(num_sets, -1, 1) * self.mean_BD[:, None]
        right /= self._scale_BD[:, None]
        self._standardise_features(count_B, mean_BKM)
        for p in range(count - 1):
            columns = slice((p + 1) * width, (p + 2) * width)
            right[:, columns] /= self._feature_scale_BPM[:, p, :, None]
        self._right_BQD = right
        self._dual_right_Qn = None if self._z_nD is None else right[0] @ self._z_nD.T

    def _standardise_features(self, count_B: Array, mean_BKM: Array) -> None:
        products = mean_BKM[:, :, None] * mean_BKM[:, None]
        covariance = self._sums.squares_BKKM - count_B[:, None, None, None] * products
        variance = np.einsum("bppm->bpm", covariance)[:, 1:] / count_B[:, None, None]
        positive = variance > 1e-24
        scale = np.where(positive, np.sqrt(np.where(positive, variance, 1.0)), 1.0)
        self._feature_scale_BPM = scale
        gram = covariance[:, 1:, 1:] / (scale[:, :, None] * scale[:, None])
        self._feature_gram_BMPP = gram.transpose(0, 3, 1, 2)
        self._feature_target_BMP = (covariance[:, 1:, 0] / scale).transpose(0, 2, 1)

    def heads(
        self, penalty: float, *, only: int | None = None, columns: NDArray[np.intp] | None = None
    ) -> Heads:
        """Fit every column, or ``columns``, of every set, or of set ``only``."""
        batch = slice(None) if only is None else slice(only, only + 1)
        count = 1 + self.feature_mean_BPM.shape[1]
        width = self.target_mean_BM.shape[1]
        chosen = np.arange(width) if columns is None else columns
        pick = (np.arange(count)[:, None] * width + chosen).ravel()
        whole = len(chosen) == width
        right = self._right_BQD[batch] if whole else self._right_BQD[batch][:, pick]
        solved = self._solve(penalty, batch, right, None if whole else pick)
        shape = (len(right), count, len(chosen), right.shape[2])
        solved_BKMD, right_BKMD = solved.reshape(shape), right.reshape(shape)
        gamma = solved_BKMD[:, 0]
        beta_BMP = np.zeros((shape[0], shape[2], 0))
        if count > 1:
            # Block ridge: eliminate the embedding, solve the P x P complement, substitute back.
            gram = self._feature_gram_BMPP[batch][:, chosen] + penalty * np.eye(count - 1)
            gram = gram - _products(right_BKMD[:, 1:], solved_BKMD[:, 1:])
            target = self._feature_target_BMP[batch][:, chosen]
            target = target - _products(right_BKMD[:, 1:], solved_BKMD[:, :1])[..., 0]
            beta_BMP = np.linalg.solve(gram, target[..., None])[..., 0]
            for p in range(count - 1):
                gamma = gamma - beta_BMP[:, :, p, None] * solved_BKMD[:, 1 + p]
        u_BMD = gamma / self._scale_BD[batch][:, None]
        v_BMP = beta_BMP / self._feature_scale_BPM[batch][:, :, chosen].transpose(0, 2, 1)
        constant = self.target_mean_BM[batch][:, chosen]
        constant = constant - (u_BMD @ self.mean_BD[batch][:, :, None])[..., 0]
        constant = constant - np.einsum(
            "bmp,bpm->bm", v_BMP, self.feature_mean_BPM[batch][:, :, chosen]
        )
        return Heads(u_BMD, v_BMP, constant)

    def _solve(self, penalty: float, batch: slice, right_BQD: Array, pick: Rows | None) -> Array:
        """``(B, Q, D)``: the inverse of (Gram + penalty) applied to every right-hand side."""
        penalised = self._gram_BEE[batch].copy()
        penalised.reshape(len(penalised), -1)[:, :: penalised.shape[1] + 1] += penalty
        if self._z_nD is None:
            solved = np.empty_like(right_BQD)
            for gram, right_QD, solved_QD in zip(penalised, right_BQD, solved, strict=True):
                solved_QD[:] = _posv(gram, right_QD)
            return solved
        # (Z'Z + p)^-1 r = (r - Z'(ZZ' + p)^-1 Z r) / p
        assert self._dual_right_Qn is not None
        turned = self._dual_right_Qn if pick is None else self._dual_right_Qn[pick]
        inner = _posv(penalised[0], turned)
        solved = right_BQD - (inner @ self._z_nD)[None]
        solved /= penalty
        return solved


def _posv(gram: Array, right_QE: Array) -> Array:
    """Solve in place of ``gram``, symmetric and positive definite: ``(Q, E)``."""
    _, solved, info = lapack.dposv(gram.T, right_QE.T, lower=1, overwrite_a=1)
    assert info == 0, "a Gram matrix with a positive penalty is positive definite"
    turned: Array = solved.T
    return turned


def _products(left_BPMD: Array, right_BRMD: Array) -> Array:
    """``(B, M, P, R)`` inner products over D."""
    products: Array = np.matmul(left_BPMD.transpose(0, 2, 1, 3), right_BRMD.transpose(0, 2, 3, 1))
    return products


def _scale(variance: Array) -> Array:
    # Values were scaled to variance 1 over all rows: below 1e-10 only rounding is left.
    scale: Array = np.where(variance > 1e-10, np.sqrt(np.maximum(variance, 0.0)), 1.0)
    return scale
