"""Ridge regression of many targets on one embedding, fold after fold, all penalties at once.

Owns the solver behind every audit figure. One eigendecomposition of a training set serves all
penalties and all targets: the observed target and its copies moved against the dates are solved
together. The invariant: a column's prediction depends on its own training rows alone, its
penalty included, exactly as if it had been fitted by itself. It knows nothing of dates.

The estimator: embedding and features standardised by the mean and standard deviation of the
training rows, target centred there; penalties 10 ... 1e6 on the summed squared error, and
"constant only" (an infinite penalty); the penalty with the least squared error over inner
validation windows, chosen for each column. Features may differ from column to column (they
move with their target), so they enter through a Schur complement beside the fixed embedding.

A missing target counts as the mean where it would be trained on or choose a penalty, and is
not scored.

Shape legend: n rows, D embedding dimensions, R rank of a training set, P features,
K = 1 + P (a target and its features), M target columns, A penalties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.audit.gram import Basis, GramBook, decompose

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


@dataclass(frozen=True)
class _Sums:
    """Cross products of a set of rows, for a slice of columns."""

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
    squares = np.einsum("jnm,knm->jkm", block, block)
    return _Sums(cross, block.sum(axis=1), squares)


@dataclass(frozen=True)
class _Heads:
    """Fitted coefficients of every penalty, before one is chosen."""

    basis: Basis
    target_RM: Array  # V'Z'y
    features_RPM: Array  # V'Z'F
    feature_mean_PM: Array
    feature_scale_PM: Array
    feature_gram_MPP: Array
    feature_target_MP: Array
    constant_M: Array

    def coefficients(self, penalty_M: Array) -> tuple[Array, Array]:
        """Embedding ``(R, M)`` and feature ``(P, M)`` coefficients, a finite penalty a column."""
        shrink = 1.0 / (self.basis.eigenvalues[:, None] + penalty_M[None, :])
        target = shrink * self.target_RM
        if self.features_RPM.shape[1] == 0:
            return target, np.zeros((0, target.shape[1]))
        # Block ridge: eliminate the embedding, solve the P x P complement, substitute back.
        features = shrink[:, None, :] * self.features_RPM
        gram = self.feature_gram_MPP - np.einsum("rpm,rqm->mpq", self.features_RPM, features)
        gram += penalty_M[:, None, None] * np.eye(gram.shape[1])
        right = self.feature_target_MP - np.einsum("rpm,rm->mp", self.features_RPM, target)
        beta = np.linalg.solve(gram, right[..., None])[..., 0].T
        return target - np.einsum("rpm,pm->rm", features, beta), beta

    def predict(self, coordinates_nR: Array, features_PnM: Array, penalty_M: Array) -> Array:
        """``(n, M)`` deviations from the training mean."""
        finite = np.isfinite(penalty_M)
        if not finite.any():
            return np.zeros((len(coordinates_nR), len(penalty_M)))
        gamma, beta = self.coefficients(np.where(finite, penalty_M, 1.0))
        out = coordinates_nR @ gamma
        if len(beta):
            scaled = (features_PnM - self.feature_mean_PM[:, None]) / self.feature_scale_PM[:, None]
            out += np.einsum("pnm,pm->nm", np.nan_to_num(scaled, nan=0.0), beta)
        out[:, ~finite] = 0.0
        return out

    def loss(self, moments: tuple[Array, Array], sums: _Sums, count: int, penalty: float) -> Array:
        """``(M,)`` squared error on rows known by their sums alone.

        The sum of ``(y - c - x'u - f'v)^2`` expanded, so that many validation rows cost no more
        than few.
        """
        squares, totals = sums.squares_KKM, sums.sums_KM
        if np.isinf(penalty):
            c = self.constant_M
            plain: Array = squares[0, 0] - 2 * c * totals[0] + count * c**2
            return plain
        gamma, beta = self.coefficients(np.full(len(self.constant_M), penalty))
        u = (self.basis.vectors_DR @ gamma) / self.basis.scale[:, None]
        v = beta / self.feature_scale_PM
        c = self.constant_M - self.basis.mean @ u - (self.feature_mean_PM * v).sum(axis=0)
        total, gram = moments
        fitted_sum = total @ u + (v * totals[1:]).sum(axis=0)
        with_target = (u * sums.cross_DKM[:, 0]).sum(axis=0) + (v * squares[0, 1:]).sum(axis=0)
        quadratic = (u * (gram @ u)).sum(axis=0)
        if len(v):
            quadratic += 2 * np.einsum("dm,dpm,pm->m", u, sums.cross_DKM[:, 1:], v)
            quadratic += np.einsum("pm,pqm,qm->m", v, squares[1:, 1:], v)
        linear = -2 * c * totals[0] - 2 * with_target + 2 * c * fitted_sum
        loss: Array = squares[0, 0] + linear + quadratic + count * c**2
        return loss


def _heads(basis: Basis, sums: _Sums) -> _Heads:
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
    features = covariance[1:, 1:] / (scale[:, None] * scale[None])
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
    """Decompositions and cross products, each made once and reused."""

    def __init__(self, book: GramBook, targets: Targets, shared: set[int]) -> None:
        self.book, self.targets = book, targets
        width = 1 + targets.num_features
        per_column = 8 * (width * book.num_rows + width * book.dimension)
        step = max(1, _CHUNK_BYTES // per_column)
        starts = range(0, targets.num_columns, step)
        self.chunks = [slice(a, min(a + step, targets.num_columns)) for a in starts]
        self._all = np.arange(book.num_rows)
        self._totals: dict[int, _Sums] = {}
        self._shared = shared
        self._bases: dict[int, Basis] = {}
        self._last: tuple[Rows, Basis] | None = None

    def basis(self, rows: Rows) -> Basis:
        """Of a training set; the last one and those that a fold and a window share are kept."""
        if id(rows) in self._bases:
            return self._bases[id(rows)]
        if self._last is not None and self._last[0] is rows:
            return self._last[1]
        basis = decompose(self.book, rows)
        self._last = (rows, basis)
        if id(rows) in self._shared:
            self._bases[id(rows)] = basis
        return basis

    def sums(self, rows: Rows, columns: slice) -> _Sums:
        mask = np.ones(self.book.num_rows, dtype=bool)
        mask[rows] = False
        others = np.flatnonzero(mask)
        if len(others) >= len(rows):
            return _sums(self.book, self.targets, rows, columns)
        if columns.start not in self._totals:
            self._totals[columns.start] = _sums(self.book, self.targets, self._all, columns)
        return self._totals[columns.start].minus(_sums(self.book, self.targets, others, columns))

    def window_losses(
        self, train: Rows, validation: Rows, penalties: Array, columns: slice
    ) -> Array:
        """``(A, M)`` squared errors of one window."""
        basis = self.basis(train)
        heads = _heads(basis, self.sums(train, columns))
        width = columns.stop - columns.start
        count, dimension = len(validation), self.book.dimension
        # Multiplications of either way, a penalty counted six times.
        by_rows = count * len(basis.eigenvalues) * (dimension + 6 * width)
        by_sums = count * dimension * width + 12 * dimension**2 * width
        if by_sums < by_rows:
            moments = self.book.moments(validation)
            sums = _sums(self.book, self.targets, validation, columns)
            return np.stack([heads.loss(moments, sums, count, penalty) for penalty in penalties])
        block = np.nan_to_num(self.targets.block(validation, columns), nan=0.0)
        error = block[0] - heads.constant_M
        coordinates = basis.coordinates(self.book.values[validation])
        losses = []
        for penalty in penalties:
            fitted = heads.predict(coordinates, block[1:], np.full(width, penalty))
            losses.append(((error - fitted) ** 2).sum(axis=0))
        return np.stack(losses)


def nested_ridge(
    book: GramBook,
    targets: Targets,
    *,
    folds: Sequence[Fold],
    windows: Sequence[tuple[Rows, Rows]],
    consume: Callable[[Predictions], None],
    penalties: Sequence[float] = PENALTIES,
    segment: NDArray[np.intp] | None = None,
) -> None:
    """Fit every fold for every column and hand the test predictions to ``consume``.

    Args:
        book: the embedding.
        targets: what is predicted.
        folds: training and test rows; ``windows`` of a fold choose its penalties.
        windows: inner (training, validation) rows. Windows in a row, and folds, that hold the
            *same* training array share its decomposition.
        consume: called for each fold and slice of columns; predictions are not kept.
        penalties: candidates; ``numpy.inf`` is "constant only". With one candidate, or a fold
            without windows, nothing is chosen and the last candidate is used.
        segment: ``(n,)`` parts that training sets are mostly made of, for speed alone.
    """
    if segment is not None:
        book.cut(segment)
    shared = {id(fold.train) for fold in folds} & {id(train) for train, _ in windows}
    solver = _Solver(book, targets, shared)
    grid = np.asarray(penalties, dtype=np.float64)
    loss_WAM = np.zeros((len(windows), len(grid), targets.num_columns))
    if len(grid) > 1:
        for w, (train, validation) in enumerate(windows):
            for columns in solver.chunks:
                loss_WAM[w, :, columns] = solver.window_losses(train, validation, grid, columns)
    for f, fold in enumerate(folds):
        # Ties go to the stronger penalty: the flipped order makes argmin see it first.
        total = loss_WAM[list(fold.windows)].sum(axis=0)[::-1]
        chosen = grid[::-1][np.argmin(total, axis=0)]
        fitted = not np.isinf(chosen).all()
        if fitted:
            basis = solver.basis(fold.train)
            coordinates = basis.coordinates(book.values[fold.test])
        for columns in solver.chunks:
            block = targets.block(fold.test, columns)
            if fitted:
                heads = _heads(basis, solver.sums(fold.train, columns))
                deviation = heads.predict(coordinates, block[1:], chosen[columns])
                constant = heads.constant_M
            else:
                train = np.nan_to_num(targets.block(fold.train, columns)[0], nan=0.0)
                deviation, constant = np.zeros(block.shape[1:]), train.mean(axis=0)
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
