"""Registered host memory on a real device: pinned, copied from directly, given back."""

from __future__ import annotations

import torch

from headrace.store.arena import Arena
from headrace.units import MIB
from on_cuda import ON_CUDA

pytestmark = ON_CUDA


def test_a_registered_arena_is_pinned_and_copies_both_ways():
    with Arena(64 * MIB, name="test", register_cuda=True) as arena:
        host = arena.tensor(256, 1 << 20, torch.float32)
        assert host.is_pinned()
        host.normal_(generator=torch.Generator().manual_seed(0))
        device = host.to("cuda", non_blocking=True)
        returned = arena.tensor(32 * MIB, 1 << 20, torch.float32)
        returned.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(returned, host)
    assert not host.is_pinned()


def test_an_arena_can_be_registered_again_after_it_was_closed():
    for _ in range(3):
        with Arena(8 * MIB, name="test", register_cuda=True) as arena:
            assert arena.is_registered
