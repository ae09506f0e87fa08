"""The shared solver gives each column exactly what fitting it alone would give."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from array_targets import ArrayTargets
from headrace.audit.gram import GramBook, cut_rows
from headrace.audit.regress import PENALTIES, Fold, nested_ridge


class Columns:
    """Targets with features of their own in every column."""

    def __init__(self, y, features):
        self.y, self.features = y, features
        self.num_columns, self.num_features = y.shape[1], len(features)

    def block(self, rows, columns):
        return np.concatenate([self.y[None], self.features])[:, rows][:, :, columns]


def draw(n, dimension, num_features, columns=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dimension)) * np.exp(rng.standard_normal(dimension)) + 5
    features = rng.standard_normal((num_features, n, columns)) * 3 + 1
    y = rng.standard_normal((n, columns)) + 0.3 * x[:, :1] + 0.2 * features.sum(axis=0)
    return x, Columns(y, features)


def alone(x, y, train, test, penalty):
    """scikit-learn's ridge on columns standardised inside the training rows."""
    if np.isinf(penalty):
        return np.full(len(test), y[train].mean())
    mean, scale = x[train].mean(axis=0), x[train].std(axis=0)
    fitted = Ridge(alpha=penalty).fit((x[train] - mean) / scale, y[train])
    return fitted.predict((x[test] - mean) / scale)


@pytest.mark.parametrize(
    ("n", "dimension", "num_features"),
    [(200, 30, 0), (200, 30, 3), (60, 200, 0), (60, 200, 2), (2000, 8, 0), (2000, 8, 2)],
)
def test_penalty_and_prediction_equal_scikit_learn_s_column_by_column(n, dimension, num_features):
    x, targets = draw(n, dimension, num_features)
    rows = np.arange(n)
    test = rows[n // 2 : n // 2 + n // 5]
    train = np.setdiff1d(rows, test)
    windows = [(rows[: n // 4], rows[n // 4 : n // 2]), (rows[n // 8 : n // 3], rows[: n // 8])]
    got = []
    nested_ridge(
        GramBook(x),
        targets,
        folds=[Fold(train=train, test=test, windows=(0, 1))],
        windows=windows,
        consume=got.append,
    )
    for column in range(targets.num_columns):
        joined = np.column_stack([*targets.features[:, :, column], x])
        y = targets.y[:, column]
        losses = [
            sum(((y[v] - alone(joined, y, t, v, penalty)) ** 2).sum() for t, v in windows)
            for penalty in PENALTIES
        ]
        penalty = PENALTIES[int(np.argmin(losses))]
        predicted = got[0].deviation[:, column] + got[0].constant[column]
        assert got[0].penalty[column] == penalty
        np.testing.assert_allclose(predicted, alone(joined, y, train, test, penalty), atol=1e-9)


def test_a_column_does_not_depend_on_its_neighbours():
    x, targets = draw(150, 20, 0, columns=6)
    fold = Fold(train=np.arange(100), test=np.arange(100, 150), windows=(0,))
    windows = [(np.arange(60), np.arange(60, 100))]

    def fit(y):
        got = []
        nested_ridge(
            GramBook(x), ArrayTargets(y), folds=[fold], windows=windows, consume=got.append
        )
        return np.concatenate([part.deviation for part in got], axis=1)

    together = fit(targets.y)
    for column in range(6):
        np.testing.assert_allclose(
            together[:, [column]], fit(targets.y[:, [column]]), rtol=0, atol=1e-12
        )


def test_many_rows_and_columns_are_solved_in_slices_with_the_same_result(monkeypatch):
    x, targets = draw(120, 10, 1, columns=30)
    fold = Fold(train=np.arange(80), test=np.arange(80, 120), windows=(0,))

    def fit():
        got = []
        nested_ridge(
            GramBook(x),
            targets,
            folds=[fold],
            windows=[(np.arange(40), np.arange(40, 80))],
            consume=got.append,
        )
        return got

    (whole,) = fit()
    monkeypatch.setattr("headrace.audit.regress._PIECE_BYTES", 8 * 2 * 30 * 15)
    pieces = fit()
    assert [len(piece.rows) for piece in pieces] == [15, 15, 10]
    joined = np.concatenate([piece.deviation for piece in pieces])
    np.testing.assert_allclose(joined, whole.deviation, rtol=0, atol=1e-12)
    monkeypatch.setattr("headrace.audit.regress._CHUNK_BYTES", 2_000)
    monkeypatch.setattr("headrace.audit.regress._PIECE_BYTES", 128 << 20)
    parts = fit()
    assert len(parts) > 3
    sliced = np.concatenate([part.deviation for part in parts], axis=1)
    np.testing.assert_allclose(sliced, whole.deviation, rtol=0, atol=1e-12)


def test_gram_of_parts_equals_the_direct_one_for_large_means():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((300, 8)) + 1e4
    book = GramBook(x)
    sets = [np.arange(250), np.arange(100, 300), np.array([3, 260])]
    parts = cut_rows(300, sets)
    book.cut(parts)
    position = parts.find(sets)
    for rows, total, gram in zip(sets, book.sums(position), book.grams(position), strict=True):
        np.testing.assert_allclose(total, book.values[rows].sum(axis=0), atol=1e-8)
        np.testing.assert_allclose(gram, book.values[rows].T @ book.values[rows], atol=1e-8)


def test_a_dimension_without_variance_changes_nothing():
    x, targets = draw(100, 6, 0)
    fold = Fold(train=np.arange(70), test=np.arange(70, 100), windows=())
    out = []
    for values in (x, np.column_stack([x, np.full(100, 3.0)])):
        nested_ridge(
            GramBook(values),
            targets,
            folds=[fold],
            windows=[],
            consume=out.append,
            penalties=[10.0],
        )
    np.testing.assert_allclose(out[0].deviation, out[1].deviation, atol=1e-12)


def test_nothing_to_learn_chooses_the_constant():
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((400, 60)), rng.standard_normal((400, 20))
    fold = Fold(train=np.arange(300), test=np.arange(300, 400), windows=(0,))
    got = []
    nested_ridge(
        GramBook(x),
        ArrayTargets(y),
        folds=[fold],
        windows=[(np.arange(150), np.arange(150, 300))],
        consume=got.append,
    )
    constant = np.isinf(got[0].penalty)
    assert constant.mean() > 0.3
    assert (got[0].deviation[:, constant] == 0).all()
    np.testing.assert_allclose(got[0].constant, y[:300].mean(axis=0))


def test_missing_targets_train_as_the_mean_and_are_not_scored():
    """Shifted columns lose a few cells; their folds must keep the factor they share."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((200, 5))
    y = x[:, :1] + 0.1 * rng.standard_normal((200, 1))
    y -= y.mean()
    gaps = y.copy()
    gaps[::20] = np.nan
    fold = Fold(train=np.arange(150), test=np.arange(150, 200), windows=())
    got = []
    for values in (np.nan_to_num(gaps, nan=0.0), gaps):
        nested_ridge(
            GramBook(x), ArrayTargets(values), folds=[fold], windows=[], consume=got.append,
            penalties=[10.0],
        )  # fmt: skip
    assert np.isnan(got[1].target).sum() == 2
    np.testing.assert_allclose(got[0].deviation, got[1].deviation, atol=1e-12)
