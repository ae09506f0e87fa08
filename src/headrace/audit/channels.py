"""What a panel's targets and embeddings are, channel by channel.

Owns the two channels and the level. *Common*: the mean of a date, what all entities do
together. *Entity*: what is left of a row when its date's mean is gone. *Level*: the target as
it is, features beside it. The invariant: a column of a target is the same matrix of values
moved as a whole against the dates, so all columns answer the same question with the same
embedding, folds and label geometry, and differ only in which date met which.

Targets of the two channels are first residualised on the numeric features over the full matrix
(Freedman and Lane 1983), each channel on the features of its own kind: what the features can
say linearly is no news from the embedding.

Shape legend: n rows, N entities, T sessions, P features, K = 1 + P, M columns (offsets).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from headrace.audit.gram import GramBook, largest, near_one
from headrace.audit.splits import LabelTimes, extremes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.audit.panel import Panel
    from headrace.audit.records import Channel

    Array = NDArray[np.float64]
    Rows = NDArray[np.intp]

_ROUNDING = 1e-12  # of a column's size, below which a difference is none
_COLLINEAR = 1e-9  # singular value of unit columns, below which a direction is none
# P features taken out of n rows of D dimensions move the correlation of noise up by about
# P sqrt(min(n, D)) / n of its standard errors; beyond this, vectors keep what the features say.
_CROWDED = 0.2
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class ShiftedTargets:
    """A matrix of values met by each row at its own date, and at dates moved by each offset.

    Attributes:
        values_KUT: targets and features of every unit (entity, or the one "all") and session.
        unit, session: ``(n,)`` the cell of each row.
        offsets: ``(M,)`` sessions; column m of row (u, t) is the value at (u, (t + offset) mod T).
    """

    values_KUT: Array
    unit: NDArray[np.integer]
    session: NDArray[np.integer]
    offsets: NDArray[np.int64]

    @property
    def num_columns(self) -> int:
        """M."""
        return len(self.offsets)

    @property
    def num_features(self) -> int:
        """P."""
        return len(self.values_KUT) - 1

    def block(self, rows: Rows, columns: slice) -> Array:
        """``(K, n, M)`` values, NaN where the panel has none."""
        num_sessions = self.values_KUT.shape[2]
        moved = (self.session[rows, None] + self.offsets[None, columns]) % num_sessions
        return self.values_KUT[:, self.unit[rows, None], moved]


@dataclass(frozen=True, kw_only=True)
class View:
    """The rows of one channel (or of the level) and their targets.

    Attributes:
        kind: ``"common"``, ``"entity"`` or ``"level"``.
        times: instants of the view's rows; of the common channel a row is a date.
        session: ``(n,)`` panel session of each row.
        unit: ``(n,)`` entity of each row (0 for the common channel).
        weight: ``(n,)`` embedded panel rows behind each row.
        targets: the observed column first (offset 0).
        target: ``(n,)`` the observed target.
    """

    kind: str
    times: LabelTimes
    session: NDArray[np.int64]
    unit: NDArray[np.int64]
    weight: Array
    targets: ShiftedTargets

    def unshifted(self) -> View:
        """The same rows with the observed target alone."""
        targets = replace(self.targets, offsets=self.targets.offsets[:1])
        return replace(self, targets=targets)

    @property
    def target(self) -> Array:
        """``(n,)``."""
        everything: Rows = np.arange(len(self.session))
        observed: Array = self.targets.block(everything, slice(0, 1))[0, :, 0]
        return observed


def _in_units(moved_nD: Array, original_nD: NDArray[np.floating]) -> Array:
    """Columns from which a mean was taken, in units near 1, so that no column hides another.

    A column that had no more than the mean holds rounding alone, which is 0 here. Powers of two
    round nothing. In place, for an embedding is the largest array there is.
    """
    if len(moved_nD) == 0 or moved_nD.shape[1] == 0:
        return moved_nD
    left_D = largest(moved_nD)
    moved_nD *= near_one(left_D)
    moved_nD[:, left_D <= _ROUNDING * largest(original_nD)] = 0.0
    return moved_nD


def _residual(y: Array, features_nP: Array) -> Array:
    if features_nP.shape[1] == 0:
        return y
    coefficients, *_ = np.linalg.lstsq(features_nP, y, rcond=None)
    residual: Array = y - features_nP @ coefficients
    return residual


def _date_means(panel: Panel, values: Array) -> Array:
    """``(T, ...)`` mean over all rows of each session; every session has at least one row."""
    counts = np.bincount(panel.session, minlength=panel.num_sessions)
    flat = values.reshape(len(values), -1)
    sums = np.empty((panel.num_sessions, flat.shape[1]))
    for k, column in enumerate(flat.T):
        sums[:, k] = np.bincount(panel.session, column, panel.num_sessions)
    return (sums / counts[:, None]).reshape(panel.num_sessions, *values.shape[1:])


def common_view(panel: Panel, offsets: NDArray[np.int64]) -> View:
    """Dates that have an embedded row; the target is the mean over *all* rows of the date."""
    means = _date_means(panel, panel.y)
    features = _date_means(panel, panel.features)
    features = _in_units(features - features.mean(axis=0), panel.features)
    residual = _residual(means - means.mean(), features)
    rows = panel.embedded_rows
    sessions, weight = np.unique(panel.session[rows], return_counts=True)
    first, last = extremes(panel.session, panel.label_start, panel.label_end, panel.num_sessions)
    times = LabelTimes(panel.sessions[sessions], first[sessions], last[sessions])
    unit = np.zeros(len(sessions), dtype=np.int64)
    return View(
        kind="common",
        times=times,
        session=sessions.astype(np.int64),
        unit=unit,
        weight=weight.astype(np.float64),
        targets=ShiftedTargets(
            values_KUT=residual[None, None], unit=unit, session=sessions, offsets=offsets
        ),
    )


def entity_rows(panel: Panel) -> Rows:
    """Embedded rows of dates with at least two: one row says nothing about differences."""
    rows = panel.embedded_rows
    counts = np.bincount(panel.session[rows], minlength=panel.num_sessions)
    return rows[counts[panel.session[rows]] >= 2]


def entity_view(panel: Panel, offsets: NDArray[np.int64]) -> View:
    """Rows without their date's mean."""
    y = panel.y - _date_means(panel, panel.y)[panel.session]
    features = panel.features - _date_means(panel, panel.features)[panel.session]
    residual = _residual(y, _in_units(features, panel.features))
    return _row_view("entity", panel, entity_rows(panel), panel.matrix(residual)[None], offsets)


