"""Ridge regression of many targets on one embedding, fold after fold, penalties chosen inside.

Owns the estimator behind every audit figure. Training sets are put together from parts that are
summed once, and all targets are solved together: the observed one and its copies moved against
the dates. The invariant: a column's prediction depends on its own training rows alone, its
penalty included, exactly as if it had been fitted by itself. It knows nothing of dates.

The estimator: embedding and features standardised by the mean and standard deviation of the
training rows, target centred there; penalties 10 ... 1e6 on the summed squared error, and
"constant only" (an infinite penalty); the penalty with the least squared error over inner
validation windows, chosen for each column. Features may differ from column to column (they
move with their target).

A missing target counts as the mean where it would be trained on or choose a penalty, and is
not scored.

Shape legend: n rows, D embedding dimensions, P features, K = 1 + P (a target and its features),
M target columns, L penalties, W windows, B training sets of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.audit.gram import GramBook, Parts, cut_rows
from headrace.audit.ridge import CrossBook, Heads, Training, without_gaps
from headrace.audit.threads import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Rows = NDArray[np.intp]

PENALTIES = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, np.inf)
ESTIMATOR_VERSION = "ridge-nested/1"
_CHUNK_BYTES = 512 << 20  # of cross products
_BATCH_BYTES = 64 << 20  # of Gram matrices
_PIECE_BYTES = 64 << 20  # of the targets of test rows


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
    """What a fold predicts, for some of its rows and a slice of columns.

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


