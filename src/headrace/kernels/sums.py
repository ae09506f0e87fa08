"""Gradients added to, or put in place of, float32 sums on the device.

Invariant: a sum is the float32 sum of what it held and the gradient, whichever way it is taken.
torch's grouped operators move 60 to 80% of what the memory of a large GPU could, so on CUDA long
bfloat16 gradients (those of experts) take a kernel of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONG = 1 << 20  # elements: below, a launch costs more than it saves
_BLOCK = 1024


@torch.no_grad()
def overwrite(sums: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Put each gradient in place of its sum.

    Args:
        sums: float32, contiguous.
        gradients: one a sum, of its shape.
    """
    _each(sums, gradients, add=False)


@torch.no_grad()
def add(sums: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add each gradient to its sum; arguments as of :func:`overwrite`."""
    _each(sums, gradients, add=True)


def _each(sums: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, add: bool) -> None:
    rest: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for total, gradient in zip(sums, gradients, strict=True):
        long = gradient.is_cuda and gradient.numel() >= _LONG and gradient.is_contiguous()
        if long and gradient.dtype == torch.bfloat16:
            _launch(total, gradient, add=add)
        else:
            rest[0].append(total)
            rest[1].append(gradient)
    if rest[0]:
        (torch._foreach_add_ if add else torch._foreach_copy_)(*rest)


def _launch(total: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
    from headrace.kernels.triton_sums import sum_kernel  # noqa: PLC0415  CUDA only

    count = total.numel()
    sum_kernel[(-(-count // _BLOCK),)](total, gradient, count, ADD=add, BLOCK=_BLOCK)
