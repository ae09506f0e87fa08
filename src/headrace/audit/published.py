"""Protocol ``vessl-2026``: the published evaluation to the letter, for comparison.

Owns the published numbers and nothing better: unscaled embedding joined to unscaled features,
ridge alpha 1, raw target; leakage-off trained up to 2020-12-31 and tested after; leakage-on the
mean R2 of ``GroupKFold(5)``; a percentile interval over 200 refits on entities drawn with
replacement (seed 123). The invariant: every number equals that of scikit-learn's ``Ridge``,
``GroupKFold`` and ``r2_score`` on the same rows. Its defects are looked for and named in
:mod:`headrace.audit.published_defects`; no verdict rests on it.

A draw repeats entities, so a refit is the same ridge with row weights: one weighted Gram matrix
for each cell (fold x side of the split) serves the six fits of a draw, where the published code
fits six regressions on copied rows. Wide embeddings need no Gram matrix a draw at all: their
refits are solved together (:mod:`headrace.audit.published_draws`).

Shape legend: n rows, P columns (embedding and features), M targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import linalg

from headrace.audit.published_draws import solve_draws
from headrace.audit.threads import spread
from headrace.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.audit.panel import Panel

    Array = NDArray[np.float64]

PROTOCOL = "vessl-2026"
PROTOCOL_VERSION = 1  # of this transcription
SPLIT_DATE = "2020-12-31"
ALPHA = 1.0
NUM_FOLDS = 5
NUM_DRAWS = 200
BOOTSTRAP_SEED = 123
MIN_SIDE = 10

# Least columns, and rows a column, for which solving all draws together is the faster way.
_TOGETHER_COLUMNS, _TOGETHER_ROWS = 768, 3


@dataclass(frozen=True, kw_only=True)
class PublishedScores:
    """What the published evaluation prints for one embedding.

    Attributes:
        r2_off, r2_on: ``(M,)`` of each target; the first is the observed one.
        draws: ``(num_draws, 2)`` off and on of the observed target; NaN for a failed draw.
        num_train, num_test: rows of the leakage-off arm.
    """

    r2_off: Array
    r2_on: Array
    draws: Array
    num_train: int
    num_test: int

    @property
    def premium(self) -> float:
        """``r2_on - r2_off``."""
        return float(self.r2_on[0] - self.r2_off[0])

    @property
    def premium_draws(self) -> Array:
        """Premiums of the draws that did not fail."""
        premiums: Array = self.draws[:, 1] - self.draws[:, 0]
        return premiums[~np.isnan(premiums)]

    @property
    def num_failed(self) -> int:
        """Draws that the published code skips without a word."""
        return int(np.isnan(self.draws).any(axis=1).sum())


@dataclass(frozen=True, kw_only=True)
class PublishedRows:
    """The rows of the published evaluation.

    Attributes:
        features: ``(n, 5)`` numeric features, unscaled.
        targets: ``(n, M)``; column 0 is the observed one.
        entity: ``(n,)`` groups.
        train: ``(n,)`` rows dated up to the split.
    """

    features: Array
    targets: Array
    entity: NDArray[np.int64]
    train: NDArray[np.bool_]

    @classmethod
    def of_panel(
        cls,
        panel: Panel,
        *,
        split_date: str = SPLIT_DATE,
        offsets: NDArray[np.int64] | None = None,
    ) -> PublishedRows:
        """The embedded rows, with the panel's features and observed target.

        With ``offsets``, further columns are the target of the same entity that many sessions
        away (its mean where the panel has none): there nothing can leak.
        """
        rows = panel.embedded_rows
        entity, session = panel.entity[rows], panel.session[rows]
        targets = [panel.y[rows]]
        if offsets is not None and len(offsets):
            matrix = np.nan_to_num(panel.matrix(panel.y), nan=float(panel.y.mean()))
            moved = (session[:, None] + offsets[None]) % panel.num_sessions
            targets += list(matrix[entity[:, None], moved].T)
        return cls(
            features=panel.features[rows],
            targets=np.column_stack(targets),
            entity=entity.astype(np.int64),
            train=panel.sessions[session] < np.datetime64(split_date) + np.timedelta64(1, "D"),
        )


def group_folds(entity: NDArray[np.int64], weight: Array) -> NDArray[np.intp]:
    """``(n,)`` fold of each row as ``GroupKFold(5)`` deals it on rows repeated ``weight`` times.

    Groups go by descending size to the lightest fold; of equal sizes the last goes first, as in
    scikit-learn's reversed stable sort.

    Raises:
        DataError: fewer groups than folds.
    """
    groups, position = np.unique(entity[weight > 0], return_inverse=True)
    if len(groups) < NUM_FOLDS:
        raise DataError(
            f"{len(groups)} entities cannot be dealt to {NUM_FOLDS} folds",
            remedy="a panel of more entities",
        )
    sizes = np.bincount(position, weights=weight[weight > 0]).astype(np.intp)
    descending = np.argsort(sizes, kind="stable")[::-1]
    load = np.zeros(NUM_FOLDS)
    fold_of = np.zeros(len(groups), dtype=np.intp)
    for group in descending:
        lightest = int(np.argmin(load))
        load[lightest] += sizes[group]
        fold_of[group] = lightest
    fold = np.full(len(entity), -1, dtype=np.intp)
    fold[weight > 0] = fold_of[position]
    return fold


@dataclass(frozen=True)
class _Moments:
    """Weighted sums of a set of rows."""

    count: float
    sum_P: Array
    target_M: Array
    gram_PP: Array
    cross_PM: Array

    def __add__(self, other: _Moments) -> _Moments:
        return _Moments(
            self.count + other.count,
            self.sum_P + other.sum_P,
            self.target_M + other.target_M,
            self.gram_PP + other.gram_PP,
            self.cross_PM + other.cross_PM,
        )

    def __sub__(self, other: _Moments) -> _Moments:
        return _Moments(
            self.count - other.count,
            self.sum_P - other.sum_P,
            self.target_M - other.target_M,
            self.gram_PP - other.gram_PP,
            self.cross_PM - other.cross_PM,
        )

    def ridge(self) -> tuple[Array, Array]:
        """Coefficients ``(P, M)`` and intercepts ``(M,)``."""
        mean, target_mean = self.sum_P / self.count, self.target_M / self.count
        gram = self.gram_PP - self.count * np.outer(mean, mean)
        gram[np.diag_indices_from(gram)] += ALPHA
        cross = self.cross_PM - self.count * np.outer(mean, target_mean)
        factor = linalg.cho_factor(gram, lower=True, overwrite_a=True, check_finite=False)
        coefficients: Array = linalg.cho_solve(factor, cross, check_finite=False)
        return coefficients, target_mean - mean @ coefficients


def _moments(values: Array, targets: Array, weight: Array) -> _Moments:
    scaled = values * np.sqrt(weight)[:, None]
    return _Moments(
        float(weight.sum()),
        weight @ values,
        weight @ targets,
        scaled.T @ scaled,
        values.T @ (weight[:, None] * targets),
    )


def _r2(targets: Array, predicted: Array, weight: Array) -> Array:
    mean = weight @ targets / weight.sum()
    residual = weight @ (targets - predicted) ** 2
    total = weight @ (targets - mean) ** 2
    # As r2_score: a constant target scores 1 if met exactly, else 0.
    scores: Array = np.where(
        total > 0, 1.0 - residual / np.where(total > 0, total, 1.0), (residual == 0) * 1.0
    )
    return scores


def deal_folds(rows: PublishedRows, weight: Array) -> NDArray[np.intp]:
    """Folds of weighted rows, checked.

    Raises:
        DataError: fewer than 10 rows on a side of the split, or fewer groups than folds.
    """
    sides = [weight[rows.train].sum(), weight[~rows.train].sum()]
    if min(sides) < MIN_SIDE:
        raise DataError(
            f"{int(sides[0])} rows up to the split date and {int(sides[1])} after it; protocol "
            f"{PROTOCOL} needs {MIN_SIDE} on either side",
            remedy="another split_date, or a panel of more rows",
        )
    return group_folds(rows.entity, weight)


def _evaluate(
    values: Array, rows: PublishedRows, targets: Array, weight: Array
) -> tuple[Array, Array]:
    """``(M,)`` R2 off and on of weighted rows.

    Raises:
        DataError: fewer than 10 rows on a side of the split, or fewer groups than folds.
    """
    fold = deal_folds(rows, weight)
    masks = [(fold == k) & side for k in range(NUM_FOLDS) for side in (rows.train, ~rows.train)]
    flat = list(
        spread(lambda mask: _cell(values, targets, weight, mask), masks, dimension=values.shape[1])
    )
    cells = [flat[2 * k : 2 * k + 2] for k in range(NUM_FOLDS)]
    trained = _total([cell[0] for cell in cells])
    everything = trained + _total([cell[1] for cell in cells])
    test = ~rows.train & (weight > 0)
    coefficients, intercept = trained.ridge()
    off = _r2(targets[test], values[test] @ coefficients + intercept, weight[test])

    def score(k: int) -> Array:
        coefficients, intercept = (everything - cells[k][0] - cells[k][1]).ridge()
        tested = fold == k
        predicted = values[tested] @ coefficients + intercept
        return _r2(targets[tested], predicted, weight[tested])

    on = np.zeros(targets.shape[1])
    for scores in spread(score, range(NUM_FOLDS), dimension=values.shape[1]):
        on += scores / NUM_FOLDS
    return off, on


def _cell(values: Array, targets: Array, weight: Array, mask: NDArray[np.bool_]) -> _Moments:
    return _moments(values[mask], targets[mask], weight[mask])


def _total(parts: list[_Moments]) -> _Moments:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def evaluate_published(
    embedding: NDArray[np.floating], rows: PublishedRows, *, num_draws: int = NUM_DRAWS
) -> PublishedScores:
    """Run the protocol on given embeddings.

    Raises:
        DataError: fewer than 10 rows on a side of the split, or fewer than 5 entities.
    """
    values = np.column_stack([np.asarray(embedding, dtype=np.float64), rows.features])
    # Ridge with an intercept does not see a shift; centring keeps the Gram matrices accurate.
    values -= values.mean(axis=0)
    off, on = _evaluate(values, rows, rows.targets, np.ones(len(values)))
    return PublishedScores(
        r2_off=off,
        r2_on=on,
        draws=_bootstrap(values, rows, num_draws),
        num_train=int(rows.train.sum()),
        num_test=int((~rows.train).sum()),
    )


def _bootstrap(values: Array, rows: PublishedRows, num_draws: int) -> Array:
    """``(num_draws, 2)`` R2 off and on of entities drawn with replacement; NaN where one failed."""
    entities, position = np.unique(rows.entity, return_inverse=True)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    times_BE = np.zeros((num_draws, len(entities)))
    for times_E in times_BE:
        picked = rng.choice(entities, size=len(entities), replace=True)
        times_E[:] = np.bincount(np.searchsorted(entities, picked), minlength=len(entities))
    draws = np.full((num_draws, 2), np.nan)
    folds: dict[int, NDArray[np.intp]] = {}
    for b, times_E in enumerate(times_BE):
        try:
            folds[b] = deal_folds(rows, times_E[position])
        except DataError:
            continue
    pending = list(folds)
    if values.shape[1] >= _TOGETHER_COLUMNS and len(values) >= _TOGETHER_ROWS * values.shape[1]:
        fold_BE = np.full((len(pending), len(entities)), -1, dtype=np.intp)
        for fold_E, b in zip(fold_BE, pending, strict=True):
            fold_E[position] = folds[b]
        solved = solve_draws(
            values, rows.targets[:, 0], position, train=rows.train,
            times_BE=times_BE[pending], fold_BE=fold_BE,
            num_folds=NUM_FOLDS, alpha=ALPHA,
        )  # fmt: skip
        draws[pending] = solved
        pending = [b for b, draw in zip(pending, solved, strict=True) if np.isnan(draw).any()]

    def refit(b: int) -> tuple[Array, Array]:
        return _evaluate(values, rows, rows.targets[:, :1], times_BE[b][position])

    fits = spread(refit, pending, dimension=values.shape[1])
    for b, (off, on) in zip(pending, fits, strict=True):
        draws[b] = off[0], on[0]
    return draws
