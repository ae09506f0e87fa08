"""Which rows train, which are predicted, and which windows choose the penalty.

Owns the plan of every protocol as :class:`~headrace.audit.regress.Fold` objects. The invariant:
the rows of a window are training rows of every fold that names it, validation rows are never
trained on, and both are purged against each other. Plans are pure: they look at instants and
entities, never at targets.

Protocols that go forward in time choose penalties by forward chaining. ``purged_kfold`` trains
on both sides of its test block, and chooses by leaving out one more block: forward chaining
asks late windows only, and where a leak ends at a cutoff those answer that nothing can be
learned (measured: power 50% against 93%, docs/audit.md).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.regress import Fold
from headrace.audit.splits import (
    PROTOCOL_VERSION,
    Chronological,
    EntityKFold,
    PurgedKFold,
    WalkForward,
    date_blocks,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.audit.splits import LabelTimes

    Rows = NDArray[np.intp]
    Window = tuple[Rows, Rows]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A protocol, ready to be fitted."""

    protocol: str
    folds: tuple[Fold, ...]
    windows: tuple[Window, ...]


def _name(text: str) -> str:
    return f"{text}/{PROTOCOL_VERSION}"


def forward_windows(times: LabelTimes, rows: Rows, *, num_windows: int) -> list[Window]:
    """Expanding windows over the dates of ``rows``, which are cut in ``num_windows + 2`` parts.

    Window w trains on the parts up to w + 1 and validates on the next; fewer windows where
    there are fewer dates.
    """
    session = times.session[rows]
    dates = np.unique(session)
    num_windows = min(num_windows, len(dates) - 2)
    if num_windows < 1:
        return []
    part = date_blocks(len(dates), num_windows + 2)[np.searchsorted(dates, session)]
    windows = []
    for last in range(1, num_windows + 1):
        validation = rows[part == last + 1]
        begins = times.begin[validation].min()
        train = rows[(part <= last) & (times.end[rows] < begins)]
        if len(train) and len(validation):
            windows.append((train, validation))
    return windows


def purged_plan(times: LabelTimes, *, num_splits: int, embargo: int) -> Plan:
    """``purged_kfold``: every block of dates predicted from all others.

    Penalties are chosen by leaving out one more block: a head that saw neither block a nor b
    votes on b for fold a, and on a for fold b. One training set serves both votes.
    """
    splitter = PurgedKFold(times, num_splits, embargo)
    block = date_blocks(len(times.sessions), num_splits)
    windows: list[Window] = []
    voter_of: list[int] = []
    for first, second in itertools.combinations(range(num_splits), 2):
        train = np.flatnonzero(splitter.train_rows((block == first) | (block == second)))
        for tested, validated in ((first, second), (second, first)):
            validation = (block[times.session] == validated) & splitter.train_rows(block == tested)
            if len(train) and validation.any():
                windows.append((train, np.flatnonzero(validation)))
                voter_of.append(tested)
    folds = tuple(
        Fold(
            train=train,
            test=test,
            windows=tuple(w for w, tested in enumerate(voter_of) if tested == k),
        )
        for k, (train, test) in enumerate(splitter.split())
    )
    return Plan(
        protocol=_name(f"purged_kfold({num_splits}, embargo={embargo})"),
        folds=folds,
        windows=tuple(windows),
    )


def _chained(
    protocol: str, splits: list[tuple[Rows, Rows]], times: LabelTimes, *, num_windows: int
) -> Plan:
    folds: list[Fold] = []
    windows: list[Window] = []
    for train, test in splits:
        own = forward_windows(times, train, num_windows=num_windows)
        first = len(windows)
        windows += own
        folds.append(Fold(train=train, test=test, windows=tuple(range(first, first + len(own)))))
    return Plan(protocol=_name(protocol), folds=tuple(folds), windows=tuple(windows))


def chronological_plan(times: LabelTimes, *, split_date: np.datetime64, embargo: int) -> Plan:
    """``chronological``: the leakage-off arm."""
    splits = list(Chronological(times, split_date, embargo).split())
    day = str(split_date.astype("datetime64[D]"))
    return _chained(f"chronological({day}, embargo={embargo})", splits, times, num_windows=2)


def group_plan(times: LabelTimes, entity: NDArray[np.integer], *, num_splits: int) -> Plan:
    """``group_kfold``: the leakage-on arm, entities disjoint and dates mixed."""
    splits = list(EntityKFold(times, num_splits).split(groups=entity))
    return _chained(f"group_kfold({num_splits})", splits, times, num_windows=1)


def walk_forward_plan(times: LabelTimes, *, num_splits: int, embargo: int) -> Plan:
    """``walk_forward``: expanding windows."""
    splits = list(WalkForward(times, num_splits, embargo=embargo).split())
    protocol = f"walk_forward({num_splits}, embargo={embargo})"
    return _chained(protocol, splits, times, num_windows=2)


@dataclass(frozen=True, kw_only=True)
class SeenUnseenPlan:
    """Heads that leave out one block of dates each, and what each of them predicts.

    Head (entity fold, left-out block) predicts its entity fold's rows of *every* block: of the
    block it left out, unseen; of the others, seen. All heads train on about the same number of
    rows. ``seen`` and ``unseen`` of a row are therefore predictions of the same quality in all
    but one respect: whether other entities' rows of the same dates were trained on.
    """

    plan: Plan
    block: NDArray[np.intp]
    left_out: tuple[int, ...]


def seen_unseen_plan(
    times: LabelTimes, entity: NDArray[np.integer], *, entity_folds: int, num_blocks: int
) -> SeenUnseenPlan:
    """``seen_unseen``: entity fold x date block."""
    purged = PurgedKFold(times, num_blocks)
    session_block = date_blocks(len(times.sessions), num_blocks)
    span = num_blocks // 2
    learn = span - 1
    folds: list[Fold] = []
    windows: list[Window] = []
    left_out: list[int] = []
    for others, tested in EntityKFold(times, entity_folds).split(groups=entity):
        own = np.zeros(len(times), dtype=bool)
        own[others] = True
        runs: list[range] = []
        first_window = len(windows)
        for first in range(num_blocks - span + 1):
            inside = (session_block >= first) & (session_block < first + span)
            validates = (session_block >= first + learn) & (session_block < first + span)
            usable = own & purged.train_rows(~inside)
            train = usable & purged.train_rows(validates)
            validation = usable & validates[times.session]
            if train.any() and validation.any():
                windows.append((np.flatnonzero(train), np.flatnonzero(validation)))
                runs.append(range(first, first + span))
        for block in range(num_blocks):
            train = own & purged.train_rows(session_block == block)
            chosen = tuple(first_window + w for w, blocks in enumerate(runs) if block not in blocks)
            folds.append(Fold(train=np.flatnonzero(train), test=tested, windows=chosen))
            left_out.append(block)
    plan = Plan(
        protocol=_name(f"seen_unseen({entity_folds} x {num_blocks})"),
        folds=tuple(folds),
        windows=tuple(windows),
    )
    return SeenUnseenPlan(plan=plan, block=session_block[times.session], left_out=tuple(left_out))
