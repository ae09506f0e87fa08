"""Micro-batches of a step, made from row plans and token stores.

Owns collation and the advance of the loader's state. The invariant: the rows of a step are the
next ``micro_batch_size * accumulation * num_ranks`` of the epoch's order (fewer at its end),
whatever the number of ranks, and a row's targets are the tokens that follow within its
document. Padding is never a target and never counted as a token.

Shape legend: B rows, T positions a row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.batch import IGNORE_INDEX, MicroBatch
from headrace.data.packing import RowPlan, RowSettings, cached_plan, plan_rows
from headrace.data.sampler import LoaderState, RowOrder
from headrace.data.subsets import plan_subset, subset_key
from headrace.data.supervision import supervised_rows
from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from headrace.data.batching import LoaderSettings
    from headrace.data.tokens import TokenStore

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """A dataset ready to be read by rows.

    Attributes:
        label: what reports call it.
        store: its tokens.
        plan: its rows.
        settings: how the rows were made.
        weight: share of the mixture, or ``None``.
        subset: names the choice of documents; ``None`` for all.
    """

    label: str
    store: TokenStore
    plan: RowPlan
    settings: RowSettings
    weight: float | None = None
    subset: str | None = None

    @classmethod
    def open(
        cls,
        store: TokenStore,
        settings: RowSettings,
        *,
        label: str,
        weight: float | None = None,
        documents: Ints | None = None,
    ) -> RowSet:
        """Plan the rows of a store, or reuse the plan kept beside it.

        Args:
            store: the tokens.
            settings: length and packing.
            label: what reports call it.
            weight: share of the mixture, or ``None``.
            documents: int64, which documents, in order; all by default.

        Raises:
            DataError: when no row is left.
        """
        subset, labels = subset_key(documents), store.labels

        def make() -> RowPlan:
            plan = (
                plan_rows(store.offsets, settings)
                if documents is None
                else plan_subset(store.offsets, settings, documents)
            )
            return plan if labels is None else supervised_rows(plan, labels)

        key = subset if labels is None else f"supervised {subset or 'all'}"
        plan = cached_plan(store.folder, store.offsets, settings, make=make, key=key)
        if plan.num_rows == 0:
            raise DataError(
                f"dataset {label!r} has no document to learn from: {store.num_documents} documents,"
                f" max_length {settings.max_length}, excess_length {settings.excess_length}",
                remedy="give it documents of at least two tokens"
                + ("" if labels is None else ", and within max_length one that is supervised")
                + ("" if settings.excess_length == "split" else ", or set excess_length: split"),
            )
        return cls(
            label=label, store=store, plan=plan, settings=settings, weight=weight, subset=subset
        )

    def supervise(self, piece: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Inputs of a piece and the token each of its positions must predict, int32 ``(T,)``."""
        start, length = int(self.plan.starts[piece]), int(self.plan.lengths[piece])
        known = self.store.tokens if self.store.labels is None else self.store.labels
        targets = np.full(length, IGNORE_INDEX, np.int32)
        num_targets = length if self.plan.has_next[piece] else length - 1
        targets[:num_targets] = known[start + 1 : start + 1 + num_targets]
        return self.store.tokens[start : start + length], targets


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One rank's part of a step.

    Attributes:
        micro_batches: in the order in which the engine must see them.
        row_ids: ``(dataset, row)`` of every row of the *global* batch, in order.
        lengths: int64, tokens of each piece of a document in this rank's rows.
        num_supervised_tokens: of this rank.
        state: the loader after this step.
    """

    micro_batches: list[MicroBatch]
    row_ids: list[tuple[int, int]]
    lengths: Ints
    num_supervised_tokens: int
    state: LoaderState

    @property
    def num_tokens(self) -> int:
        """Of this rank, padding not counted."""
        return int(self.lengths.sum())


class TrainLoader:
    """Steps without end, one epoch after the other.

    Args:
        row_sets: the datasets, all with the same row settings.
        settings: batch sizes.
        seed: of the order.
        shuffle: see :class:`~headrace.data.sampler.RowOrder`.
        rank: which part of each step this process gets.
        state: where to go on; the beginning by default.
    """

    def __init__(
        self,
        row_sets: Sequence[RowSet],
        settings: LoaderSettings,
        *,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        state: LoaderState | None = None,
    ) -> None:
        weighted = [rows.weight is not None for rows in row_sets]
        if any(weighted) and not all(weighted):
            missing = ", ".join(repr(rows.label) for rows in row_sets if rows.weight is None)
            raise ConfigError(
                f"some datasets have a weight, these have none: {missing}",
                remedy="give every dataset a weight (its share of the tokens), or none",
            )
        assert len({rows.settings for rows in row_sets}) == 1
        self.row_sets = list(row_sets)
        self.settings = settings
        self.rank = rank
        self.order = RowOrder(
            num_rows=tuple(rows.plan.num_rows for rows in row_sets),
            num_tokens=tuple(rows.plan.num_tokens for rows in row_sets),
            weights=tuple(r.weight for r in row_sets if r.weight is not None) or None,
            seed=seed,
            shuffle=shuffle,
        )
        self.steps_per_epoch = settings.steps_per_epoch(self.order.epoch_length)
        self.state = state or LoaderState(seed=seed)
        self._epoch: tuple[int, Ints, Ints] | None = None

    @property
    def seed(self) -> int:
        """Of the order."""
        return self.order.seed

    @property
    def epoch(self) -> float:
        """Epochs done, with the share of the one that is going on."""
        return self.state.epoch + self.state.index / self.order.epoch_length

    def describe(self) -> list[str]:
        """Lines for people about the mixture."""
        if self.order.weights is None:
            return []
        return [
            f"mixture: {rows.label}: {count / rows.plan.num_rows:.3g} passes an epoch"
            for rows, count in zip(self.row_sets, self.order.rows_per_epoch, strict=True)
        ]

    def facts(self) -> list[dict[str, Any]]:
        """One object a dataset for the run's record, as JSON types."""
        return [
            {
                "name": rows.label,
                "key": rows.store.key,
                "subset": rows.subset,
                "num_documents": rows.store.num_documents,
                "num_rows": rows.plan.num_rows,
                "num_tokens": rows.plan.num_tokens,
                "rows_per_epoch": count,
            }
            for rows, count in zip(self.row_sets, self.order.rows_per_epoch, strict=True)
        ]

    def fingerprint(self) -> dict[str, Any]:
        """What decides the stream of rows, as JSON types."""
        return {
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "datasets": [
                {
                    "key": rows.store.key,
                    "rows": asdict(rows.settings),
                    "weight": rows.weight,
                    "subset": rows.subset,
                }
                for rows in self.row_sets
            ],
        }

    def close(self) -> None:
        """Nothing works in the background."""

    def state_after(self, num_steps: int) -> LoaderState:
        """Where the loader stands after that many steps from the beginning."""
        epoch, step = divmod(num_steps, self.steps_per_epoch)
        index = step * self.settings.rows_per_step
        return LoaderState(seed=self.order.seed, epoch=epoch, index=index)

    def next_step(self) -> StepBatch:
        """The next step's micro-batches; advances the state."""
        epoch, datasets, rows = self._rows_of(self.state.epoch)
        stop = min(self.state.index + self.settings.rows_per_step, len(rows))
        chosen = slice(self.state.index, stop)
        ids = list(zip(datasets[chosen].tolist(), rows[chosen].tolist(), strict=True))
        size = self.settings.micro_batch_size
        groups = [ids[first : first + size] for first in range(0, len(ids), size)]
        mine = groups[self.rank :: self.settings.num_ranks]
        built = [
            collate([(self.row_sets[s], r) for s, r in group], self.settings) for group in mine
        ]
        used = self.settings.rows_per_step if self.settings.drop_last else 1
        at_end = len(rows) - stop < used
        self.state = (
            replace(self.state, epoch=epoch + 1, index=0)
            if at_end
            else replace(self.state, index=stop)
        )
        micro_batches = [batch for batch, _ in built]
        return StepBatch(
            micro_batches=micro_batches,
            row_ids=ids,
            lengths=np.concatenate([lengths for _, lengths in built] or [np.empty(0, np.int64)]),
            num_supervised_tokens=sum(batch.num_supervised_tokens for batch in micro_batches),
            state=self.state,
        )

    def _rows_of(self, epoch: int) -> tuple[int, Ints, Ints]:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, *self.order.epoch(epoch))
        return self._epoch


