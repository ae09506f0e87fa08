"""What ranks must agree on before and after they compute: who has how much of the global batch.

Invariant: every rank runs as many micro-batches as the one that has most, so that all walk the same
plan of waves and layers; what is added for that supervises nothing and counts nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.batch import IGNORE_INDEX, MicroBatch
from headrace.models.dropout import draw_seeds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """A rank's part of a step, and the sizes of the whole.

    Attributes:
        micro_batches: of this rank; those from ``num_own`` on only fill up.
        num_own: micro-batches that are the step's.
        num_supervised: supervised tokens of all ranks.
        num_tokens: positions of all ranks, padding of rows included.
    """

    micro_batches: Sequence[MicroBatch]
    num_own: int
    num_supervised: int
    num_tokens: int


def agree_on_batch(ranks: Ranks, micro_batches: Sequence[MicroBatch]) -> GlobalBatch:
    """Count the global batch, and fill up this rank's part of it."""
    first = micro_batches[0] if micro_batches else None
    table = ranks.table(
        [
            len(micro_batches),
            sum(batch.num_supervised_tokens for batch in micro_batches),
            sum(batch.num_tokens for batch in micro_batches),
            *((0, 0) if first is None else first.input_ids_BT.shape),
            first is not None and first.cu_seqlens is not None,
        ]
    )
    most = int(max(row[0] for row in table))
    filled = list(micro_batches)
    if most > len(filled):
        _, _, _, rows, length, packed = next(row for row in table if row[0])
        filled += [_empty(int(rows), int(length), packed=bool(packed))] * (most - len(filled))
    return GlobalBatch(
        micro_batches=filled,
        num_own=len(micro_batches),
        num_supervised=int(sum(row[1] for row in table)),
        num_tokens=int(sum(row[2] for row in table)),
    )


def _empty(rows: int, length: int, *, packed: bool) -> MicroBatch:
    """A micro-batch of the others' shape, so that it runs through the same compiled graphs."""
    ids_BT = torch.zeros(rows, length, dtype=torch.int64)
    ends = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    return MicroBatch(
        input_ids_BT=ids_BT,
        targets_BT=torch.full_like(ids_BT, IGNORE_INDEX),
        position_ids_BT=torch.arange(length).expand(rows, length).clone(),
        cu_seqlens=ends if packed else None,
    )


def dropout_seeds(
    ranks: Ranks,
    given: Sequence[MicroBatch],
    run: Sequence[MicroBatch],
    *,
    seed: int,
    step: int,
    num_layers: int,
) -> list[torch.Tensor]:
    """Seeds of each micro-batch, ``(layers, B)``, by the row's number in the global batch.

    Micro-batch ``m`` of rank ``r`` is number ``m * num_ranks + r`` of the global batch.

    Args:
        ranks: of the run.
        given: this rank's micro-batches as the step got them.
        run: the same rows, perhaps cut otherwise, and behind them what only fills up.
        seed: of the run.
        step: optimizer step, from 1.
        num_layers: of the model.
    """
    (most,) = (int(max(column)) for column in zip(*ranks.table([len(given)]), strict=True))
    counts = [len(batch.input_ids_BT) for batch in given]
    table = ranks.table([*counts, *[0] * (most - len(counts))])
    rows = [int(table[rank][m]) for m in range(most) for rank in range(ranks.size)]
    seeds = torch.split(
        draw_seeds(seed, step, num_layers=num_layers, num_rows=sum(rows)), rows, dim=1
    )
    mine = [seeds[m * ranks.size + ranks.rank] for m in range(len(given))]
    wanted = [len(batch.input_ids_BT) for batch in run]
    filling = seeds[0].new_zeros(num_layers, sum(wanted) - sum(counts))
    return list(torch.split(torch.cat([*mine, filling], dim=1), wanted, dim=1))
