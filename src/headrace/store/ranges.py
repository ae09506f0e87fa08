"""Which elements of a unit belong to which rank.

What is sent and returns as one piece, a unit or a section of one, has trainable and frozen
elements. Both are cut into as many equal pieces as there are ranks; the last ranks' pieces may
reach past the end, or be empty. Invariants: every element belongs to exactly one rank; trainable
pieces begin and end on the section's grid of norm blocks, which depends on the section alone, so
that no block is cut, whatever the number of ranks. Pure: nothing here allocates. Sizes are computed
once, for a search reads them thousands of times.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.store.layout import ALIGNMENT, Grid, UnitLayout, align
from headrace.store.sections import Span, whole_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.store.sections import Section

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
class SectionShard:
    """What a rank holds of a section; elements are counted in it.

    Attributes:
        trained: the part of the trainable elements.
        frozen: the part of the others.
    """

    trained: Piece
    frozen: Piece

    @cached_property
    def slot_size(self) -> int:
        """Elements of a slot that the section is gathered in."""
        return max(self.trained.reach, self.frozen.reach, self.frozen.end)

    @cached_property
    def gradient_size(self) -> int:
        """Elements of an accumulator whose sum is handed out."""
        return max(self.trained.reach, self.trained.end)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive elements of a unit that a rank holds.

    Attributes:
        start: the first one, counted in the unit.
        stop: behind the last one.
        at: place of the first one in the rank's planes.
    """

    start: int
    stop: int
    at: int


@dataclass(frozen=True, kw_only=True)
class UnitShard:
    """What a rank holds of a unit: the trainable elements of its sections, then the frozen ones.

    Attributes:
        layout: of the unit.
        share: whose shard.
        sections: what it holds of each; of one rank the unit is one section.
        spans: which elements of the unit each section holds, in order.
    """

    layout: UnitLayout
    share: Share
    sections: tuple[SectionShard, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def is_whole(self) -> bool:
        """One rank has everything."""
        return self.share.num_ranks == 1

    @cached_property
    def num_trained(self) -> int:
        """Elements of the planes that only updates touch."""
        return sum(section.trained.numel for section in self.sections)

    @cached_property
    def numel(self) -> int:
        """Elements of the rank's weights."""
        return self.num_trained + sum(section.frozen.numel for section in self.sections)

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """Where each section's trainable and frozen elements begin in the rank's weights."""
        trained = itertools.accumulate((s.trained.numel for s in self.sections), initial=0)
        frozen = itertools.accumulate(
            (s.frozen.numel for s in self.sections), initial=self.num_trained
        )
        return list(zip(trained, frozen, strict=True))

    def pieces(self, section: int = 0) -> tuple[tuple[Piece, int], ...]:
        """What is sent of a section, each with its place in the rank's weights.

        In order, empty ones left out. A piece's padding may reach over elements of the next one,
        which comes after it.
        """
        shard = self.sections[section]
        placed = zip((shard.trained, shard.frozen), self._places[section], strict=True)
        return tuple((piece, at) for piece, at in placed if piece.end > piece.begin)

    @cached_property
    def trained_parts(self) -> tuple[Part, ...]:
        """Where the rank's trainable elements lie in the unit, by their place in its planes."""
        return self._parts(0)

    @cached_property
    def frozen_parts(self) -> tuple[Part, ...]:
        """The same of what is frozen."""
        return self._parts(1)

    def _parts(self, kind: int) -> tuple[Part, ...]:
        parts = []
        for shard, spans, places in zip(self.sections, self.spans, self._places, strict=False):
            piece = (shard.trained, shard.frozen)[kind]
            for span in spans:
                first = max(piece.start, span.at)
                last = min(piece.stop, span.at + span.stop - span.start)
                if first < last:
                    offset = span.start - span.at
                    at = places[kind] + first - piece.start
                    parts.append(Part(start=first + offset, stop=last + offset, at=at))
        return tuple(parts)

    def own(self, start: int, numel: int) -> list[tuple[slice, slice]]:
        """Where elements ``[start, start + numel)`` of the unit are, as far as they are here.

        Returns:
            Of each stretch its place in the rank's planes, and which of the given ones it is.
        """
        found = []
        for part in (*self.trained_parts, *self.frozen_parts):
            first, last = max(start, part.start), min(start + numel, part.stop)
            if first < last:
                at = part.at + first - part.start
                found.append((slice(at, at + last - first), slice(first - start, last - start)))
        return found

    def of_rank(self, rank: int) -> UnitShard:
        """What another rank holds of the unit."""
        share = Share(rank=rank, num_ranks=self.share.num_ranks)
        sections = tuple(
            SectionShard(trained=_shared(s.trained, share), frozen=_shared(s.frozen, share))
            for s in self.sections
        )
        return replace(self, share=share, sections=sections)


def _shared(piece: Piece, share: Share) -> Piece:
    return Piece(begin=piece.begin, end=piece.end, size=piece.size, share=share)


def section_shard(layout: UnitLayout, share: Share) -> SectionShard:
    """What a rank holds of a section with this layout."""
    block = norm_block(layout)
    if share.num_ranks == 1:
        block = ALIGNMENT  # no padding: the whole section
    blocks = -(-layout.num_trainable // block)
    frozen = layout.size - layout.num_trainable
    return SectionShard(
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


def unit_shard(layout: UnitLayout, share: Share, sections: Sequence[Section] = ()) -> UnitShard:
    """What a rank holds of a unit.

    Args:
        layout: of the unit.
        share: whose shard.
        sections: that it is sent in; none for a whole one. A unit of one rank alone is held as
            it is, whatever it is sent in.
    """
    parts = whole_unit(0, layout) if share.num_ranks == 1 or not sections else sections
    return UnitShard(
        layout=layout,
        share=share,
        sections=tuple(section_shard(part.layout, share) for part in parts),
        spans=tuple(part.spans for part in parts),
    )


def norm_grids(layout: UnitLayout, sections: Sequence[Section] = ()) -> tuple[Grid, ...]:
    """The grids of norm blocks of a unit, in order of its elements.

    Each section has one of its own, which depends neither on ranks nor on the other sections.
    """
    grids = [
        Grid(
            start=span.start,
            stop=span.stop,
            origin=span.start - span.at,
            block=norm_block(part.layout),
        )
        for part in sections or whole_unit(0, layout)
        for span in part.spans
    ]
    return tuple(sorted(grids, key=lambda grid: grid.start))
