"""Gradients onto their float32 sums on a CUDA device: bitwise what torch's operators give."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = 1 << 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 1000, LONG - 1, LONG, LONG + 1, 3 * LONG + 777])
def test_sums_are_those_of_plain_torch(numel, dtype):
    generator = torch.Generator("cuda").manual_seed(numel)
    flat = torch.randn(numel + 2, device="cuda", generator=generator)  # with neighbours
    gradient = torch.randn(numel, device="cuda", generator=generator).to(dtype)
    wanted = flat.clone()
    sums.add([flat[1:-1]], [gradient])
    wanted[1:-1] += gradient
    assert torch.equal(flat, wanted)
    sums.overwrite([flat[1:-1]], [gradient])
    wanted[1:-1] = gradient.float()
    assert torch.equal(flat, wanted)


def test_a_transposed_gradient_is_added_where_it_belongs():
    gradient = torch.randn(1 << 10, 1 << 11, device="cuda").bfloat16().T
    total = torch.zeros(1 << 11, 1 << 10, device="cuda")
    sums.add([total], [gradient])
    assert torch.equal(total, gradient.float())
