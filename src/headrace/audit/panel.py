"""The panel: one row for each forecast that is made, with the interval of its label.

Owns the in-memory form of a panel. The invariant: a :class:`Panel` that exists is usable, its
keys are unique, its targets finite and not constant, its label intervals run forward. Rows keep
the order of the input, because embeddings are matched to them by position. It reads no files
(:mod:`headrace.audit.panel_files`) and computes no statistic.

Shape legend: n rows, N entities, T sessions, P numeric features.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MIN_COVERAGE = 0.8  # of the entity x date rectangle, below which shifted dates are refused


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A checked panel; build it with :func:`make_panel` or ``read_panel``.

    Attributes:
        name: what reports call it.
        entities: ``(N,)`` names, sorted.
        sessions: ``(T,)`` datetime64[us], the unique dates, ascending. "Sessions" are counted
            by position in this array, never by rows and never by calendar days.
        entity, session: ``(n,)`` int32 positions in ``entities`` and ``sessions``.
        label_start, label_end: ``(n,)`` datetime64[us], the closed interval the label covers.
        y: ``(n,)`` float64 targets.
        features: ``(n, P)`` float64; ``feature_names`` beside it.
        embedded: ``(n,)`` bool, rows that have an embedding. The others still serve the
            shifted dates and the means of a date.
        prompts: text of each row, where the panel brings its own.
        dropped: rows left out by the loader, by reason.
        notes: what a reader of the report must know about the panel.
    """

    name: str
    entities: NDArray[np.str_]
    sessions: NDArray[np.datetime64]
    entity: NDArray[np.int32]
    session: NDArray[np.int32]
    label_start: NDArray[np.datetime64]
    label_end: NDArray[np.datetime64]
    y: NDArray[np.float64]
    features: NDArray[np.float64]
    feature_names: tuple[str, ...] = ()
    embedded: NDArray[np.bool_]
    prompts: tuple[str, ...] | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows with a target."""
        return len(self.y)

    @property
    def num_entities(self) -> int:
        """Distinct entities."""
        return len(self.entities)

    @property
    def num_sessions(self) -> int:
        """Distinct dates."""
        return len(self.sessions)

    @cached_property
    def embedded_rows(self) -> NDArray[np.intp]:
        """Positions of the rows that have an embedding, ascending."""
        return np.flatnonzero(self.embedded)

    @property
    def coverage(self) -> float:
        """Filled share of the entity x date rectangle."""
        return self.num_rows / (self.num_entities * self.num_sessions)

    @property
    def is_full_matrix(self) -> bool:
        """Whether enough of the rectangle is filled for whole cross-sections to be moved."""
        return self.coverage >= MIN_COVERAGE

    @cached_property
    def label_sessions(self) -> int:
        """Sessions from a row's date to the end of its label, the longest over rows (at least 1).

        Labels that end after the last session are left out, since sessions cannot be counted
        there, unless no other label exists.
        """
        last = np.searchsorted(self.sessions, self.label_end, side="right") - 1
        spans = last - self.session
        inside = self.label_end <= self.sessions[-1]
        return max(1, int(spans[inside].max() if inside.any() else spans.max()))

    def matrix(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """``(N, T)`` matrix of a value per row; NaN where the panel has no row."""
        full = np.full((self.num_entities, self.num_sessions), np.nan)
        full[self.entity, self.session] = values
        return full

    def session_of(self, date: np.datetime64) -> int:
        """Sessions on or before ``date``, which is the position of the first one after it."""
        return int(np.searchsorted(self.sessions, date, side="right"))

    def date_text(self, session: int) -> str:
        """A session as ISO text, without a time of day where that is midnight."""
        return iso(self.sessions[session])

    def sha256(self) -> str:
        """Hash of everything that shapes a result."""
        digest = hashlib.sha256()
        for text in ("\0".join(self.entities), "\0".join(self.feature_names)):
            digest.update(text.encode())
        for array in (
            self.sessions.astype(np.int64), self.entity, self.session,
            self.label_start.astype(np.int64), self.label_end.astype(np.int64),
            self.y, self.features, self.embedded,
        ):  # fmt: skip
            digest.update(np.ascontiguousarray(array).tobytes())
        if self.prompts is not None:
            digest.update("\0".join(self.prompts).encode())
        return digest.hexdigest()


def iso(moment: np.datetime64) -> str:
    """``2020-01-31``, or with its time of day where there is one."""
    text = str(moment.astype("datetime64[s]"))
    return text.removesuffix("T00:00:00")


def name_rows(mask: NDArray[np.bool_], describe: Sequence[str] | None = None) -> str:
    """``"rows 3, 17, 20 and 5 more"`` for an error; rows are counted from 0."""
    rows = np.flatnonzero(mask)
    texts = [f"{r} ({describe[r]})" if describe is not None else str(r) for r in rows[:5]]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(texts)}{more}"


def make_panel(
    *,
    entity: NDArray[Any],
    date: NDArray[np.datetime64],
    label_start: NDArray[np.datetime64],
    label_end: NDArray[np.datetime64],
    y: NDArray[np.float64],
    features: NDArray[np.float64] | None = None,
    feature_names: Sequence[str] = (),
    embedded: NDArray[np.bool_] | None = None,
    prompts: Sequence[str] | None = None,
    name: str = "panel",
    dropped: dict[str, int] | None = None,
    notes: Sequence[str] = (),
) -> Panel:
    """Check columns of equal length and build a :class:`Panel`; rows keep their order.

    Raises:
        DataError: naming rows (counted from 0), for duplicate keys, missing or infinite
            targets and features, constant targets, fewer than two entities, label intervals
            that end before they start, and columns of different lengths.
    """
    columns: dict[str, NDArray[Any]] = {
        "entity": np.asarray(entity).astype(np.str_),
        "date": np.asarray(date).astype("datetime64[us]"),
        "label_start": np.asarray(label_start).astype("datetime64[us]"),
        "label_end": np.asarray(label_end).astype("datetime64[us]"),
        "y": np.asarray(y, dtype=np.float64),
    }
    num_rows = len(columns["y"])
    if num_rows == 0:
        raise DataError(
            f"panel {name!r} has no rows", remedy="write a row for each forecast into it"
        )
    values = np.zeros((num_rows, 0)) if features is None else np.asarray(features, dtype=np.float64)
    mask = np.ones(num_rows, dtype=bool) if embedded is None else np.asarray(embedded, dtype=bool)
    lengths = {key: len(column) for key, column in columns.items()}
    lengths |= {"features": len(values), "embedded": len(mask)}
    lengths |= {} if prompts is None else {"prompts": len(prompts)}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"panel {name!r}: columns differ in length: {lengths}",
            remedy="give each column one value a row",
        )
    for key in ("date", "label_start", "label_end"):
        missing = np.isnat(columns[key])
        if missing.any():
            raise DataError(
                f"panel {name!r}: column {key!r} is empty in {name_rows(missing)}",
                remedy="drop these rows; a forecast without its dates cannot be placed in time",
            )
    _check_values(name, columns, values, tuple(feature_names))
    entities, entity_of = np.unique(columns["entity"], return_inverse=True)
    sessions, session_of = np.unique(columns["date"], return_inverse=True)
    _check_keys(name, columns, entity_of, session_of, len(sessions))
    if len(entities) < 2:
        raise DataError(
            f"panel {name!r} has one entity ({entities[0]}, rows 0 to {num_rows - 1}); at least 2 "
            "are needed, because common and entity-specific movements are told apart",
            remedy="audit several entities in one panel",
        )
    if not mask.any():
        raise DataError(
            f"panel {name!r}: column 'embedded' marks none of rows 0 to {num_rows - 1}",
            remedy="mark the rows that have a vector with true, or drop the column if all have one",
        )
    if np.ptp(columns["y"][mask]) == 0.0:
        raise DataError(
            f"panel {name!r}: the target is constant in the embedded rows ({name_rows(mask)})",
            remedy="mark rows with different targets as embedded, or check y",
        )
    past = columns["label_end"] < columns["date"]
    if past.any():
        early = (
            f"In {past.sum()} of {num_rows} rows the label ends before the row's date, so it is "
            f"no forecast ({name_rows(past)})."
        )
        notes = [*notes, early]
    return Panel(
        name=name,
        entities=entities,
        sessions=sessions,
        entity=entity_of.astype(np.int32),
        session=session_of.astype(np.int32),
        label_start=columns["label_start"],
        label_end=columns["label_end"],
        y=columns["y"],
        features=values,
        feature_names=tuple(feature_names),
        embedded=mask,
        prompts=None if prompts is None else tuple(prompts),
        dropped=dict(dropped or {}),
        notes=tuple(notes),
    )


def _check_values(
    name: str, columns: dict[str, NDArray[Any]], values: NDArray[np.float64], names: tuple[str, ...]
) -> None:
    y = columns["y"]
    if not np.isfinite(y).all():
        raise DataError(
            f"panel {name!r}: target is missing or infinite in {name_rows(~np.isfinite(y))}",
            remedy="drop rows without a target; they are neither trained on nor scored",
        )
    if len(names) != values.shape[1]:
        raise DataError(
            f"panel {name!r}: {values.shape[1]} features but {len(names)} names",
            remedy="name each feature once",
        )
    for column, feature in enumerate(names):
        bad = ~np.isfinite(values[:, column])
        if bad.any():
            raise DataError(
                f"panel {name!r}: feature {feature!r} is missing or infinite in {name_rows(bad)}",
                remedy="drop or fill these rows before the audit; it does not impute",
            )
    if np.ptp(y) == 0.0:
        raise DataError(
            f"panel {name!r}: the target is constant ({y[0]:g} in rows 0 to {len(y) - 1}); "
            "there is nothing to predict",
            remedy="check that y holds the label and not a filled-in value",
        )
    backward = columns["label_end"] < columns["label_start"]
    if backward.any():
        raise DataError(
            f"panel {name!r}: label_end lies before label_start in {name_rows(backward)}",
            remedy="write the first and the last instant that the label covers, in this order",
        )


def _check_keys(
    name: str,
    columns: dict[str, NDArray[Any]],
    entity_of: NDArray[np.intp],
    session_of: NDArray[np.intp],
    num_sessions: int,
) -> None:
    keys = entity_of.astype(np.int64) * num_sessions + session_of
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    if counts.max() == 1:
        return
    repeated = np.isin(keys, keys[first[counts > 1]])
    describe = [f"{e}, {iso(d)}" for e, d in zip(columns["entity"], columns["date"], strict=True)]
    raise DataError(
        f"panel {name!r}: duplicate keys (entity, date) in {name_rows(repeated, describe)}",
        remedy="keep one row for each entity and date",
    )
