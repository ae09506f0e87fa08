"""Ridge regression of many targets on one embedding, fold after fold, all penalties at once.

Owns the solver behind every audit figure. One Gram matrix of the embedding serves all folds
(a training set's Gram is the total minus the rows left out), and one eigendecomposition of a
training set serves all penalties and all targets: the observed target and its copies moved
against the dates are solved together. The invariant: a column's prediction depends on its own
training rows alone, its penalty included, exactly as if it had been fitted by itself. It knows
nothing of dates.

The estimator: embedding and features standardised by the mean and standard deviation of the
training rows, target centred there; penalties 10 ... 1e6 on the summed squared error, and
"constant only" (an infinite penalty); the penalty with the least squared error over inner
validation windows, chosen for each column. Features may differ from column to column (they
move with their target), so they enter through a Schur complement beside the fixed embedding.

Shape legend: n rows, D embedding dimensions, R rank of a training set, P features,
K = 1 + P (a target and its features), M target columns, A penalties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Rows = NDArray[np.intp]

PENALTIES = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, np.inf)
ESTIMATOR_VERSION = "ridge-nested/1"
_CHUNK_BYTES = 96 << 20


class Targets(Protocol):
    """Columns to predict. Values are centred near 0; a missing one is NaN."""

    @property
    def num_columns(self) -> int:
        """M."""
        ...

    @property
    def num_features(self) -> int:
        """P."""
        ...

    def block(self, rows: Rows, columns: slice) -> Array:
        """``(K, n, M)``: targets, then the features that move with them."""
        ...


@dataclass(frozen=True)
class ArrayTargets:
    """Targets held in memory: ``values`` is ``(n, M)``."""

    values: Array

    @property
    def num_columns(self) -> int:
        """M."""
        return int(self.values.shape[1])

    @property
    def num_features(self) -> int:
        """None."""
        return 0

    def block(self, rows: Rows, columns: slice) -> Array:
        """``(1, n, M)``."""
        return self.values[rows, columns][None]


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Rows to train on and to predict, and the windows that choose its penalty.

    Attributes:
        train, test: row positions, ascending.
        windows: positions in the list of windows whose rows are all training rows here.
    """

    train: Rows
    test: Rows
    windows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a fold predicts, for a slice of columns.

    Attributes:
        fold: position of the fold.
        rows: ``(n,)`` test rows.
        columns: which targets.
        deviation: ``(n, M)`` prediction minus the training mean; 0 where constant-only won.
        constant: ``(M,)`` training mean.
        target: ``(n, M)`` what was predicted; NaN where missing.
        penalty: ``(M,)`` as chosen.
    """

    fold: int
    rows: Rows
    columns: slice
    deviation: Array
    constant: Array
    target: Array
    penalty: Array


class GramBook:
    """An embedding with the sums from which every training set is standardised."""

    def __init__(self, values: NDArray[np.floating]) -> None:
        """Take ``(n, D)``; centred and scaled once, for the numbers' sake, which changes no fit."""
        self.values: Array = np.array(values, dtype=np.float64, order="C")
        self.values -= self.values.mean(axis=0)
        scale = np.sqrt(np.einsum("nd,nd->d", self.values, self.values) / len(self.values))
        # A dimension without variance carries nothing; 1 keeps it at zero.
        self.values /= np.where(scale > 0, scale, 1.0)
        self._sum: Array | None = None
        self._gram: Array | None = None

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.values)

    @property
    def dimension(self) -> int:
        """D."""
        return int(self.values.shape[1])

    def _totals(self) -> tuple[Array, Array]:
        if self._sum is None or self._gram is None:
            self._sum, self._gram = _moments(self.values)
        return self._sum, self._gram

    def moments(self, rows: Rows) -> tuple[Array, Array]:
        """Sum ``(D,)`` and Gram matrix ``(D, D)`` of rows, by subtraction where that is less."""
        others = _complement(rows, self.num_rows)
        if len(others) >= len(rows):
            return _moments(self.values[rows])
        (total, total_gram), (left_out, left_out_gram) = (
            self._totals(),
            _moments(self.values[others]),
        )
        return total - left_out, total_gram - left_out_gram


def _moments(values: Array) -> tuple[Array, Array]:
    return values.sum(axis=0), values.T @ values


def _complement(rows: Rows, num_rows: int) -> Rows:
    mask = np.ones(num_rows, dtype=bool)
    mask[rows] = False
    return np.flatnonzero(mask)


@dataclass(frozen=True)
class _Basis:
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


