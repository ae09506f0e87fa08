"""Rows of some documents of a store: held-out shares, and months.

Owns the choice of documents. The invariant: a document is either trained on or held out, the
choice depends on the seed and the number of documents alone, and every document with a date is in
exactly one month. Tokens are neither copied nor read.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.data.packing import RowPlan, RowSettings, plan_rows
from headrace.data.rows import month_name
from headrace.data.sampler import permutation
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from headrace.data.tokens import TokenStore

    Ints = npt.NDArray[np.int64]


def hold_out(stores: Sequence[TokenStore], size: float, seed: int) -> list[tuple[Ints, Ints]]:
    """For each store, the documents to train on and those held out, both in order.

    Args:
        stores: of the training datasets.
        size: a share of the documents below 1, else a number of documents over all stores.
        seed: of the choice.

    Raises:
        ConfigError: nothing is left to train on.
    """
    total = sum(store.num_documents for store in stores)
    if size >= max(total, 1):
        raise ConfigError(
            f"val_set_size is {size:g}, of {total} documents in all, and none is left to train on",
            remedy="lower it, or give eval_datasets",
        )
    share = size if size < 1 else size / total
    found = []
    for number, store in enumerate(stores):
        count = int(np.ceil(share * store.num_documents))
        if count >= store.num_documents:
            raise ConfigError(
                f"val_set_size: {size:g} holds out {count} of {store.num_documents} documents of "
                "a dataset, and none is left to train on",
                remedy="lower it, or give eval_datasets",
            )
        order = permutation(store.num_documents, seed, "held out", number)
        found.append((np.sort(order[count:]), np.sort(order[:count])))
    return found


def by_month(store: TokenStore, documents: Ints | None = None) -> list[tuple[str, Ints]]:
    """The documents of each month, as ``(2016-03, documents)``, in order; empty without dates."""
    if store.months is None:
        return []
    chosen = np.arange(store.num_documents) if documents is None else documents
    months = store.months[chosen]
    return [(month_name(int(m)), chosen[months == m]) for m in np.unique(months)]


def subset_key(documents: Ints | None) -> str | None:
    """A name for a choice of documents that changes with it."""
    if documents is None:
        return None
    return hashlib.sha256(np.asarray(documents, "<i8").tobytes()).hexdigest()[:16]


def plan_subset(offsets: Ints, settings: RowSettings, documents: Ints) -> RowPlan:
    """:func:`~headrace.data.packing.plan_rows` of some documents of a store.

    Args:
        offsets: int64 ``(num_documents + 1,)`` of the whole store.
        settings: length and packing.
        documents: int64, which of them, in order.
    """
    lengths = np.diff(offsets)[documents]
    packed = np.concatenate([[0], np.cumsum(lengths)])
    plan = plan_rows(packed, settings)
    # A piece lies within one document: it moves to where that document begins.
    place = np.searchsorted(packed, plan.starts, side="right") - 1
    starts = offsets[:-1][documents][place] + plan.starts - packed[:-1][place]
    return replace(plan, starts=starts.astype(np.int64))
