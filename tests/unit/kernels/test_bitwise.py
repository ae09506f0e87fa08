"""The compiled kernels give the reference's bits: instruction sets, threads, chunks, values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import planes
from headrace.kernels import reference
from headrace.kernels.headroom import Headroom, Store

NUM = 70_001  # more than a block, and no multiple of any vector or tile
OPERATIONS = {
    "adamw": {"step": 7, "grad_scale": 0.37},
    "invert": {"step": 7, "grad_scale": 0.37},
    "correct": {"step": 7, "applied_scale": 1.0, "scale": 0.25},
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "float32"])
@pytest.mark.parametrize("bfloat16", [True, False], ids=["bf16 grad", "fp32 grad"])
def test_native_equals_reference(native_kernels, operation, split, bfloat16):
    state = planes.make_planes(NUM, split=split)
    grad = planes.make_grad(NUM, bfloat16=bfloat16)
    expected, found = state.copy(), state.copy()
    assert expected.call(reference, operation, grad, **OPERATIONS[operation])
    assert found.call(native_kernels, operation, grad, **OPERATIONS[operation])
    assert not expected.same_bits(state)
    assert found.same_bits(expected)


@pytest.mark.parametrize("split", [True, False], ids=["split", "float32"])
@pytest.mark.parametrize("bfloat16", [True, False], ids=["bf16 grad", "fp32 grad"])
def test_weights_and_then_moments_are_the_whole_update(kernels, split, bfloat16):
    num = 5 * 128 + 3 if kernels.backend.name == "reference" else NUM
    state = planes.make_planes(num, split=split)
    grad = planes.make_grad(num, bfloat16=bfloat16)
    settings = {"step": 7, "grad_scale": 0.37}
    whole, parts = state.copy(), state.copy()
    assert whole.call(kernels, "adamw", grad, **settings)
    assert parts.call(kernels, "adamw", grad, **settings, store=Store.WEIGHTS)
    assert np.array_equal(parts.exp_avg.view(np.int32), state.exp_avg.view(np.int32))
    assert np.array_equal(parts.exp_avg_sq.view(np.int32), state.exp_avg_sq.view(np.int32))
    assert not parts.same_bits(state)
    assert parts.call(kernels, "adamw", grad, **settings, store=Store.MOMENTS)
    assert parts.same_bits(whole)


def test_a_refused_update_stores_no_weight(kernels):
    """Every result is looked at before the first part is stored."""
    state = planes.make_planes(300, split=True, special=False)
    grad = planes.make_grad(300, bfloat16=False, special=False)
    grad[170] = np.float32(3e38)
    before = state.copy()
    assert not state.call(kernels, "adamw", grad, step=1, store=Store.WEIGHTS)
    assert state.same_bits(before)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_threads_and_chunks_change_nothing(native_kernels, num_threads):
    num = 3 * (1 << 16) + 5
    state = planes.make_planes(num, split=True)
    grad = planes.make_grad(num, bfloat16=True)
    whole, parts = state.copy(), state.copy()
    assert whole.call(native_kernels, "adamw", grad, step=3)
    pool = native_kernels.Pool(num_threads)
    for begin in range(0, num, 50_021):
        part = slice(begin, begin + 50_021)
        assert parts.slice(part).call(native_kernels, "adamw", grad[part], step=3, pool=pool)
    pool.close()
    assert parts.same_bits(whole)


def test_what_is_known_beforehand_changes_nothing(native_kernels):
    state = planes.make_planes(NUM, split=True, special=False)
    grad = planes.make_grad(NUM, bfloat16=True, special=False)
    plain, scanned, bounded = state.copy(), state.copy(), state.copy()
    first, second = Headroom(), Headroom()
    for step in (1, 2, 3):
        assert plain.call(native_kernels, "adamw", grad, step=step)
        assert scanned.call(native_kernels, "adamw", grad, step=step, headroom=first)
        assert bounded.call(
            native_kernels, "adamw", grad, step=step, headroom=second, largest_grad=1.0
        )
    assert first.is_ample
    assert second.is_ample
    assert scanned.same_bits(plain)
    assert bounded.same_bits(plain)


bits = st.integers(0, 2**32 - 1)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(bits, min_size=1, max_size=80),
    others=st.tuples(bits, bits, bits),
    operation=st.sampled_from(sorted(OPERATIONS)),
)
def test_any_bit_pattern_is_treated_alike(weights, others, operation):
    """Applied or refused alike, with the same bits: NaN, infinities and overflow included."""
    native = pytest.importorskip("headrace.kernels.native")
    weight = np.array(weights, np.uint32).view(np.float32)
    rest = [
        np.roll(np.array([*weights[1:], other], np.uint32), 1).view(np.float32) for other in others
    ]
    state = planes.Planes(None, None, weight, rest[0], rest[1])
    expected, found = state.copy(), state.copy()
    applied = expected.call(reference, operation, rest[2], **OPERATIONS[operation])
    assert found.call(native, operation, rest[2], **OPERATIONS[operation]) == applied
    assert found.same_bits(expected)


def test_flush_to_zero_of_the_process_does_not_reach_the_kernels(native_kernels):
    """Another library may have set it, on this thread or before the pool was made."""
    tiny = np.float32(1e-39)
    state = planes.make_planes(NUM, split=False, special=False)
    state.weight[:] = tiny
    state.exp_avg[:] = 0
    grad = np.zeros(NUM, np.float32)
    expected = state.copy()
    expected.call(reference, "adamw", grad, step=1)
    assert expected.weight[0] != 0
    torch.set_flush_denormal(True)
    try:
        pool = native_kernels.Pool(3)
        assert state.call(native_kernels, "adamw", grad, step=1, pool=pool)
        pool.close()
    finally:
        torch.set_flush_denormal(False)
    assert state.same_bits(expected)


def test_split_and_plain_masters_hold_the_same_weights(kernels):
    split = planes.make_planes(NUM, split=True)
    plain = planes.Planes(
        None, None, split.master.copy(), split.exp_avg.copy(), split.exp_avg_sq.copy()
    )
    grad = planes.make_grad(NUM, bfloat16=True)
    for step in (1, 2):
        assert split.call(kernels, "adamw", grad, step=step)
        assert plain.call(kernels, "adamw", grad, step=step)
    assert split.master.tobytes() == plain.weight.tobytes()


def test_moments_below_the_smallest_normal_are_stored_as_zero(kernels):
    state = planes.make_planes(4, split=True, special=False)
    state.exp_avg[:] = [1.2e-38, -1.2e-38, 2e-38, 0]
    state.exp_avg_sq[:] = [1e-39, 1.1755e-38, 2e-38, 0]
    assert state.call(kernels, "adamw", np.zeros(4, np.uint16), step=100)
    assert state.exp_avg.view(np.uint32)[[0, 1, 3]].tolist() == [0, 0, 0]
    assert state.exp_avg_sq.view(np.uint32)[[0, 1, 3]].tolist() == [0, 0, 0]
    assert state.exp_avg[2] == np.float32(2e-38) + np.float32(0.1) * -np.float32(2e-38)
