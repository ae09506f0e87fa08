"""Shards of a unit: nothing lost, nothing twice, no norm block cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.host_optimizer import Chunk
from headrace.engine.norms import BlockNorms
from headrace.store.layout import ALIGNMENT, plan_segments, plan_unit
from headrace.store.ranges import NORM_BLOCK, Share, norm_block, norm_grids, unit_shard
from headrace.store.sections import cut_unit, whole_unit

SIZES = st.lists(
    st.tuples(st.integers(1, 4_000), st.booleans(), st.booleans()), min_size=1, max_size=6
)


def layout_of(sizes):
    return plan_unit(
        "layers.0",
        [
            (f"p{i}", f"p{i}", (n, 1) if matrix else (n,), trained)
            for i, (n, matrix, trained) in enumerate(sizes)
        ],
    )


EXPERTS = st.none() | st.tuples(
    st.integers(2, 7), st.integers(1, 900), st.integers(2, 7), st.booleans(), st.booleans()
)


def unit_of(sizes, experts):
    """A layout and what it is sent in: the whole, or the rest and slices of stacked experts."""
    params = [
        (f"p{i}", f"p{i}", (n, 1) if matrix else (n,), trained)
        for i, (n, matrix, trained) in enumerate(sizes)
    ]
    if experts is None:
        layout = plan_unit("layers.0", params)
        return layout, whole_unit(0, layout)
    count, size, slices, one, other = experts
    params += [("e.0", "e.0", (count, size, 2), one), ("e.1", "e.1", (count, size), other)]
    layout = plan_unit("layers.0", params)
    return layout, cut_unit(0, layout, ["e.0", "e.1"], count, min(count, slices))


def shards_of(layout, sections, num_ranks):
    first = unit_shard(layout, Share(num_ranks=num_ranks), sections)
    return [first.of_rank(rank) for rank in range(num_ranks)]


@settings(max_examples=80, deadline=None)
@given(SIZES, EXPERTS, st.integers(1, 9))
def test_every_element_has_one_rank(sizes, experts, num_ranks):
    """And pieces of trainable elements lie on the grid of norm blocks."""
    layout, sections = unit_of(sizes, experts)
    shards = shards_of(layout, sections, num_ranks)
    for kind in ("trained_parts", "frozen_parts"):
        parts = [part for shard in shards for part in getattr(shard, kind)]
        bounds = (0, layout.num_trainable) if kind == "trained_parts" else (
            layout.num_trainable, layout.size,
        )  # fmt: skip
        spans = sorted((part.start, part.stop) for part in parts)
        ends = [bounds[0], *(stop for _, stop in spans)]
        assert [start for start, _ in spans] == ends[:-1]
        assert ends[-1] == bounds[1]
    grids = norm_grids(layout, sections)
    for rank, shard in enumerate(shards):
        assert shard == unit_shard(layout, Share(rank=rank, num_ranks=num_ranks), sections)
        places = [p for part in (*shard.trained_parts, *shard.frozen_parts)
                  for p in range(part.at, part.at + part.stop - part.start)]  # fmt: skip
        assert len(set(places)) == len(places)
        assert set(places) <= set(range(shard.numel))
        assert all(part.at + part.stop - part.start <= shard.num_trained
                   for part in shard.trained_parts)  # fmt: skip
        for part in shard.trained_parts if num_ranks > 1 else ():
            (grid,) = (grid for grid in grids if grid.start <= part.start < grid.stop)
            assert part.start == grid.start or (part.start - grid.origin) % grid.block == 0
            assert part.stop <= grid.stop
        if num_ranks > 1:
            for piece, section in zip(shard.sections, sections, strict=True):
                assert piece.slot_size >= section.layout.size
                assert piece.gradient_size >= section.layout.num_trainable
    owners = {}
    for rank, shard in enumerate(shards):
        for param in layout.params:
            for own, given_slice in shard.own(param.offset, param.numel):
                for at, i in zip(
                    range(own.start, own.stop),
                    range(*given_slice.indices(param.numel)),
                    strict=True,
                ):
                    assert 0 <= at < shard.numel
                    assert owners.setdefault((param.name, i), rank) == rank
    assert len(owners) == sum(param.numel for param in layout.params)


@settings(max_examples=80, deadline=None)
@given(SIZES, EXPERTS, st.integers(2, 9))
def test_what_is_sent_completes_every_section(sizes, experts, num_ranks):
    """Gathering the pieces in their order leaves every element in its place."""
    layout, sections = unit_of(sizes, experts)
    shards = shards_of(layout, sections, num_ranks)
    wanted = torch.arange(layout.size)
    planes = []
    for shard in shards:
        plane = torch.full((shard.numel,), -3)
        for part in (*shard.trained_parts, *shard.frozen_parts):
            plane[part.at : part.at + part.stop - part.start] = wanted[part.start : part.stop]
        planes.append(plane)
    for number, section in enumerate(sections):
        slot = torch.full((shards[0].sections[number].slot_size,), -1)
        for index in range(len(shards[0].pieces(number))):
            for rank, shard in enumerate(shards):
                piece, at = shard.pieces(number)[index]
                own = torch.full((piece.size,), -2)  # padding holds anything
                own[: piece.numel] = planes[rank][at : at + piece.numel]
                slot[piece.begin + rank * piece.size : piece.begin + (rank + 1) * piece.size] = own
        for span in section.spans:
            found = slot[span.at : span.at + span.stop - span.start]
            assert torch.equal(found, wanted[span.start : span.stop])


def test_small_and_large_units_are_shared_evenly():
    """64 blocks at least, of at most 65536 elements; every slice of experts by itself."""
    small = layout_of([(64 * ALIGNMENT, True, True)])
    large = layout_of([(100 * NORM_BLOCK, True, True)])
    assert (norm_block(small), norm_block(large)) == (ALIGNMENT, NORM_BLOCK)
    cut, sections = unit_of([(64 * ALIGNMENT, True, True)], (8, 512 * ALIGNMENT, 4, True, True))
    for layout, parts in ((small, ()), (large, ()), (cut, sections)):
        shards = shards_of(layout, parts, 8)
        for number in range(len(shards[0].sections)):
            shares = [shard.sections[number].trained for shard in shards]
            assert max(s.numel for s in shares) <= 1.05 * shares[0].end / 8


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("experts", [None, (5, 700, 3, True, True)])
def test_norms_have_the_same_bits_whoever_takes_them(num_ranks, experts):
    """Blocks that other ranks record are zero here; their sum is the whole, in one order."""
    layout, sections = unit_of(
        [(9_000, True, True), (777, False, True), (5_000, True, True)], experts
    )
    grids = norm_grids(layout, sections)
    segments = plan_segments(layout, lambda param: len(param.shape), grids)
    values = torch.randn(layout.num_trainable, generator=torch.Generator().manual_seed(0))

    def norms(share, cut):
        chunks = []
        for part in unit_shard(layout, share, sections).trained_parts:
            for segment in segments:
                first, last = max(segment.start, part.start), min(segment.stop, part.stop)
                ranges = segment.grid.split(first, last, cut) if first < last else []
                chunks += [
                    Chunk(0, len(chunks) + i, a, b, segment.group, segment.grid)
                    for i, (a, b) in enumerate(ranges)
                ]
        found = BlockNorms([segments], [chunks], pinned=False)
        for chunk in chunks:
            found.record(chunk, values[chunk.start : chunk.stop])
        return found

    whole = norms(Share(), 1 << 20)
    parts = [norms(Share(rank=r, num_ranks=num_ranks), 1024) for r in range(num_ranks)]
    summed = sum(part._all for part in parts)
    assert torch.equal(summed, whole._all)
    assert parts[0].total(lambda _: summed) == whole.total()
    assert whole.total() == pytest.approx(float(values.double().norm()), rel=1e-6)
