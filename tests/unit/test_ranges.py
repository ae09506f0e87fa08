"""Shards of a unit: nothing lost, nothing twice, no norm block cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.host_optimizer import Chunk
from headrace.engine.norms import BlockNorms
from headrace.store.layout import ALIGNMENT, plan_segments, plan_unit
from headrace.store.ranges import NORM_BLOCK, Share, norm_block, unit_shard

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


@settings(max_examples=40)
@given(SIZES, st.integers(1, 9))
def test_every_element_has_one_rank(sizes, num_ranks):
    """And pieces of trainable elements lie on the grid of norm blocks."""
    layout = layout_of(sizes)
    shards = [unit_shard(layout, Share(rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
    covered = [range(s.trained.start, s.trained.stop) for s in shards]
    covered += [range(s.frozen.start, s.frozen.stop) for s in shards]
    assert [i for part in covered for i in part] == list(range(layout.size))
    for shard in shards:
        assert shard.trained.start % ALIGNMENT == shard.frozen.start % ALIGNMENT == 0
        if num_ranks > 1 and shard.trained.numel:
            assert shard.trained.start % norm_block(layout) == 0
        assert shard.slot_size >= layout.size
        assert shard.gradient_size >= layout.num_trainable
    places = {}
    for rank, shard in enumerate(shards):
        for param in layout.params:
            own, given_slice = shard.own(param.offset, param.numel)
            for at, i in zip(
                range(own.start, own.stop),
                range(*given_slice.indices(param.numel)),
                strict=True,
            ):
                assert 0 <= at < shard.numel
                assert places.setdefault((param.name, i), rank) == rank
    assert len(places) == sum(param.numel for param in layout.params)


@settings(max_examples=40)
@given(SIZES, st.integers(2, 9))
def test_what_is_sent_completes_the_unit(sizes, num_ranks):
    """Gathering the pieces in their order leaves every element in its place."""
    layout = layout_of(sizes)
    shards = [unit_shard(layout, Share(rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
    wanted = torch.arange(layout.size)
    slot = torch.full((shards[0].slot_size,), -1)
    for number in range(len(shards[0].pieces)):
        for rank, shard in enumerate(shards):
            piece, at = shard.pieces[number]
            own = torch.full((piece.size,), -2)  # padding holds anything
            n = shard.trained.numel
            mine = torch.cat([wanted[shard.trained.start : shard.trained.stop],
                              wanted[shard.frozen.start : shard.frozen.stop]])  # fmt: skip
            assert at in (0, n)
            own[: piece.numel] = mine[at : at + piece.numel]
            slot[piece.begin + rank * piece.size : piece.begin + (rank + 1) * piece.size] = own
    assert torch.equal(slot[: layout.size], wanted)


def test_small_and_large_units_are_shared_evenly():
    """64 blocks at least, of at most 65536 elements."""
    small = layout_of([(64 * ALIGNMENT, True, True)])
    large = layout_of([(100 * NORM_BLOCK, True, True)])
    assert (norm_block(small), norm_block(large)) == (ALIGNMENT, NORM_BLOCK)
    for layout in (small, large):
        shares = [unit_shard(layout, Share(rank=r, num_ranks=8)).trained.numel for r in range(8)]
        assert max(shares) <= 1.05 * layout.num_trainable / 8


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_norms_have_the_same_bits_whoever_takes_them(num_ranks):
    """Blocks that other ranks record are zero here; their sum is the whole, in one order."""
    layout = layout_of([(9_000, True, True), (777, False, True), (5_000, True, True)])
    segments = plan_segments(layout, lambda param: len(param.shape))
    values = torch.randn(layout.num_trainable, generator=torch.Generator().manual_seed(0))

    def norms(share, cut):
        piece = unit_shard(layout, share).trained
        chunks = []
        for segment in segments:
            first, last = max(segment.start, piece.start), min(segment.stop, piece.stop)
            cuts = [first, *range((first // cut + 1) * cut, last, cut), last]
            chunks += [
                Chunk(0, len(chunks) + i, a, b, segment.group)
                for i, (a, b) in enumerate(itertools.pairwise(cuts))
                if a < b
            ]
        found = BlockNorms([layout], [segments], [chunks], pinned=False)
        for chunk in chunks:
            found.record(chunk, values[chunk.start : chunk.stop])
        return found

    whole = norms(Share(), 1 << 20)
    parts = [norms(Share(rank=r, num_ranks=num_ranks), 1024) for r in range(num_ranks)]
    summed = sum(part._all for part in parts)
    assert torch.equal(summed, whole._all)
    assert parts[0].total(lambda _: summed) == whole.total()
    assert whole.total() == pytest.approx(float(values.double().norm()), rel=1e-6)
