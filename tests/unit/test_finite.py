"""One value that is not finite is found wherever it is."""

from __future__ import annotations

import pytest
import torch

from headrace.store.finite import all_finite

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_any_place_of_any_length(dtype, bad):
    generator = torch.Generator().manual_seed(0)
    for length in (1, 7, 16, 33, 100, 4099):
        values = torch.randn(length, generator=generator, dtype=torch.float32).to(dtype)
        assert all_finite(values)
        for place in {*range(min(length, 70)), length // 2, length - 1}:
            damaged = values.clone()
            damaged[place] = bad
            assert not all_finite(damaged), (length, place)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_finite(dtype):
    largest = torch.finfo(dtype).max
    assert all_finite(torch.tensor([largest, -largest, 0.0, -0.0], dtype=dtype))
    assert all_finite(torch.zeros(0, 3, dtype=dtype))


def test_every_part_of_a_tensor_that_threads_share():
    values = torch.zeros(1 << 20, dtype=torch.bfloat16).view(1024, 1024).T
    assert all_finite(values)
    for place in (0, 32_767, 32_768, 500_000, (1 << 20) - 1):
        damaged = values.clone()
        damaged[place // 1024, place % 1024] = float("nan") if place % 2 else float("inf")
        assert not all_finite(damaged)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int8, torch.bool]
)
def test_types_that_a_checkpoint_may_hold_beside_weights(dtype):
    values = torch.ones(5).to(dtype)
    assert all_finite(values)
    if dtype.is_complex or dtype.is_floating_point:
        values.view(-1)[3:4].copy_(torch.tensor([float("nan")]))
        assert not all_finite(values)