def _decompose(book: GramBook, rows: Rows) -> _Basis:
    count = len(rows)
    if count <= book.dimension:
        values = book.values[rows]
        mean = values.mean(axis=0)
        values -= mean
        scale = _scale(np.einsum("nd,nd->d", values, values) / count)
        values /= scale
        eigenvalues, turned = np.linalg.eigh(values @ values.T)
        # Directions without variance cannot predict and have no unit vector.
        kept = eigenvalues > max(eigenvalues[-1], 1.0) * count * np.finfo(float).eps
        eigenvalues = eigenvalues[kept]
        vectors = values.T @ (turned[:, kept] / np.sqrt(eigenvalues))
        return _Basis(mean, scale, eigenvalues, vectors, count)
    total, gram = book.moments(rows)
    mean = total / count
    gram = gram - count * np.outer(mean, mean)
    scale = _scale(np.diagonal(gram) / count)
    gram /= np.outer(scale, scale)
    eigenvalues, vectors = np.linalg.eigh(gram)
    return _Basis(mean, scale, np.maximum(eigenvalues, 0.0), vectors, count)


def _scale(variance: Array) -> Array:
    # Values were scaled to variance 1 over all rows: below 1e-10 only rounding is left.
    return np.where(variance > 1e-10, np.sqrt(np.maximum(variance, 0.0)), 1.0)


@dataclass(frozen=True)
class _Sums:
    """Cross products of a training set, for a slice of columns."""

    cross_DKM: Array  # X'[y, F]
    sums_KM: Array
    squares_KKM: Array  # [y, F]'[y, F]

    def minus(self, other: _Sums) -> _Sums:
        return _Sums(
            self.cross_DKM - other.cross_DKM,
            self.sums_KM - other.sums_KM,
            self.squares_KKM - other.squares_KKM,
        )


def _sums(book: GramBook, targets: Targets, rows: Rows, columns: slice) -> _Sums:
    block = np.nan_to_num(targets.block(rows, columns), nan=0.0)
    width = block.shape[2]
    flat = block.transpose(1, 0, 2).reshape(len(rows), -1)
    cross = (book.values[rows].T @ flat).reshape(book.dimension, -1, width)
    squares = np.einsum("jnm,knm->jkm", block, block) if block.shape[0] > 1 else np.zeros((1, 1, 1))
    return _Sums(cross, block.sum(axis=1), squares)


@dataclass(frozen=True)
class _Heads:
    """Fitted coefficients of every penalty, before one is chosen."""

    basis: _Basis
    target_RM: Array  # V'Z'y
    features_RPM: Array  # V'Z'F
    feature_mean_PM: Array
    feature_scale_PM: Array
    feature_gram_MPP: Array
    feature_target_MP: Array
    constant_M: Array

    def coefficients(self, penalty: Array) -> tuple[Array, Array]:
        """Embedding ``(R, M)`` and feature ``(P, M)`` coefficients, a finite penalty a column."""
        shrink = 1.0 / (self.basis.eigenvalues[:, None] + penalty[None, :])
        target = shrink * self.target_RM
        if self.features_RPM.shape[1] == 0:
            return target, np.zeros((0, target.shape[1]))
        # Block ridge: eliminate the embedding, solve the P x P complement, substitute back.
        features = shrink[:, None, :] * self.features_RPM
        gram = self.feature_gram_MPP - np.einsum("rpm,rqm->mpq", self.features_RPM, features)
        gram += penalty[:, None, None] * np.eye(gram.shape[1])
        right = self.feature_target_MP - np.einsum("rpm,rm->mp", self.features_RPM, target)
        beta = np.linalg.solve(gram, right[..., None])[..., 0].T
        return target - np.einsum("rpm,pm->rm", features, beta), beta

    def predict(self, coordinates_nR: Array, features_PnM: Array, penalty: Array) -> Array:
        """``(n, M)`` deviations from the training mean."""
        finite = np.isfinite(penalty)
        out = np.zeros((len(coordinates_nR), len(penalty)))
        if not finite.any():
            return out
        gamma, beta = self.coefficients(np.where(finite, penalty, 1.0))
        out = coordinates_nR @ gamma
        if len(beta):
            scaled = (features_PnM - self.feature_mean_PM[:, None]) / self.feature_scale_PM[:, None]
            out += np.einsum("pnm,pm->nm", np.nan_to_num(scaled, nan=0.0), beta)
        out[:, ~finite] = 0.0
        return out