def evaluation_batches(
    rows: RowSet, settings: LoaderSettings, *, rank: int = 0
) -> Iterator[MicroBatch]:
    """Every row of a dataset once, in order, this rank's micro-batches only."""
    size = settings.micro_batch_size
    for first in range(rank * size, rows.plan.num_rows, size * settings.num_ranks):
        last = min(first + size, rows.plan.num_rows)
        yield collate([(rows, row) for row in range(first, last)], settings)[0]


def collate(
    rows: Sequence[tuple[RowSet, int]], settings: LoaderSettings
) -> tuple[MicroBatch, Ints]:
    """A micro-batch and the number of tokens of each piece of a document in it.

    Packed rows are ``max_length`` long and carry ``cu_seqlens``; unpacked rows are one document
    each, padded on the right to the longest of them.
    """
    packed = rows[0][0].settings.packing
    if packed:
        T = rows[0][0].settings.max_length
    else:
        longest = max(int(s.plan.lengths[s.plan.row_offsets[row]]) for s, row in rows)
        multiple = settings.pad_to_multiple_of
        T = min(-(-longest // multiple) * multiple, rows[0][0].settings.max_length)
    B = len(rows)
    inputs_BT = np.full((B, T), settings.pad_token_id, np.int64)
    targets_BT = np.full((B, T), IGNORE_INDEX, np.int64)
    positions_BT = np.zeros((B, T), np.int64)
    bounds = [0]
    lengths: list[int] = []
    for b, (row_set, row) in enumerate(rows):
        at = 0
        for piece in range(row_set.plan.row_offsets[row], row_set.plan.row_offsets[row + 1]):
            ids, targets = row_set.supervise(piece)
            span = slice(at, at + len(ids))
            inputs_BT[b, span] = ids
            targets_BT[b, span] = targets
            positions_BT[b, span] = np.arange(len(ids))
            at = span.stop
            lengths.append(len(ids))
            bounds.append(b * T + at)
        if at < T and packed:
            positions_BT[b, at:] = np.arange(T - at)
            bounds.append((b + 1) * T)
        elif at < T:
            # One document a row: positions run on, and causal attention keeps what follows
            # the document out of its sight.
            positions_BT[b, at:] = np.arange(at, T)
    return MicroBatch(
        input_ids_BT=torch.from_numpy(inputs_BT),
        targets_BT=torch.from_numpy(targets_BT),
        position_ids_BT=torch.from_numpy(positions_BT),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32) if packed else None,
    ), np.array(lengths, np.int64)
