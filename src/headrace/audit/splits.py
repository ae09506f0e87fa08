"""Splits of a panel into training and test rows, by unique dates and label intervals.

Owns who may train on what. The invariant: in every split but the leakage-prone
:class:`EntityKFold`, no training row's interval, from its date (or the start of its label, if
earlier) to the end of its label, closed on both sides, meets the interval of any test row's
block. It fits nothing.

All splitters follow scikit-learn (``split(X, y, groups)`` yields index arrays,
``get_n_splits()``), take the rows' instants when they are built, and raise ``DataError`` on an
empty training or test set. Blocks are made of *unique dates*: sizes differ by at most one date,
every date is tested in exactly one fold. Gaps are counted in sessions (positions among the
unique dates) or as a ``numpy.timedelta64`` of calendar time, never in rows.

How a purge with an embargo of one session looks, daily labels that end a session later, test
block ``T``, ``p`` purged, ``e`` embargoed, ``+`` training::

    session   0 1 2 3 4 5 6 7 8 9
    row       + + p T T T p e + +
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.audit.panel import iso
from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.audit.panel import Panel

    Split = tuple[NDArray[np.intp], NDArray[np.intp]]

PROTOCOL_VERSION = 1  # of every splitter here; part of a figure's ``protocol``


class LabelTimes:
    """The instants of the rows a splitter splits.

    Attributes:
        sessions: ``(T,)`` unique dates, ascending.
        session: ``(n,)`` position of each row's date.
        begin, end: ``(n,)`` closed interval of each row, from its date, or the start of its
            label if that is earlier, to the end of its label.
    """

    def __init__(
        self,
        date: NDArray[np.datetime64],
        label_start: NDArray[np.datetime64],
        label_end: NDArray[np.datetime64],
    ) -> None:
        """Take one instant of each kind for every row.

        Raises:
            DataError: different lengths, no rows, or a label that ends before it starts.
        """
        if not len(date) == len(label_start) == len(label_end):
            raise DataError(
                f"{len(date)} dates, {len(label_start)} label starts, {len(label_end)} label ends",
                remedy="give one of each a row",
            )
        if len(date) == 0:
            raise DataError("no rows to split", remedy="a panel with rows")
        if (label_end < label_start).any():
            row = int(np.argmax(label_end < label_start))
            raise DataError(
                f"row {row}: its label ends before it starts",
                remedy="correct label_start and label_end",
            )
        self.sessions, position = np.unique(date, return_inverse=True)
        self.session: NDArray[np.intp] = position
        self.begin = np.minimum(date, label_start)
        self.end = np.maximum(date, label_end)

    @classmethod
    def of_panel(cls, panel: Panel, rows: NDArray[np.intp] | None = None) -> LabelTimes:
        """Instants of a panel's rows (all of them by default)."""
        chosen = np.arange(panel.num_rows) if rows is None else rows
        return cls(
            panel.sessions[panel.session[chosen]],
            panel.label_start[chosen],
            panel.label_end[chosen],
        )

    @cached_property
    def reach(self) -> tuple[NDArray[np.datetime64], NDArray[np.datetime64]]:
        """``(T,)`` earliest begin and latest end of each date's rows."""
        return extremes(self.session, self.begin, self.end, len(self.sessions))

    def span(self, first: int, last: int) -> tuple[np.datetime64, np.datetime64]:
        """Earliest begin and latest end of the rows dated ``first`` to ``last``."""
        begin, end = self.reach
        return begin[first : last + 1].min(), end[first : last + 1].max()

    def __len__(self) -> int:
        """Rows."""
        return len(self.session)

    def __repr__(self) -> str:
        """Short enough for the printout of an estimator that holds a splitter."""
        return f"<{len(self)} rows on {len(self.sessions)} dates>"


def extremes(
    session: NDArray[np.integer],
    begin: NDArray[np.datetime64],
    end: NDArray[np.datetime64],
    num_sessions: int,
) -> tuple[NDArray[np.datetime64], NDArray[np.datetime64]]:
    """Earliest ``begin`` and latest ``end`` by session; each of them must have a row."""
    # As integers: the grouped minimum of datetimes takes the slow path, hundreds of times slower.
    first = np.full(num_sessions, np.iinfo(np.int64).max)
    last = np.full(num_sessions, np.iinfo(np.int64).min)
    np.minimum.at(first, session, begin.astype(np.int64))
    np.maximum.at(last, session, end.astype(np.int64))
    return first.astype(begin.dtype), last.astype(end.dtype)


Gap = int | np.timedelta64


