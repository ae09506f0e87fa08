"""Linear layer and cross-entropy in one pass over chunks of tokens: logits never exist for more.

The gradient of the head's matrix is accumulated in float32, that of the hidden state is returned
in its own dtype, and both are computed in the forward pass, while the chunk's logits exist.

Shape legend: N tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.batch import IGNORE_INDEX
from headrace.models.summing import add_outer_product

if TYPE_CHECKING:
    from headrace.models.head import LogitRule

ChunkLoss: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor | None]
]


@torch.no_grad()
def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    scale: float,
    chunk_tokens: int,
    weight_grad_VD: torch.Tensor | None,
    bias_grad_V: torch.Tensor | None = None,
    with_hidden_grad: bool = True,
    chunk_loss: ChunkLoss | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Summed cross-entropy and the gradients of ``scale`` times it.

    Args:
        hidden_ND: input of the head.
        weight_VD: the head's matrix, same dtype.
        targets_N: int64, ``-100`` where nothing is supervised.
        bias_V: the head's bias.
        scale: what the gradients are multiplied by: 1 / supervised tokens of the global batch.
        chunk_tokens: tokens whose logits exist at a time.
        weight_grad_VD: float32, the gradient of the matrix is added to it; None to skip.
        bias_grad_V: float32, the gradient of the bias is added to it; None to skip.
        with_hidden_grad: also return the gradient of ``hidden_ND``.
        chunk_loss: what :func:`chunk_loss_with` returns, or a compiled version of it.

    Returns:
        The summed loss (float64 scalar, not scaled) and the hidden gradient or None.
    """
    chunk_loss = chunk_loss or cross_entropy_chunk
    with_grad = with_hidden_grad or weight_grad_VD is not None or bias_grad_V is not None
    loss_sum = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)
    hidden_grad_ND = torch.empty_like(hidden_ND) if with_hidden_grad else None
    factor = torch.full((), scale if with_grad else 0.0, device=hidden_ND.device)
    for start in range(0, hidden_ND.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        hidden_CD = hidden_ND[rows]
        logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
        loss, grad_CV = chunk_loss(logits_CV, targets_N[rows], factor, with_grad)
        loss_sum += loss
        if grad_CV is None:
            continue
        if hidden_grad_ND is not None:
            torch.mm(grad_CV, weight_VD, out=hidden_grad_ND[rows])
        if bias_grad_V is not None:
            bias_grad_V += grad_CV.sum(dim=0, dtype=bias_grad_V.dtype)
        if weight_grad_VD is not None:
            add_outer_product(weight_grad_VD, grad_CV, hidden_CD)
    return loss_sum, hidden_grad_ND


def chunk_loss_with(rule: LogitRule) -> ChunkLoss:
    """The loss of a chunk's logits under what the model does to its logits."""
    if rule.other is not None:
        return functools.partial(_own_rule_chunk, rule.other)
    if rule.is_identity:
        return cross_entropy_chunk
    return functools.partial(_rule_chunk, rule)


def cross_entropy_chunk(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    factor: torch.Tensor,
    with_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Summed loss (float64), and the gradient of ``factor`` times it in the logits' dtype."""
    dtype = logits_CV.dtype
    loss, grad_CV = _cross_entropy(logits_CV.float(), targets_C, factor, with_grad)
    return loss, None if grad_CV is None else grad_CV.to(dtype)


def _rule_chunk(
    rule: LogitRule,
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    factor: torch.Tensor,
    with_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same for logits that are scaled and capped, with the derivative by hand."""
    dtype = logits_CV.dtype
    final_CV = rule(logits_CV.float())
    slope_CV: torch.Tensor | float = rule.multiplier / rule.divisor
    if with_grad and rule.softcap is not None:
        # d (cap * tanh(x / cap)) / dx = 1 - tanh(x / cap) ** 2
        slope_CV = slope_CV * (1.0 - (final_CV / rule.softcap) ** 2)
    loss, grad_CV = _cross_entropy(final_CV, targets_C, factor, with_grad)
    return loss, None if grad_CV is None else (grad_CV * slope_CV).to(dtype)


def _own_rule_chunk(
    rule: Callable[[torch.Tensor], torch.Tensor],
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    factor: torch.Tensor,
    with_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same for a rule in the model's own code, by autograd."""
    if not with_grad:
        return _cross_entropy(rule(logits_CV).float(), targets_C, factor, with_grad)
    leaf_CV = logits_CV.detach().requires_grad_(True)
    with torch.enable_grad():
        final_CV = rule(leaf_CV)
    loss, grad_CV = _cross_entropy(
        final_CV.detach().to(torch.float32, copy=True), targets_C, factor, with_grad
    )
    assert grad_CV is not None
    (through_CV,) = torch.autograd.grad(final_CV, [leaf_CV], grad_CV.to(final_CV.dtype))
    return loss, through_CV


def _cross_entropy(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    factor: torch.Tensor,
    with_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """On float32 logits, which are used up."""
    supervised_C = targets_C != IGNORE_INDEX
    safe_C = targets_C.clamp_min(0)
    lse_C = torch.logsumexp(logits_CV, dim=1)
    picked_C = logits_CV.gather(1, safe_C[:, None])[:, 0]
    # where, not a product: an unsupervised row may hold an infinity, and 0 * inf is NaN.
    loss = torch.where(supervised_C, lse_C - picked_C, 0.0).sum(dtype=torch.float64)
    if not with_grad:
        return loss, None
    # d loss / d logits = softmax - one-hot
    if torch.compiler.is_compiling():  # fuses into one pass where a scatter would not
        columns_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
        one_hot_CV = (columns_V[None, :] == safe_C[:, None]).to(logits_CV.dtype)
        grad_CV = (torch.exp(logits_CV - lse_C[:, None]) - one_hot_CV) * factor
        grad_CV = torch.where(supervised_C[:, None], grad_CV, 0.0)
    else:
        grad_CV = logits_CV.sub_(lse_C[:, None]).exp_()
        grad_CV.scatter_add_(1, safe_C[:, None], torch.full_like(picked_C, -1.0)[:, None])
        grad_CV.mul_(factor)
        if not bool(supervised_C.all()):
            grad_CV[~supervised_C] = 0.0
    return loss, grad_CV
