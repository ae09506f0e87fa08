"""Experts as grouped matrix products, registered with transformers as ``"headrace"``.

Tokens are sorted by expert, so that each expert multiplies one stretch of rows. An expert without
tokens has zero gradients. Every sum over a token's experts is taken in a fixed order.

Shape legend: N tokens, K experts a token, S = N * K assignments, X experts, D hidden size, I and O
input and output size of a product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from headrace.models.expert_adapters import LowRank

IMPLEMENTATION = "headrace"
TILE = 16  # rows


def register() -> None:
    """Make ``experts_implementation="headrace"`` known to transformers; repeated calls are free."""
    from transformers.integrations.moe import ExpertsInterface  # noqa: PLC0415 - slow

    ExpertsInterface.register(IMPLEMENTATION, run_experts)


def runs_as_ours(module: nn.Module) -> bool:
    """Transformers gives it to :func:`run_experts`."""
    names = ("num_experts", "is_transposed", "has_gate", "has_bias")
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen == IMPLEMENTATION and all(hasattr(module, name) for name in names)


def run_experts(
    module: nn.Module,
    hidden_ND: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    added: Mapping[str, LowRank] | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, with transformers' signature.

    Args:
        module: holds ``gate_up_proj`` (or ``up_proj``) and ``down_proj`` of all experts.
        hidden_ND: input.
        top_k_index: ``(N, K)``, the experts of a token.
        top_k_weights: ``(N, K)``, how each counts.
        added: adapters by the name of their parameter.

    Returns:
        ``(N, D)``.
    """
    settings: Any = module
    order_S, inverse_NK, expert_S, ends_X = sort_assignments(top_k_index, settings.num_experts)
    spread: Any = _Spread.apply  # untyped in torch
    collect: Any = _Collect.apply
    pick: Any = _Pick.apply
    rows_SD: torch.Tensor = spread(hidden_ND, order_S, inverse_NK)
    weight_S: torch.Tensor = pick(top_k_weights, order_S, inverse_NK)
    rows_SD = run_rows(
        module,
        lambda name: getattr(settings, name),
        rows_SD,
        weight_S,
        expert_S=expert_S,
        ends_X=ends_X,
        added=added,
    )
    out_ND: torch.Tensor = collect(rows_SD, order_S, inverse_NK)
    return out_ND.to(hidden_ND.dtype)


