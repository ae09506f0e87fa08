"""Which elements of a unit belong to which rank.

A unit's trainable and its frozen elements are cut into as many equal pieces as there are ranks; the
last ranks' pieces may reach past the end, or be empty. Invariants: every element belongs to exactly
one rank; trainable pieces begin and end on the unit's grid of norm blocks, which depends on the
unit alone, so that no block is cut, whatever the number of ranks. Pure: nothing here allocates.
Sizes are computed once, for a search reads them thousands of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from headrace.store.layout import ALIGNMENT, UnitLayout, align

NORM_BLOCK = 1 << 16
_BLOCKS = 64  # of a unit at least, so that ranks share small ones evenly, too


def norm_block(layout: UnitLayout) -> int:
    """Elements whose gradient is summed to one norm; a power of two."""
    wanted = max(1, layout.num_trainable // _BLOCKS)
    return min(NORM_BLOCK, max(ALIGNMENT, 1 << (wanted.bit_length() - 1)))


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank of several.

    Attributes:
        rank: from 0.
        num_ranks: of the run.
    """

    rank: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rank's part of the elements ``[begin, end)`` of a unit.

    Attributes:
        begin: of the elements that are shared out.
        end: of the elements that are shared out.
        size: of every rank's part; together they may reach past ``end``.
        share: whose part it is.
    """

    begin: int
    end: int
    size: int
    share: Share

    @cached_property
    def start(self) -> int:
        """First element that is this rank's own."""
        return min(self.begin + self.share.rank * self.size, self.end)

    @cached_property
    def stop(self) -> int:
        """Behind the last one."""
        return min(self.begin + (self.share.rank + 1) * self.size, self.end)

    @cached_property
    def numel(self) -> int:
        """Elements of this rank's own."""
        return self.stop - self.start

    @cached_property
    def reach(self) -> int:
        """Behind the last element of all parts, the padding included."""
        return self.begin + self.share.num_ranks * self.size


@dataclass(frozen=True, kw_only=True)
class UnitShard:
    """What a rank holds of a unit: its trainable elements, behind them its frozen ones.

    Attributes:
        trained: the part of the trainable elements.
        frozen: the part of the others.
    """

    trained: Piece
    frozen: Piece

    @property
    def is_whole(self) -> bool:
        """One rank has everything."""
        return self.trained.share.num_ranks == 1

    @cached_property
    def numel(self) -> int:
        """Elements of the rank's weights."""
        return self.trained.numel + self.frozen.numel

    @property
    def pieces(self) -> tuple[tuple[Piece, int], ...]:
        """What is sent, each with its place in the rank's weights: in order, empty ones left out.

        A piece's padding may reach over elements of the next one, which comes after it.
        """
        if self.is_whole:
            whole = self.trained.end, self.frozen.end
            piece = Piece(begin=0, end=whole[1], size=whole[1], share=self.trained.share)
            return ((piece, 0),)
        placed = ((self.trained, 0), (self.frozen, self.trained.numel))
        return tuple((piece, at) for piece, at in placed if piece.end > piece.begin)

    @cached_property
    def slot_size(self) -> int:
        """Elements of a slot that the unit is gathered in."""
        return max(self.trained.reach, self.frozen.reach, self.frozen.end)

    @cached_property
    def gradient_size(self) -> int:
        """Elements of an accumulator whose sum is handed out."""
        return max(self.trained.reach, self.trained.end)

    def own(self, start: int, numel: int) -> tuple[slice, slice]:
        """Where elements ``[start, start + numel)`` of the unit are, as far as they are here.

        They must be all trainable or all frozen.

        Returns:
            Their place in the rank's planes, and which of the given ones they are.
        """
        trained = start < self.trained.end
        piece = self.trained if trained else self.frozen
        first = max(start, piece.start)
        last = max(first, min(start + numel, piece.stop))
        at = first - piece.start + (0 if trained else self.trained.numel)
        return slice(at, at + last - first), slice(first - start, last - start)


def unit_shard(layout: UnitLayout, share: Share) -> UnitShard:
    """What a rank holds of a unit."""
    block = norm_block(layout)
    if share.num_ranks == 1:
        block = ALIGNMENT  # no padding: the whole unit
    blocks = -(-layout.num_trainable // block)
    frozen = layout.size - layout.num_trainable
    return UnitShard(
        trained=Piece(
            begin=0,
            end=layout.num_trainable,
            size=-(-blocks // share.num_ranks) * block,
            share=share,
        ),
        frozen=Piece(
            begin=layout.num_trainable,
            end=layout.size,
            size=align(-(-frozen // share.num_ranks)),
            share=share,
        ),
    )


def gather_size(layout: UnitLayout, num_ranks: int) -> int:
    """Elements of a slot that a unit is gathered in."""
    return unit_shard(layout, Share(num_ranks=num_ranks)).slot_size
