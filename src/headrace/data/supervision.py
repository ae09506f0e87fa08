"""Rows in which at least one token is to be predicted.

Owns the choice of rows by their labels. The invariant: a row that supervises nothing is in no plan,
so no micro-batch, however small, is without a target: a step that is would have no mean loss, and
a run would end at it. Tokens are read through a window of the labels; nothing is copied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.batch import IGNORE_INDEX

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace.data.packing import RowPlan

    Ints = npt.NDArray[np.int64]

_WINDOW = 1 << 22  # labels that are looked at together


def supervised_rows(plan: RowPlan, labels: npt.NDArray[np.int32]) -> RowPlan:
    """``plan`` without the rows that supervise nothing; their tokens count as dropped.

    Args:
        plan: rows of a store.
        labels: int32 ``(num_tokens,)`` of the whole store, aligned with its tokens.
    """
    # A position predicts the label after it; the last piece of a document ends without one.
    first = plan.starts + 1
    last = plan.starts + plan.lengths + plan.has_next
    useful = _any_label(labels, first, last)
    counts = np.diff(plan.row_offsets)
    row = np.repeat(np.arange(plan.num_rows), counts)
    kept = np.bincount(row, weights=useful, minlength=plan.num_rows) > 0
    if kept.all():
        return plan
    pieces = kept[row]
    lost = int(plan.lengths[~pieces].sum())
    return replace(
        plan,
        row_offsets=np.concatenate([[0], np.cumsum(counts[kept])]).astype(np.int64),
        starts=plan.starts[pieces],
        lengths=plan.lengths[pieces],
        has_next=plan.has_next[pieces],
        num_tokens=plan.num_tokens - lost,
        num_dropped_tokens=plan.num_dropped_tokens + lost,
    )


def _any_label(labels: npt.NDArray[np.int32], first: Ints, last: Ints) -> npt.NDArray[np.bool_]:
    """Whether ``labels[first:last]`` of each piece holds one that is not ignored."""
    count = np.zeros(len(first), np.int64)
    for begin in range(0, len(labels), _WINDOW):
        end = min(begin + _WINDOW, len(labels))
        touched = np.flatnonzero((first < end) & (last > begin))
        sums = np.concatenate([[0], np.cumsum(labels[begin:end] != IGNORE_INDEX)])
        count[touched] += (
            sums[np.minimum(last[touched], end) - begin]
            - sums[np.maximum(first[touched], begin) - begin]
        )
    return count > 0
