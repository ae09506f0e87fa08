"""Linear layers and embeddings that add their weight's gradient where it is summed.

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
    from collections.abc import Iterable, Mapping

_SUM, _HANDLE = "weight_gradient", "gradient_handle"

# The version is part of the name: a compiled graph may outlive the code that made it. The sum is
# not declared as mutated: no other operator of a graph reads it, and a declared mutation would be
# turned into a copy of the whole accumulator.
_LIBRARY: Any = torch.library.Library("headrace", "FRAGMENT")  # type: ignore[no-untyped-call]
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
        apply: Any = _SummedLinear.apply
        return cast("torch.Tensor", apply(input, self.weight, self.bias, sum_OI, handle))


class _SummedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ids: torch.Tensor,
        weight_VD: torch.Tensor,
        padding_id: int | None,
        sum_VD: torch.Tensor,
        handle: torch.Tensor,
    ) -> torch.Tensor:
        del padding_id, sum_VD, handle
        return F.embedding(ids, weight_VD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        ids, _, ctx.padding_id, ctx.sum_VD, _ = inputs
        ctx.save_for_backward(ids)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None, torch.Tensor]:
        ids_N = ctx.saved_tensors[0].flatten()
        grad_ND = grads[0].flatten(0, -2).to(ctx.sum_VD.dtype)
        if ctx.padding_id is not None:
            grad_ND = grad_ND.masked_fill((ids_N == ctx.padding_id)[:, None], 0.0)
        if ctx.sum_VD.is_cuda:  # sorts: the order of addition is fixed, unlike index_add_'s there
            ctx.sum_VD.index_put_((ids_N,), grad_ND, accumulate=True)
        else:
            ctx.sum_VD.index_add_(0, ids_N, grad_ND)
        return None, None, None, None, ctx.sum_VD.new_empty(())


class SummingEmbedding(nn.Embedding):
    """``nn.Embedding``, which adds gradients to the rows that were looked up, when bound to."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """As ``nn.Embedding``."""
        sum_VD = getattr(self, _SUM, None)
        if sum_VD is None:
            return super().forward(input)
        handle = getattr(self, _HANDLE)
        apply: Any = _SummedEmbedding.apply
        return cast("torch.Tensor", apply(input, self.weight, self.padding_idx, sum_VD, handle))


def sum_in_place(module: nn.Module) -> tuple[str, ...]:
    """Let linear layers and embeddings sum their gradients; says whose, by parameter name.

    Modules of a subclass stay as they are: what they compute is their own.
    """
    names = []
    for path, part in module.named_modules():
        if type(part) is nn.Linear:
            part.__class__ = SummingLinear
        elif type(part) is nn.Embedding and _is_plain(part):
            part.__class__ = SummingEmbedding
        if type(part) in (SummingLinear, SummingEmbedding):
            names.append(f"{path}.weight")
    return tuple(names)


def _is_plain(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def handles_for(names: Iterable[str], device: torch.device | None) -> dict[str, torch.Tensor]:
    """What to take gradients of so that those of ``names`` are summed (its own is not read)."""
    return {name: torch.zeros((), device=device, requires_grad=True) for name in names}


def bindings(
    sums: Mapping[str, torch.Tensor], handles: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What to bind beside a module's parameters so that ``sums`` (by parameter name) receive."""
    bound = {}
    for name, sum_OI in sums.items():
        path = name.removesuffix("weight")
        bound[path + _SUM], bound[path + _HANDLE] = sum_OI, handles[name]
    return bound
