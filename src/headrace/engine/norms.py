"""Norms of a step's gradients over blocks of fixed length.

Invariant: where a unit's blocks begin and end depends on the unit alone, and what it is sent in
(its parameter groups and :func:`headrace.store.ranges.norm_grids`), and the sum over all of them
has one order; so the norm depends neither on chunks, nor on threads, nor on how many ranks share
the blocks.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.engine.host_optimizer import Chunk
    from headrace.store.layout import Segment


class BlockNorms:
    """2-norms of blocks, where the host can read them; zero for blocks of other ranks."""

    def __init__(
        self,
        segments: Sequence[Sequence[Segment]],
        chunks: Sequence[Sequence[Chunk]],
        *,
        pinned: bool,
    ) -> None:
        """Number the blocks of all units; no chunk ends within a block.

        Args:
            segments: by unit, what shares optimizer settings and a grid.
            chunks: by unit, what this rank records.
            pinned: the device writes to them.
        """
        places: dict[Chunk, slice] = {}
        total = 0
        for unit, parts in enumerate(segments):
            starts = [
                start
                for part in parts
                for start, _ in part.grid.split(part.start, part.stop, part.grid.block)
            ]
            for chunk in chunks[unit]:
                first = bisect.bisect_left(starts, chunk.start)
                last = bisect.bisect_left(starts, chunk.stop)
                places[chunk] = slice(total + first, total + last)
            total += len(starts)
        self._all = torch.zeros(total, dtype=torch.float32, pin_memory=pinned)
        self._norms = {chunk: self._all[place] for chunk, place in places.items()}

    def record(self, chunk: Chunk, values: torch.Tensor) -> None:
        """Take the norms of a chunk's values, in the current stream."""
        block, numel = chunk.grid.block, values.numel()
        head = min((chunk.grid.origin - chunk.start) % block, numel)  # up to where the grid goes on
        tail = (numel - head) % block
        norms = []
        if head:
            norms.append(torch.linalg.vector_norm(values[:head], dtype=torch.float32).view(1))
        if head + tail < numel:
            blocks = values[head : numel - tail].view(-1, block)
            norms.append(torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float32))
        if tail:
            norms.append(
                torch.linalg.vector_norm(values[numel - tail :], dtype=torch.float32).view(1)
            )
        self._norms[chunk].copy_(torch.cat(norms), non_blocking=True)

    def of(self, chunk: Chunk) -> float:
        """The norm of a chunk."""
        return _norm_of_norms(self._norms[chunk])

    def total(self, joined: Callable[[torch.Tensor], torch.Tensor] | None = None) -> float:
        """The norm of everything; ``joined`` adds what other ranks recorded."""
        return _norm_of_norms(self._all if joined is None else joined(self._all))


def _norm_of_norms(norms: torch.Tensor) -> float:
    """In float64, whose rounding no float32 norm sees; numpy sums in an order of its own."""
    return math.sqrt(float(np.square(norms.numpy(), dtype=np.float64).sum()))
