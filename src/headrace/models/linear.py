"""Linear layers that add their weight's gradient where it is summed.

Autograd would write each gradient out and add it afterwards: 12 bytes a parameter and micro-batch
that a matmul with its sum as third operand does not move (Megatron-LM calls this gradient
accumulation fusion). Invariant: the product is summed in the accumulator's float32, and a weight
that the layer's code also reads elsewhere still gets that part from autograd.

What the operator returns stands for the gradient of a scalar *handle*: it makes autograd, and the
compiler's dead-code pass, call it. Nothing reads the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUM, _HANDLE = "weight_gradient", "gradient_handle"

# The version is part of the name: a compiled graph may outlive the code that made it. The sum is
# not declared as mutated: no other operator of a graph reads it, and a declared mutation would be
# turned into a copy of the whole accumulator.
_LIBRARY = torch.library.Library("headrace", "FRAGMENT")
_LIBRARY.define("add_weight_gradient_v1(Tensor grad, Tensor input, Tensor sum) -> Tensor")


def add_outer_product(sum_OI: torch.Tensor, grad_NO: torch.Tensor, input_NI: torch.Tensor) -> None:
    """``sum_OI += grad_NO.T @ input_NI`` with products and sums in the sum's dtype."""
    if grad_NO.dtype == sum_OI.dtype:
        sum_OI.addmm_(grad_NO.T, input_NI)
    elif sum_OI.is_cuda:
        torch.addmm(sum_OI, grad_NO.T, input_NI, out_dtype=sum_OI.dtype, out=sum_OI)
    else:
        sum_OI.addmm_(grad_NO.T.to(sum_OI.dtype), input_NI.to(sum_OI.dtype))


def _add(grad_NO: torch.Tensor, input_NI: torch.Tensor, sum_OI: torch.Tensor) -> torch.Tensor:
    add_outer_product(sum_OI, grad_NO, input_NI)
    return sum_OI.new_empty(())


def _add_meta(grad_NO: torch.Tensor, input_NI: torch.Tensor, sum_OI: torch.Tensor) -> torch.Tensor:
    del grad_NO, input_NI
    return sum_OI.new_empty(())


_LIBRARY.impl("add_weight_gradient_v1", _add, "CPU")
_LIBRARY.impl("add_weight_gradient_v1", _add, "CUDA")
_LIBRARY.impl("add_weight_gradient_v1", _add_meta, "Meta")


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        input_XI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        sum_OI: torch.Tensor,
        handle: torch.Tensor,
    ) -> torch.Tensor:
        del sum_OI, handle
        return F.linear(input_XI, weight_OI, bias_O)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        input_XI, weight_OI, bias_O, ctx.sum_OI, _ = inputs
        ctx.save_for_backward(input_XI, weight_OI)
        ctx.has_bias = bias_O is not None

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, torch.Tensor | None, None, torch.Tensor]:
        input_XI, weight_OI = ctx.saved_tensors
        grad_NO = grads[0].flatten(0, -2)
        added = torch.ops.headrace.add_weight_gradient_v1(
            grad_NO, input_XI.flatten(0, -2), ctx.sum_OI
        )
        bias_grad_O = grad_NO.sum(dim=0) if ctx.has_bias else None
        return grads[0] @ weight_OI, None, bias_grad_O, None, added


class SummingLinear(nn.Linear):
    """``nn.Linear``, which sums its weight's gradient in place when a sum is bound to it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """As ``nn.Linear``."""
        # Bound for a call, never set otherwise.
        sum_OI = getattr(self, _SUM, None)
        if sum_OI is None:
            return super().forward(input)
        handle = getattr(self, _HANDLE)
        output = _SummedLinear.apply(input, self.weight, self.bias, sum_OI, handle)
        return cast("torch.Tensor", output)


def sum_in_place(layer: nn.Module) -> tuple[str, ...]:
    """Let a layer's linear modules sum their gradients; says whose, by parameter name.

    Modules of a subclass of ``nn.Linear`` stay as they are: what they compute is their own.
    """
    names = []
    for path, module in layer.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = SummingLinear
        if type(module) is SummingLinear:
            names.append(f"{path}.weight")
    return tuple(names)


def bindings(
    sums: Mapping[str, torch.Tensor], handles: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What to bind beside a layer's parameters so that ``sums`` (by parameter name) receive."""
    bound = {}
    for name, sum_OI in sums.items():
        path = name.removesuffix("weight")
        bound[path + _SUM], bound[path + _HANDLE] = sum_OI, handles[name]
    return bound