def _chunks(targets: Targets, num_parts: int, dimension: int) -> list[slice]:
    """Columns whose cross products fit in memory together; almost always all of them."""
    per_column = 8 * num_parts * (1 + targets.num_features) * dimension
    step = max(1, _CHUNK_BYTES // max(1, per_column))
    starts = range(0, targets.num_columns, step)
    return [slice(start, min(start + step, targets.num_columns)) for start in starts]


class _Solver:
    """Training sets of a plan for a slice of columns."""

    def __init__(self, book: GramBook, targets: Targets, parts: Parts, columns: slice) -> None:
        self._book, self._targets, self._parts, self._columns = book, targets, parts, columns
        self._cross = CrossBook(book, targets, parts, columns)

    def batches(self, trains: Sequence[Rows]) -> list[list[int]]:
        """Positions in ``trains`` by batch; wide or short sets go alone."""
        size = max(1, _BATCH_BYTES // (24 * self._book.dimension**2))
        batches: list[list[int]] = []
        alone = False
        for position, train in enumerate(trains):
            short = len(train) <= self._book.dimension
            if not batches or short or len(batches[-1]) >= size or alone:
                batches.append([])
            alone = short
            batches[-1].append(position)
        return batches

    def training(self, trains: Sequence[Rows]) -> Training:
        """A batch, standardised."""
        return Training(self._book, self._cross, self._parts, self._parts.find(trains))

    def window_losses(self, windows: Sequence[tuple[Rows, Rows]], penalties: Array) -> Array:
        """``(W, L, M)`` squared errors of every window under every penalty."""
        width = self._columns.stop - self._columns.start
        losses_WLM = np.zeros((len(windows), len(penalties), width))
        by_train: dict[int, list[int]] = {}
        for w, (train, _) in enumerate(windows):
            by_train.setdefault(id(train), []).append(w)
        asked = list(by_train.values())
        trains = [windows[group[0]][0] for group in asked]

        def try_batch(batch: list[int]) -> tuple[list[int], Array]:
            training = self.training([trains[position] for position in batch])
            members = [w for position in batch for w in asked[position]]
            owner = np.repeat(np.arange(len(batch)), [len(asked[position]) for position in batch])
            validations = [windows[w][1] for w in members]
            return members, self._losses(training, owner, validations, penalties)

        for members, losses in spread(
            try_batch, self.batches(trains), dimension=self._book.dimension
        ):
            losses_WLM[members] = losses
        return losses_WLM

    def _losses(
        self, training: Training, owner: Rows, validations: Sequence[Rows], penalties: Array
    ) -> Array:
        mean_WM = training.target_mean_BM[owner]
        sets = self._parts.find(validations)
        sums, count_W = self._cross.of(sets), self._parts.counts_S[sets]
        y_WM, yy_WM = sums.totals_BKM[:, 0], sums.squares_BKKM[:, 0, 0]
        losses = np.empty((len(validations), len(penalties), mean_WM.shape[1]))
        finite = np.flatnonzero(np.isfinite(penalties))
        losses[:] = (yy_WM - 2 * mean_WM * y_WM + count_W[:, None] * mean_WM**2)[:, None]
        by_rows = bool((count_W < self._book.dimension).all())
        heads = [training.heads(penalties[position]) for position in finite]
        if by_rows:
            for w, rows in enumerate(validations):
                block_KnM = without_gaps(self._targets.block(rows, self._columns))
                values_nD = self._book.values[rows]
                for position, head in zip(finite, heads, strict=True):
                    fitted_nM = values_nD @ head.u_BMD[owner[w]].T + head.constant_BM[owner[w]]
                    for p, feature_nM in enumerate(block_KnM[1:]):
                        fitted_nM += feature_nM * head.v_BMP[owner[w], :, p]
                    losses[w, position] = ((block_KnM[0] - fitted_nM) ** 2).sum(axis=0)
            return losses
        # The sum of (y - c - x'u - f'v)^2 expanded: many rows cost no more than few.
        total_WD, gram_WDD = self._book.sums(sets), self._book.grams(sets)
        width = mean_WM.shape[1]
        for position, head in zip(finite, heads, strict=True):
            u_WMD, c_WM = head.u_BMD[owner], head.constant_BM[owner]
            v_WPM = head.v_BMP[owner].transpose(0, 2, 1)
            fitted = (u_WMD @ total_WD[:, :, None])[..., 0]
            product = (u_WMD * sums.cross_BQD[:, :width]).sum(axis=2)
            square = ((u_WMD @ gram_WDD) * u_WMD).sum(axis=2)
            for p in range(v_WPM.shape[1]):
                own = slice((1 + p) * width, (2 + p) * width)
                fitted += v_WPM[:, p] * sums.totals_BKM[:, 1 + p]
                product += v_WPM[:, p] * sums.squares_BKKM[:, 0, 1 + p]
                square += 2 * v_WPM[:, p] * (u_WMD * sums.cross_BQD[:, own]).sum(axis=2)
            square += np.einsum("wpm,wpqm,wqm->wm", v_WPM, sums.squares_BKKM[:, 1:, 1:], v_WPM)
            linear = 2 * c_WM * (fitted - y_WM) - 2 * product
            losses[:, position] = yy_WM + linear + square + count_W[:, None] * c_WM**2
        return losses

    def predict(self, folds: Sequence[Fold], chosen_FM: Array) -> Iterator[Predictions]:
        """Predictions of every fold, many rows in pieces; folds that learned nothing first."""
        trains = [fold.train for fold in folds]
        means_FM = self._cross.means(self._parts.find(trains))
        fitted_F = np.isfinite(chosen_FM).any(axis=1)
        fitted = [int(f) for f in np.flatnonzero(fitted_F)]
        heads_F: dict[int, list[_Head]] = {int(f): [] for f in np.flatnonzero(~fitted_F)}

        def fit(batch: list[int]) -> dict[int, list[_Head]]:
            training = self.training([trains[fitted[position]] for position in batch])
            return {
                fitted[position]: _fit_chosen(training, b, chosen_FM[fitted[position]])
                for b, position in enumerate(batch)
            }

        dimension = self._book.dimension
        for fits in spread(fit, self.batches([trains[f] for f in fitted]), dimension=dimension):
            heads_F |= fits
        width = self._columns.stop - self._columns.start
        size = max(1, _PIECE_BYTES // (8 * (1 + self._targets.num_features) * width))
        pieces = [
            (f, folds[f].test[start : start + size])
            for f in heads_F
            for start in range(0, len(folds[f].test), size)
        ]

        def predict(piece: tuple[int, Rows]) -> Predictions:
            f, rows = piece
            return self._predict(f, rows, means_FM[f], chosen_FM[f], heads_F[f])

        yield from spread(predict, pieces, dimension=dimension)

    def _predict(
        self, fold: int, rows: Rows, mean_M: Array, chosen_M: Array, heads: Sequence[_Head]
    ) -> Predictions:
        block_KnM = self._targets.block(rows, self._columns)
        deviation_nM = np.zeros(block_KnM.shape[1:])
        for columns, head, feature_mean_PM in heads:
            fitted_nM = self._book.values[rows] @ head.u_BMD[0].T
            fitted_nM += head.constant_BM[0] - mean_M[columns]
            for p, feature_nM in enumerate(block_KnM[1:, :, columns]):
                # A missing feature counts as the training mean.
                filled_nM = np.where(np.isnan(feature_nM), feature_mean_PM[p], feature_nM)
                fitted_nM += filled_nM * head.v_BMP[0, :, p]
            deviation_nM[:, columns] = fitted_nM
        return Predictions(
            fold=fold,
            rows=rows,
            columns=self._columns,
            deviation=deviation_nM,
            constant=mean_M,
            target=block_KnM[0],
            penalty=chosen_M,
        )


_Head = tuple["NDArray[np.intp]", Heads, "Array"]  # columns, their head, their features' means


def _fit_chosen(training: Training, member: int, chosen_M: Array) -> list[_Head]:
    """Heads of one set of a batch, a penalty at a time, for the columns that chose it."""
    heads: list[_Head] = []
    for penalty in np.unique(chosen_M[np.isfinite(chosen_M)]):
        columns = np.flatnonzero(chosen_M == penalty)
        head = training.heads(float(penalty), only=member, columns=columns)
        heads.append((columns, head, training.feature_mean_BPM[member][:, columns]))
    return heads


def nested_ridge(
    book: GramBook,
    targets: Targets,
    *,
    folds: Sequence[Fold],
    windows: Sequence[tuple[Rows, Rows]],
    consume: Callable[[Predictions], None],
    penalties: Sequence[float] = PENALTIES,
    parts: Parts | None = None,
) -> None:
    """Fit every fold for every column and hand the test predictions to ``consume``.

    Args:
        book: the embedding.
        targets: what is predicted.
        folds: training and test rows; ``windows`` of a fold choose its penalties.
        windows: inner (training, validation) rows; those that hold the *same* training array
            share its factors.
        consume: called for each fold, piece of its rows and slice of columns; predictions are
            not kept.
        penalties: candidates; ``numpy.inf`` is "constant only". With one candidate, or a fold
            without windows, nothing is chosen and the last candidate is used.
        parts: :func:`plan_parts` of ``folds`` and ``windows``, where it is at hand.
    """
    parts = parts or plan_parts(book.num_rows, folds, windows)
    book.cut(parts)
    if int(parts.counts_S.max()) >= book.dimension:
        # Before the work is spread, so that no worker waits for another to make them.
        book.make()
    grid = np.asarray(penalties, dtype=np.float64)
    for columns in _chunks(targets, len(parts.members), book.dimension):
        solver = _Solver(book, targets, parts, columns)
        losses_WLM = np.zeros((len(windows), len(grid), columns.stop - columns.start))
        if len(grid) > 1:
            losses_WLM = solver.window_losses(windows, grid)
        chosen_FM = np.empty((len(folds), losses_WLM.shape[2]))
        for chosen_M, fold in zip(chosen_FM, folds, strict=True):
            # Ties go to the stronger penalty: the flipped order makes argmin see it first.
            total = losses_WLM[list(fold.windows)].sum(axis=0)[::-1]
            chosen_M[:] = grid[::-1][np.argmin(total, axis=0)]
        for predicted in solver.predict(folds, chosen_FM):
            consume(predicted)


def plan_parts(num_rows: int, folds: Sequence[Fold], windows: Sequence[tuple[Rows, Rows]]) -> Parts:
    """Parts of which all training and validation sets are unions."""
    sets = [fold.train for fold in folds] + [rows for window in windows for rows in window]
    return cut_rows(num_rows, sets)
