"""Which rows train, which are predicted, and which windows choose the penalty.

Owns the plan of every protocol as :class:`~headrace.audit.regress.Fold` objects. The invariant:
the rows of a window are training rows of every fold that names it, validation rows are never
trained on, and both are purged against each other. Plans are pure: they look at instants and
entities, never at targets.

Protocols that go forward in time choose penalties by forward chaining. ``purged_kfold`` trains
on both sides of its test block, and chooses by leaving out one more block: forward chaining
asks late windows only, and where a leak ends at a cutoff those answer that nothing can be
learned (42 of 60 leaks found against 53, benchmarks/audit_design.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.regress import Fold, plan_parts
from headrace.audit.splits import (
    PROTOCOL_VERSION,
    Chronological,
    EntityKFold,
    PurgedKFold,
    WalkForward,
    date_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.audit.gram import Parts
    from headrace.audit.splits import LabelTimes

    Rows = NDArray[np.intp]
    Window = tuple[Rows, Rows]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A protocol, ready to be fitted on ``num_rows`` rows."""

    protocol: str
    folds: tuple[Fold, ...]
    windows: tuple[Window, ...]
    num_rows: int

    @cached_property
    def parts(self) -> Parts:
        """What its training and validation sets are made of; cut once for all embeddings."""
        return plan_parts(self.num_rows, self.folds, self.windows)


def _name(text: str) -> str:
    return f"{text}/{PROTOCOL_VERSION}"


def _parts(session: NDArray[np.intp], num_parts: int) -> NDArray[np.intp]:
    """``(n,)`` part of each row when its dates are cut into equal runs."""
    dates = np.unique(session)
    return date_blocks(len(dates), num_parts)[np.searchsorted(dates, session)]


def _holds(train: Rows, rows: Rows) -> bool:
    return bool(np.isin(rows, train).all())


def forward_windows(times: LabelTimes, rows: Rows, *, num_windows: int) -> list[Window]:
    """Expanding windows over the dates of ``rows``, which are cut in ``num_windows + 2`` parts.

    Window w trains on the parts up to w + 1 and validates on the next; fewer windows where
    there are fewer dates.
    """
    session = times.session[rows]
    num_windows = min(num_windows, len(np.unique(session)) - 2)
    if num_windows < 1:
        return []
    part = _parts(session, num_windows + 2)
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
    alone = [splitter.train_rows(block == k) for k in range(num_splits)]
    windows: list[Window] = []
    voter_of: list[int] = []
    for first, second in itertools.combinations(range(num_splits), 2):
        both = alone[first] & alone[second]
        if second == first + 1:
            # Blocks that touch are one block, which its own embargo follows.
            both = splitter.train_rows((block == first) | (block == second))
        train = np.flatnonzero(both)
        for tested, validated in ((first, second), (second, first)):
            validation = (block[times.session] == validated) & alone[tested]
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
        num_rows=len(times),
    )


@dataclass(frozen=True, kw_only=True)
class ChronologicalPlan:
    """The leakage-off arm with and without embargo; fold k has the k-th embargo."""

    plan: Plan
    embargoes: tuple[int, ...]
    protocols: tuple[str, ...]


def chronological_plan(
    times: LabelTimes, *, split_date: np.datetime64, embargoes: Sequence[int] = (0,)
) -> ChronologicalPlan:
    """``chronological``: one fold an embargo; embargoed folds choose on the windows they hold."""
    windows: list[Window] = []
    folds: list[Fold] = []
    for embargo in embargoes:
        train, test = next(Chronological(times, split_date, embargo).split())
        if not windows:
            windows = forward_windows(times, train, num_windows=2)
        own = set(train.tolist())
        held = tuple(
            w for w, (a, b) in enumerate(windows) if own.issuperset(a) and own.issuperset(b)
        )
        folds.append(Fold(train=train, test=test, windows=held))
    day = str(split_date.astype("datetime64[D]"))
    protocols = tuple(_name(f"chronological({day}, embargo={embargo})") for embargo in embargoes)
    plan = Plan(
        protocol=protocols[0], folds=tuple(folds), windows=tuple(windows), num_rows=len(times)
    )
    return ChronologicalPlan(plan=plan, embargoes=tuple(embargoes), protocols=protocols)


def group_plan(times: LabelTimes, entity: NDArray[np.integer], *, num_splits: int) -> Plan:
    """``group_kfold``: the leakage-on arm, entities disjoint and dates mixed."""
    folds: list[Fold] = []
    windows: list[Window] = []
    for train, test in EntityKFold(times, num_splits).split(groups=entity):
        own = forward_windows(times, train, num_windows=1)
        held = tuple(range(len(windows), len(windows) + len(own)))
        windows += own
        folds.append(Fold(train=train, test=test, windows=held))
    return Plan(
        protocol=_name(f"group_kfold({num_splits})"),
        folds=tuple(folds),
        windows=tuple(windows),
        num_rows=len(times),
    )


def walk_forward_plan(times: LabelTimes, *, num_splits: int, embargo: int) -> Plan:
    """``walk_forward``: expanding windows, each the inner window of all later ones.

    What an earlier test window would have had predicted best chooses for the later ones; the
    first, before which nothing was tested, chooses on the halves of its own training dates.
    """
    splits = list(WalkForward(times, num_splits, embargo=embargo).split())
    windows = forward_windows(times, splits[0][0], num_windows=1)
    num_first = len(windows)
    folds: list[Fold] = []
    for k, (train, test) in enumerate(splits):
        usable = [w for w in range(num_first, len(windows)) if _holds(train, windows[w][1])]
        folds.append(Fold(train=train, test=test, windows=tuple(usable or range(num_first))))
        if k + 1 < len(splits):
            kept = np.intersect1d(test, splits[k + 1][0])
            windows.append((train, kept))
    return Plan(
        protocol=_name(f"walk_forward({num_splits}, embargo={embargo})"),
        folds=tuple(folds),
        windows=tuple(windows),
        num_rows=len(times),
    )


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
    deals = EntityKFold(times, entity_folds).split(groups=entity)
    for others, tested in deals:
        own = np.zeros(len(times), dtype=bool)
        own[others] = True
        runs: list[range] = []
        first_window = len(windows)
        # One run of blocks on either side: every block is outside at least one of them.
        for first in (0, num_blocks - span):
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
        num_rows=len(times),
    )
    return SeenUnseenPlan(plan=plan, block=session_block[times.session], left_out=tuple(left_out))