@dataclass(frozen=True)
class _Splitter:
    """What all splitters share; ``times`` are the rows' instants."""

    times: LabelTimes

    def _check(self, X: Any) -> None:
        if X is None:
            return
        # As scikit-learn counts rows: a sparse matrix has a shape and no length.
        given = X.shape[0] if getattr(X, "shape", ()) else len(X)
        if given != len(self.times):
            raise DataError(
                f"the splitter was built for {len(self.times)} rows, X has {given}",
                remedy="build it from the instants of the very rows of X, in their order",
            )

    def _allowed(self, tested: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Rows whose interval meets no run of tested sessions; ``tested`` is a mask ``(T,)``."""
        times = self.times
        allowed = ~tested[times.session]
        for first, last in runs(tested):
            begin, end = times.span(first, last)
            allowed &= (times.end < begin) | (times.begin > end)
        return allowed

    def _embargo_after(self, tested: NDArray[np.bool_], embargo: Gap) -> NDArray[np.bool_]:
        """Rows outside the embargo that runs from each block's latest label end."""
        times = self.times
        allowed = np.ones(len(times), dtype=bool)
        for first, last in runs(tested):
            _, block_end = times.span(first, last)
            if isinstance(embargo, np.timedelta64):
                until = block_end + embargo
            else:
                # The last session the labels reach, and `embargo` more, clamped at the end.
                reached = int(np.searchsorted(times.sessions, block_end, side="right")) - 1
                until = times.sessions[min(reached + embargo, len(times.sessions) - 1)]
            after = int(np.searchsorted(times.sessions, until, side="right"))
            allowed &= (times.session < first) | (times.session >= after)
        return allowed

    def _embargo_before(self, first: int, embargo: Gap) -> NDArray[np.bool_]:
        """Rows dated before the embargo that ends at session ``first``."""
        times = self.times
        if isinstance(embargo, np.timedelta64):
            before: NDArray[np.bool_] = times.sessions < times.sessions[first] - embargo
        else:
            before = np.arange(len(times.sessions)) < first - embargo
        return before[times.session]

    def _split(self, train: NDArray[np.bool_], test: NDArray[np.bool_], what: str) -> Split:
        for mask, side in ((train, "training"), (test, "test")):
            if not mask.any():
                raise DataError(
                    f"{what}: the {side} set is empty, none of rows 0 to {len(self.times) - 1} is "
                    "left",
                    remedy="use fewer folds, a shorter embargo, or a panel of more dates",
                )
        return np.flatnonzero(train), np.flatnonzero(test)


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and last position of every run of ``True``: each is a block of its own."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def date_blocks(num_sessions: int, num_blocks: int) -> NDArray[np.intp]:
    """``(T,)`` block of each session: contiguous, sizes differing by at most one.

    Raises:
        DataError: fewer sessions than blocks.
    """
    if num_blocks < 2:
        raise ConfigError(f"{num_blocks} blocks: at least 2 are needed", remedy="2 or more")
    if num_sessions < num_blocks:
        raise DataError(
            f"{num_sessions} dates cannot be cut into {num_blocks} blocks",
            remedy="fewer blocks, or a panel of more dates",
        )
    sizes = np.full(num_blocks, num_sessions // num_blocks)
    sizes[: num_sessions % num_blocks] += 1
    return np.repeat(np.arange(num_blocks), sizes)


@dataclass(frozen=True)
class Chronological(_Splitter):
    """Train on dates up to ``split_date``, test on those after; labels that reach over are purged.

    ``embargo`` leaves out the last training sessions (or days) before the first test date.
    """

    split_date: np.datetime64
    embargo: Gap = 0

    def split(self, X: Any = None, y: Any = None, groups: Any = None) -> Iterator[Split]:
        """Yield the one split."""
        del y, groups
        self._check(X)
        tested = self.times.sessions > self.split_date
        what = f"chronological split at {iso(self.split_date)}"
        if not tested.any():
            raise DataError(
                f"{what}: no date lies after it (rows 0 to {len(self.times) - 1} end on "
                f"{iso(self.times.sessions[-1])}), so the test period is empty",
                remedy="choose an earlier split date",
            )
        first = int(np.argmax(tested))
        train = self._allowed(tested) & self._embargo_before(first, self.embargo)
        yield self._split(train, tested[self.times.session], what)

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """One."""
        del X, y, groups
        return 1


@dataclass(frozen=True)
class WalkForward(_Splitter):
    """``num_splits`` consecutive test windows, each predicted from the dates before it.

    Expanding by default; with ``window`` sessions, training rolls. ``embargo`` as in
    :class:`Chronological`.
    """

    num_splits: int = 5
    window: int | None = None
    embargo: Gap = 0

    def split(self, X: Any = None, y: Any = None, groups: Any = None) -> Iterator[Split]:
        """Yield splits in the order of time."""
        del y, groups
        self._check(X)
        times = self.times
        block = date_blocks(len(times.sessions), self.num_splits + 1)
        for k in range(1, self.num_splits + 1):
            tested = block == k
            first = int(np.argmax(tested))
            train = self._allowed(tested) & self._embargo_before(first, self.embargo)
            if self.window is not None:
                train &= times.session >= first - self.window
            yield self._split(train, tested[times.session], f"walk-forward window {k}")

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """``num_splits``."""
        del X, y, groups
        return self.num_splits


@dataclass(frozen=True)
class CombinatorialPurged(_Splitter):
    """Every choice of ``num_test_blocks`` of ``num_blocks`` blocks of dates as the test set.

    Test blocks that touch are one block; blocks apart are purged and embargoed one by one.
    """

    num_blocks: int = 6
    num_test_blocks: int = 2
    embargo: Gap = 0

    def split(self, X: Any = None, y: Any = None, groups: Any = None) -> Iterator[Split]:
        """Yield splits, test blocks in lexicographic order."""
        del y, groups
        self._check(X)
        block = date_blocks(len(self.times.sessions), self.num_blocks)
        if not 0 < self.num_test_blocks < self.num_blocks:
            raise ConfigError(
                f"{self.num_test_blocks} test blocks of {self.num_blocks}: give at least 1 and "
                "fewer than there are",
                remedy="2 of 10 is usual",
            )
        for chosen in itertools.combinations(range(self.num_blocks), self.num_test_blocks):
            tested = np.isin(block, chosen)
            train = self.train_rows(tested)
            what = f"purged fold that tests block {', '.join(map(str, chosen))}"
            yield self._split(train, tested[self.times.session], what)

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """Number of combinations."""
        del X, y, groups
        return math.comb(self.num_blocks, self.num_test_blocks)

    def train_rows(self, tested: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mask of the rows that may train when the sessions of ``tested`` (``(T,)``) are tested."""
        return self._allowed(tested) & self._embargo_after(tested, self.embargo)


class PurgedKFold(CombinatorialPurged):
    """Each of ``num_splits`` blocks of dates tested once, trained on all others, purged."""

    def __init__(self, times: LabelTimes, num_splits: int = 10, embargo: Gap = 0) -> None:
        """Split ``times`` in ``num_splits`` blocks, with ``embargo`` after each test block."""
        super().__init__(times, num_blocks=num_splits, num_test_blocks=1, embargo=embargo)

    def __repr__(self) -> str:
        """As it was called."""
        return f"PurgedKFold({self.times!r}, num_splits={self.num_blocks}, embargo={self.embargo})"


@dataclass(frozen=True)
class EntityKFold(_Splitter):
    """Entities disjoint, dates mixed: training sees the shocks of the test dates, on purpose.

    The same folds as scikit-learn's ``GroupKFold``: entities by descending number of rows, each
    to the lightest fold. ``groups`` of :meth:`split` are the rows' entities.
    """

    num_splits: int = 5

    def split(self, X: Any = None, y: Any = None, groups: Any = None) -> Iterator[Split]:
        """Yield one split a fold."""
        from sklearn.model_selection import GroupKFold  # noqa: PLC0415  # a second to import

        del y
        self._check(X)
        if groups is None:
            raise ConfigError(
                "EntityKFold needs the rows' entities as groups",
                remedy="split(X, y, groups=entities)",
            )
        num_entities = len(np.unique(groups))
        if num_entities < self.num_splits:
            raise DataError(
                f"{num_entities} entities (rows 0 to {len(self.times) - 1}) cannot be split into "
                f"{self.num_splits} folds of disjoint entities",
                remedy="use at most as many folds as entities (entity_folds, --entity-folds)",
            )
        rows = np.zeros(len(self.times))
        yield from GroupKFold(self.num_splits).split(rows, groups=groups)

    def get_metadata_routing(self) -> Any:
        """That ``groups`` are asked for, where scikit-learn's metadata routing is enabled."""
        from sklearn.model_selection import GroupKFold  # noqa: PLC0415  # as above

        return GroupKFold(self.num_splits).get_metadata_routing()

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """``num_splits``."""
        del X, y, groups
        return self.num_splits