def _heads(basis: _Basis, sums: _Sums) -> _Heads:
    count = basis.num_rows
    mean_KM = sums.sums_KM / count
    centred = sums.cross_DKM - basis.mean[:, None, None] * sums.sums_KM[None]
    centred /= basis.scale[:, None, None]
    turned = np.tensordot(basis.vectors_DR.T, centred, axes=1)
    covariance = sums.squares_KKM - count * mean_KM[:, None] * mean_KM[None]
    num_features = len(mean_KM) - 1
    scale = np.ones((num_features, mean_KM.shape[1]))
    for p in range(num_features):
        variance = np.maximum(covariance[p + 1, p + 1] / count, 0.0)
        scale[p] = np.where(variance > 1e-24, np.sqrt(variance), 1.0)
    features = covariance[1:, 1:] / (scale[:, None] * scale[None]) if num_features else covariance
    return _Heads(
        basis=basis,
        target_RM=turned[:, 0],
        features_RPM=turned[:, 1:] / scale[None],
        feature_mean_PM=mean_KM[1:],
        feature_scale_PM=scale,
        feature_gram_MPP=features.transpose(2, 0, 1),
        feature_target_MP=(covariance[1:, 0] / scale).T,
        constant_M=mean_KM[0],
    )


class _Solver:
    """Trains sets of rows; totals over all rows are made once and reused by subtraction."""

    def __init__(self, book: GramBook, targets: Targets) -> None:
        self.book, self.targets = book, targets
        width = 1 + targets.num_features
        per_column = 8 * (width * book.num_rows + width * book.dimension)
        step = max(1, _CHUNK_BYTES // per_column)
        self.chunks = [
            slice(a, min(a + step, targets.num_columns))
            for a in range(0, targets.num_columns, step)
        ]
        self._all = np.arange(book.num_rows)
        self._totals: dict[int, _Sums] = {}

    def sums(self, rows: Rows, columns: slice) -> _Sums:
        others = _complement(rows, self.book.num_rows)
        if len(others) >= len(rows):
            return _sums(self.book, self.targets, rows, columns)
        if columns.start not in self._totals:
            self._totals[columns.start] = _sums(self.book, self.targets, self._all, columns)
        return self._totals[columns.start].minus(_sums(self.book, self.targets, others, columns))


def nested_ridge(
    book: GramBook,
    targets: Targets,
    *,
    folds: Sequence[Fold],
    windows: Sequence[tuple[Rows, Rows]],
    consume: Callable[[Predictions], None],
    penalties: Sequence[float] = PENALTIES,
) -> None:
    """Fit every fold for every column and hand the test predictions to ``consume``.

    Args:
        book: the embedding.
        targets: what is predicted.
        folds: training and test rows; ``windows`` of a fold choose its penalties.
        windows: inner (training, validation) rows, fitted once and shared between folds;
            neighbours with the *same* training array share its decomposition.
        consume: called for each fold and slice of columns; predictions are not kept.
        penalties: candidates; ``numpy.inf`` is "constant only". With one candidate, or a fold
            without windows, nothing is chosen and the last candidate is used.
    """
    solver = _Solver(book, targets)
    grid = np.asarray(penalties, dtype=np.float64)
    loss_WAM = np.zeros((len(windows), len(grid), targets.num_columns))
    if len(grid) > 1:
        basis, decomposed = None, None
        for w, (train, validation) in enumerate(windows):
            if basis is None or train is not decomposed:
                basis, decomposed = _decompose(book, train), train
            coordinates = basis.coordinates(book.values[validation])
            for columns in solver.chunks:
                heads = _heads(basis, solver.sums(train, columns))
                block = targets.block(validation, columns)
                error = block[0] - heads.constant_M
                for a, penalty in enumerate(grid):
                    fitted = heads.predict(coordinates, block[1:], np.full(error.shape[1], penalty))
                    loss_WAM[w, a, columns] = np.nansum((error - fitted) ** 2, axis=0)
    for f, fold in enumerate(folds):
        # Ties go to the stronger penalty: the flipped order makes argmin see it first.
        total = loss_WAM[list(fold.windows)].sum(axis=0)[::-1]
        chosen = grid[::-1][np.argmin(total, axis=0)]
        fitted_basis: _Basis | None
        if np.isinf(chosen).all():
            fitted_basis, coordinates = None, np.zeros((0, 0))
        else:
            fitted_basis = _decompose(book, fold.train)
            coordinates = fitted_basis.coordinates(book.values[fold.test])
        for columns in solver.chunks:
            block = targets.block(fold.test, columns)
            if fitted_basis is None:
                train = np.nan_to_num(targets.block(fold.train, columns)[0], nan=0.0)
                deviation, constant = np.zeros(block.shape[1:]), train.mean(axis=0)
            else:
                heads = _heads(fitted_basis, solver.sums(fold.train, columns))
                deviation = heads.predict(coordinates, block[1:], chosen[columns])
                constant = heads.constant_M
            consume(
                Predictions(
                    fold=f,
                    rows=fold.test,
                    columns=columns,
                    deviation=deviation,
                    constant=constant,
                    target=block[0],
                    penalty=chosen[columns],
                )
            )