def sort_assignments(
    top_k_index: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assignments in order of their experts.

    Args:
        top_k_index: ``(N, K)``, the experts of a token.
        num_experts: X.

    Returns:
        Which assignment comes at each place ``(S,)``, the place of each one ``(N, K)``, the expert
        at each place ``(S,)`` in a small integer type, and where each expert's stretch ends, int32
        ``(X,)``.
    """
    expert_S, order_S, ends_X = by_expert(top_k_index.reshape(-1), num_experts)
    return order_S, _inverse(order_S).view(top_k_index.shape), expert_S, ends_X


def run_rows(
    module: nn.Module,
    weight_of: Callable[[str], torch.Tensor],
    rows_SD: torch.Tensor,
    weight_S: torch.Tensor,
    *,
    expert_S: torch.Tensor,
    ends_X: torch.Tensor,
    added: Mapping[str, LowRank] | None = None,
) -> torch.Tensor:
    """What experts make of rows in their order, weighted.

    Args:
        module: says how they compute.
        weight_of: their parameters by name, of as many experts as ``ends_X`` has.
        rows_SD: input, a row an assignment.
        weight_S: how each counts.
        expert_S: whose each is, counted among those of ``weight_of``.
        ends_X: int32, where each expert's rows end.
        added: adapters by the name of their parameter.

    Returns:
        ``(S, D)``.
    """
    settings: Any = module
    weight_S1 = weight_S[:, None]

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = weight_of(name)
        if not settings.is_transposed:
            weight = weight.transpose(1, 2)
        out = grouped_matmul(rows, weight, ends_X)
        if added is not None and name in added:
            out = out + added[name].of_rows(rows, ends_X)
        if settings.has_bias:
            out = add_bias(out, weight_of(f"{name}_bias"), expert_S)
        return out

    if settings.has_gate:
        rows_SD = settings._apply_gate(product(rows_SD, "gate_up_proj"))  # noqa: SLF001 - the interface's name
    else:
        rows_SD = settings.act_fn(product(rows_SD, "up_proj"))
    # Before the last matrix rows are short, and backward does not need its results. What is not
    # linear in them must come before the weights.
    norm = getattr(settings, "has_post_expert_norm", False)
    early = not (settings.has_bias or norm)
    if early:
        rows_SD = (rows_SD * weight_S1).to(rows_SD.dtype)
    rows_SD = product(rows_SD, "down_proj")
    if norm:
        rows_SD = settings.post_expert_norm(rows_SD)
    if not early:
        rows_SD = (rows_SD * weight_S1).to(rows_SD.dtype)
    return rows_SD


def by_expert(
    index_S: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assignments in the order of experts, and of tokens within an expert.

    Args:
        index_S: each assignment's expert.
        num_experts: X.

    Returns:
        The experts in this order, in a small integer type; int64, which assignment comes where;
        int32 ``(X,)``, where each expert's stretch ends.
    """
    # Radix sort takes a pass a byte of the key, and int64 has eight.
    small = torch.uint8 if num_experts <= 256 else torch.int32
    expert_S, order_S = torch.sort(index_S.to(small), stable=True)
    experts_X = torch.arange(num_experts, dtype=small, device=index_S.device)
    ends_X = torch.searchsorted(expert_S, experts_X, right=True, out_int32=True)
    return expert_S, order_S, ends_X


def _inverse(order_S: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes one, int32: a write each, where sorting it takes eight passes."""
    places_S = torch.arange(order_S.shape[0], dtype=torch.int32, device=order_S.device)
    return torch.empty_like(places_S).scatter(0, order_S, places_S)


def add_bias(rows_SO: torch.Tensor, bias_XO: torch.Tensor, expert_S: torch.Tensor) -> torch.Tensor:
    """Rows and the bias of each one's expert."""
    out: torch.Tensor = _AddBias.apply(rows_SO, bias_XO, expert_S)  # type: ignore[no-untyped-call]
    return out


class _AddBias(torch.autograd.Function):
    """A bias's gradient is a product: scattered, thousands of rows would be summed in bfloat16."""

    @staticmethod
    def forward(
        ctx: Any, rows_SO: torch.Tensor, bias_XO: torch.Tensor, expert_S: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(expert_S)
        ctx.num_experts = bias_XO.shape[0]
        return rows_SO + bias_XO[expert_S.int()]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        if not ctx.needs_input_grad[1]:  # a frozen bias
            return grads[0], None, None
        (expert_S,) = ctx.saved_tensors
        experts_X = torch.arange(ctx.num_experts, device=expert_S.device)
        belongs_SX = (expert_S[:, None] == experts_X).to(grads[0].dtype)
        return grads[0], belongs_SX.T @ grads[0], None


class _Spread(torch.autograd.Function):
    """Each token once for each of its experts, in the experts' order."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, order_S: torch.Tensor, inverse_NK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_NK)
        return hidden_ND[order_S // inverse_NK.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse_NK,) = ctx.saved_tensors
        return sum_of_experts(grads[0], inverse_NK).to(grads[0].dtype), None, None


class _Pick(torch.autograd.Function):
    """Each assignment's weight, in the experts' order; its gradient is gathered."""

    @staticmethod
    def forward(
        ctx: Any, weights_NK: torch.Tensor, order_S: torch.Tensor, inverse_NK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_NK)
        return weights_NK.reshape(-1)[order_S]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse_NK,) = ctx.saved_tensors
        return grads[0][inverse_NK], None, None


class _Collect(torch.autograd.Function):
    """The sum of each token's rows; its gradient is gathered."""

    @staticmethod
    def forward(
        ctx: Any, rows_SD: torch.Tensor, order_S: torch.Tensor, inverse_NK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(order_S)
        ctx.top_k = inverse_NK.shape[1]
        return _cast(sum_of_experts(rows_SD, inverse_NK), rows_SD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order_S,) = ctx.saved_tensors
        return grads[0][order_S // ctx.top_k], None, None


def sum_of_experts(rows_SD: torch.Tensor, inverse_NK: torch.Tensor) -> torch.Tensor:
    """``(N, D)`` in float32 at least: a term an expert, one pass over memory compiled.

    As a reduction over K it would be a kernel of its own at a fifth of the memory's rate.
    """
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    total_ND = _cast(rows_SD[inverse_NK[:, 0]], dtype)
    for expert in range(1, inverse_NK.shape[1]):
        total_ND = total_ND + _cast(rows_SD[inverse_NK[:, expert]], dtype)
    return total_ND


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype``, by no operator where it is already.

    Compiled by torch 2.11, a ``Function`` has no gradient if its forward ends with an operator that
    returns its own argument.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def grouped_matmul(
    rows_SI: torch.Tensor, weight_XIO: torch.Tensor, ends_X: torch.Tensor
) -> torch.Tensor:
    """Rows ``[ends[x - 1], ends[x])`` times the matrix of expert ``x``.

    bfloat16 on CUDA takes torch's grouped kernel, everything else one product an expert.

    Returns:
        ``(S, O)``.
    """
    aligned = all(size % 8 == 0 for size in weight_XIO.shape[1:])  # strides of 16 bytes
    if rows_SI.is_cuda and rows_SI.dtype == torch.bfloat16 and aligned:
        return F.grouped_mm(rows_SI, weight_XIO.to(rows_SI.dtype), offs=ends_X)
    out: torch.Tensor = torch.ops.headrace.grouped_matmul_v1(rows_SI, weight_XIO, ends_X)
    return out


# The version is part of the name: a compiled graph may outlive the code that made it.
@torch.library.custom_op("headrace::grouped_matmul_v1", mutates_args=())
def _grouped_matmul(
    rows_SI: torch.Tensor, weight_XIO: torch.Tensor, ends_X: torch.Tensor
) -> torch.Tensor:
    out_SO = rows_SI.new_empty(rows_SI.shape[0], weight_XIO.shape[2])
    for expert, (start, stop) in _stretches(ends_X):
        out_SO[start:stop] = _product(rows_SI[start:stop], weight_XIO[expert])
    return out_SO


def _product(rows_NI: torch.Tensor, matrix_IO: torch.Tensor) -> torch.Tensor:
    """``rows @ matrix``, where not even a row's rounding depends on the others of its expert.

    Libraries multiply rows in tiles, and what is left over in another order of sums.
    """
    num = rows_NI.shape[0]
    return (F.pad(rows_NI, (0, 0, 0, -num % TILE)) @ matrix_IO)[:num]


@torch.library.custom_op("headrace::grouped_matmul_backward_v1", mutates_args=())
def _grouped_matmul_backward(
    grad_SO: torch.Tensor, rows_SI: torch.Tensor, weight_XIO: torch.Tensor, ends_X: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_SI = torch.empty_like(rows_SI)
    grad_XIO = torch.zeros_like(weight_XIO)
    for expert, (start, stop) in _stretches(ends_X):
        grad_SI[start:stop] = _product(grad_SO[start:stop], weight_XIO[expert].T)
        grad_XIO[expert] = rows_SI[start:stop].T @ grad_SO[start:stop]
    return grad_SI, grad_XIO


def _stretches(ends_X: torch.Tensor) -> list[tuple[int, tuple[int, int]]]:
    start, found = 0, []
    for expert, stop in enumerate(ends_X.tolist()):
        if stop > start:
            found.append((expert, (start, stop)))
        start = stop
    return found


@_grouped_matmul.register_fake
def _(rows_SI: torch.Tensor, weight_XIO: torch.Tensor, _ends: torch.Tensor) -> torch.Tensor:
    return rows_SI.new_empty(rows_SI.shape[0], weight_XIO.shape[2])


@_grouped_matmul_backward.register_fake
def _(
    _grad: torch.Tensor, rows_SI: torch.Tensor, weight_XIO: torch.Tensor, _ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows_SI), torch.empty_like(weight_XIO)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward(
    ctx: Any, grad_SO: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    rows_SI, weight_XIO, ends_X = ctx.saved_tensors
    grad_SO = grad_SO.contiguous()
    if not ctx.needs_input_grad[1]:  # frozen experts: the same product, and no matrix of theirs
        back_XOI = weight_XIO.transpose(1, 2)
        return torch.ops.headrace.grouped_matmul_v1(grad_SO, back_XOI, ends_X), None, None
    grads = torch.ops.headrace.grouped_matmul_backward_v1(grad_SO, rows_SI, weight_XIO, ends_X)
    return (*grads, None)


_grouped_matmul.register_autograd(_backward, setup_context=_save)