def level_view(panel: Panel, offsets: NDArray[np.int64]) -> View:
    """All embedded rows, the target as it is and the features that move with it."""
    y = panel.y - panel.y.mean()
    features = _in_units(panel.features - panel.features.mean(axis=0), panel.features)
    matrices = np.stack([panel.matrix(column) for column in (y, *features.T)])
    return _row_view("level", panel, panel.embedded_rows, matrices, offsets)


def _row_view(
    kind: str, panel: Panel, rows: Rows, values_KUT: Array, offsets: NDArray[np.int64]
) -> View:
    unit = panel.entity[rows].astype(np.int64)
    session = panel.session[rows].astype(np.int64)
    return View(
        kind=kind,
        times=LabelTimes.of_panel(panel, rows),
        session=session,
        unit=unit,
        weight=np.ones(len(rows)),
        targets=ShiftedTargets(values_KUT=values_KUT, unit=unit, session=session, offsets=offsets),
    )


def _averages(groups: NDArray[np.integer], num_groups: int) -> sparse.csr_matrix:
    counts = np.bincount(groups, minlength=num_groups)
    weights = 1.0 / np.maximum(counts, 1)[groups]
    shape = (num_groups, len(groups))
    return sparse.csr_matrix((weights, (groups, np.arange(len(groups)))), shape=shape)


def _without(values_nD: Array, features_nP: Array) -> Array:
    """``values_nD`` less what is linear in the features; in place, both centred.

    As they are where the features are too many for the rows: taking them out of target and vectors
    alike mixes rows alike, a test row's with those that trained for it, which looks like skill.
    """
    lengths_P = np.linalg.norm(features_nP, axis=0)
    basis_nP, strengths_P, _ = np.linalg.svd(
        features_nP / np.where(lengths_P > 0, lengths_P, 1.0), full_matrices=False
    )
    basis_nP = basis_nP[:, strengths_P > _COLLINEAR]
    width = min(values_nD.shape)
    if basis_nP.shape[1] * np.sqrt(width) > _CROWDED * len(values_nD):
        return values_nD
    size_D = largest(values_nD)
    coefficients_PD = basis_nP.T @ values_nD
    # A few rows at a time: a second array of this size would be the audit's peak.
    for start in range(0, len(values_nD), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        values_nD[rows] -= basis_nP[rows] @ coefficients_PD
    values_nD[:, largest(values_nD) <= _ROUNDING * size_D] = 0.0
    return values_nD


def _moved(panel: Panel, values_nD: NDArray[np.floating], channel: Channel | str) -> Array:
    """What :func:`channel_book` describes, of values of the embedded rows; columns centred."""
    rows = panel.embedded_rows
    session = panel.session[rows]
    if channel == "common":
        own = _averages(panel.entity[rows], panel.num_entities) @ values_nD
        sessions = np.unique(session)
        by_date = _averages(np.searchsorted(sessions, session), len(sessions))
        by_entity = by_date @ sparse.csr_matrix(
            (np.ones(len(rows)), (np.arange(len(rows)), panel.entity[rows])),
            shape=(len(rows), panel.num_entities),
        )
        moved: Array = by_date @ values_nD
        moved -= by_entity @ own
    else:
        means = _averages(session, panel.num_sessions) @ values_nD
        kept = np.isin(rows, entity_rows(panel))
        moved = values_nD[kept] - means[session[kept]]
    moved -= moved.mean(axis=0)
    return moved


def channel_book(panel: Panel, values_nD: NDArray[np.floating], channel: Channel | str) -> GramBook:
    """The embedding as one channel (or the level) sees it.

    What is linear in the numeric features of the same rows is taken out of a channel's embedding,
    as it was of its target: of an embedding that holds tomorrow's price beside a feature that holds
    today's, the news is their difference, which is a small part of either. Where features are many
    for the rows (:data:`_CROWDED`), it stays, which costs power and claims nothing.

    Args:
        panel: the panel.
        values_nD: ``(n, D)``, a row for each embedded panel row, in their order.
        channel: ``"common"``: means of a date, each entity's own mean taken out first, so that
            which entities were sampled on a date does not show. ``"entity"``: rows without
            their date's mean. ``"level"``: rows as they are.
    """
    if channel == "level":
        return GramBook(values_nD)
    moved = _in_units(_moved(panel, values_nD, channel), values_nD)
    if panel.features.shape[1]:
        features = panel.features[panel.embedded_rows]
        moved = _without(moved, _in_units(_moved(panel, features, channel), features))
    return GramBook(moved)
