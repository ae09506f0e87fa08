"""The split master: (hi << 16) + lo gives back every bit, hi rounds half away from zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.kernels import reference

LARGEST_SPLIT = 0x7F7F7FFF


def split(kernels, bits):
    value = np.asarray(bits, dtype=np.uint32).view(np.float32)
    hi = np.full(len(value), 0xABCD, np.uint16)
    lo = np.full(len(value), 0x1234, np.int16)
    return kernels.split_float32(value, hi, lo), hi, lo


@given(hnp.arrays(np.uint32, st.integers(1, 300), elements=st.integers(0, 2**32 - 1)))
def test_every_bit_pattern_survives_the_formula(bits):
    """Also those that the kernels refuse: the identity is one of integers."""
    hi, lo = reference.split_bits(bits.view(np.float32))
    assert reference.join_bits(hi, lo).tobytes() == bits.tobytes()


def test_all_low_halves_round_trip(kernels):
    low = np.arange(1 << 16, dtype=np.uint32)
    for high in (0x0000, 0x8000, 0x0001, 0x3F80, 0xBF7F, 0x7F7E, 0xFF7E):
        bits = low | np.uint32(high << 16)
        fits, hi, lo = split(kernels, bits)
        assert fits
        out = np.empty(len(bits), np.float32)
        kernels.join_float32(hi, lo, out)
        assert out.tobytes() == bits.tobytes()


def test_hi_is_torchs_cast_except_at_ties(kernels):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    bits = bits[(bits & 0x7FFFFFFF) <= LARGEST_SPLIT]
    fits, hi, _ = split(kernels, bits)
    assert fits
    cast = torch.from_numpy(bits.view(np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()
    tie = (bits & 0xFFFF) == 0x8000
    assert tie.any()
    np.testing.assert_array_equal(hi[~tie], cast[~tie])


@pytest.mark.parametrize(
    ("bits", "hi"),
    [
        (0x3F808000, 0x3F81),  # to even would be 0x3f80
        (0xBF808000, 0xBF81),
        (0x3F818000, 0x3F82),
        (0x00008000, 0x0001),
        (0x80008000, 0x8001),
        (0x3F807FFF, 0x3F80),
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),
    ],
)
def test_ties_go_away_from_zero(kernels, bits, hi):
    fits, found, _ = split(kernels, [bits])
    assert fits
    assert found[0] == hi


@pytest.mark.parametrize(
    "bits", [0x7F7F8000, 0xFF7F8000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF]
)
def test_what_rounds_to_infinity_is_refused_whole(kernels, bits):
    values = np.full(200_000, 0x3F800000, np.uint32)
    values[150_001] = bits
    fits, hi, lo = split(kernels, values)
    assert not fits
    assert (hi == 0xABCD).all()
    assert (lo == 0x1234).all()


def test_largest_value_that_fits(kernels):
    fits, hi, _ = split(kernels, [LARGEST_SPLIT, LARGEST_SPLIT | 0x80000000])
    assert fits
    assert hi.tolist() == [0x7F7F, 0xFF7F]
