"""What stands for a hidden state that nobody reads: that of a recompute, taken for its gradients.

Invariant: it depends on the hidden state's shape alone. What a compiled layer computes for the
hidden state only is therefore dead code, and the compiler leaves out exactly what no gradient
needs: the last matrix of a layer that ends in a sum, none that a norm follows. An eager layer
computes it all the same. :mod:`headrace.models.left_out` says which matrices those are.
"""

from __future__ import annotations

from typing import Any, cast

import torch


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(hidden_BTD: torch.Tensor) -> torch.Tensor:
        # Not empty_like: before it is lowered that reads the tensor. Contiguous, as its gradient.
        return torch.empty(hidden_BTD.shape, dtype=hidden_BTD.dtype, device=hidden_BTD.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        return grads[0]


def unread(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """A tensor of any values in place of ``hidden_BTD``, whose gradient is that of it."""
    apply: Any = _Unread.apply  # untyped in torch
    return cast("torch.Tensor", apply(hidden_BTD))
