"""The gated delta rule over chunks: everything batched but the state, which alone goes in order.

Within a chunk of C tokens the corrections solve one unit triangular system (arXiv:2406.06484),
which is inverted by merging blocks, log2(C) times for all chunks at once. From chunk to chunk the
state obeys ``S' = (t - M) S + B`` with a scalar t, a matrix M of keys and a matrix B of keys and
values: one small product a chunk, inside one operator, so that a compiled layer does not grow with
its rows. Documents need nothing more: where one starts, t and M are exactly zero.

Products are taken in the dtype of what came in, states are summed in float32.

Shape legend: B rows, H heads, G chunks of a row, C tokens of a chunk, K key size, V value size,
N = B * H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

PADDING = -1  # document number of what fills the last chunk
_SUMS = torch.float32  # at least
_POINTWISE = 4  # smaller blocks are multiplied element by element, which fuses


def chunk_rule(
    query_BHGCK: torch.Tensor,
    key_BHGCK: torch.Tensor,
    value_BHGCV: torch.Tensor,
    *,
    beta_BHGC1: torch.Tensor,
    g_BHGC1: torch.Tensor,
    document_BGC: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Outputs of the rule for scaled queries.

    Args:
        query_BHGCK: float32.
        key_BHGCK: float32.
        value_BHGCV: float32.
        beta_BHGC1: write strengths.
        g_BHGC1: logarithms of decays.
        document_BGC: which document a token belongs to; :data:`PADDING` for none.
        dtype: of the products.

    Returns:
        ``(B, H, G, C, V)`` in ``dtype``.
    """
    C = key_BHGCK.shape[3]
    index_C = torch.arange(C, device=key_BHGCK.device)
    same_BGCC = document_BGC[..., :, None] == document_BGC[..., None, :]
    coupled = (same_BGCC & (index_C[:, None] >= index_C))[:, None]
    # Sums over a token's own document alone: not even rounding may depend on its neighbours.
    decay_BHGC = torch.where(coupled, g_BHGC1.transpose(-1, -2), 0.0).sum(dim=-1)
    # Decay from a token to a later one of its document, 0 elsewhere.
    apart = decay_BHGC[..., :, None] - decay_BHGC[..., None, :]
    between = apart.masked_fill(~coupled, float("-inf")).exp()

    last_BG = document_BGC[..., -1]
    before_BG = F.pad(last_BG[:, :-1], (1, 0), value=PADDING)
    carries = (document_BGC == before_BG[..., None])[:, None]  # reads the carried state
    stays = (last_BG == before_BG)[:, None]  # and it is still there at the end
    lasts = (document_BGC == last_BG[..., None])[:, None]  # writes to the state that goes on

    from_start = (decay_BHGC.exp() * carries)[..., None]
    to_end = (decay_BHGC[..., -1:] - decay_BHGC).masked_fill(~lasts, float("-inf")).exp()[..., None]
    through_BHG11 = (decay_BHGC[..., -1].exp() * stays)[..., None, None]
    written_BHGCK = key_BHGCK * beta_BHGC1
    # In float32 whatever the products' dtype: the inverse amplifies what is rounded here.
    system = (written_BHGCK @ key_BHGCK.transpose(-1, -2)) * between.tril(-1)
    inverse_BHGCC = unit_lower_inverse(system).to(dtype)
    fresh_BHGCV = inverse_BHGCC @ (value_BHGCV * beta_BHGC1).to(dtype)
    reading_BHGCK = inverse_BHGCC @ (written_BHGCK * from_start).to(dtype)
    leaving_BHGKC = (key_BHGCK * to_end).to(dtype).transpose(-1, -2)
    state_BHGKV: torch.Tensor = torch.ops.headrace.chunk_states_v1(
        through_BHG11, leaving_BHGKC @ reading_BHGCK, leaving_BHGKC @ fresh_BHGCV
    )
    corrected_BHGCV = fresh_BHGCV - reading_BHGCK @ state_BHGKV
    scores = (query_BHGCK.to(dtype) @ key_BHGCK.to(dtype).transpose(-1, -2)) * between
    read = (query_BHGCK * from_start).to(dtype) @ state_BHGKV
    return read + scores.to(dtype) @ corrected_BHGCV


# The version is part of the name: a compiled graph may outlive the code that made it.
@torch.library.custom_op("headrace::chunk_states_v1", mutates_args=())
def chunk_states(
    through_BHG11: torch.Tensor, removed_BHGKK: torch.Tensor, added_BHGKV: torch.Tensor
) -> torch.Tensor:
    """The state before every chunk, ``(B, H, G, K, V)`` in the dtype of ``added``.

    Args:
        through_BHG11: t, what of the state stays.
        removed_BHGKK: M.
        added_BHGKV: B.
    """
    through, removed, added = (_by_head(t) for t in (through_BHG11, removed_BHGKK, added_BHGKV))
    states_NGKV = torch.empty_like(added)
    state_NKV = _sums_like(added)
    for chunk in range(added.shape[1]):
        states_NGKV[:, chunk] = state_NKV
        change_NKV = torch.bmm(removed[:, chunk], states_NGKV[:, chunk])
        state_NKV.mul_(through[:, chunk]).add_(added[:, chunk]).sub_(change_NKV)
    return states_NGKV.view(added_BHGKV.shape)


@torch.library.custom_op("headrace::chunk_states_backward_v1", mutates_args=())
def _states_backward(
    grad_BHGKV: torch.Tensor,
    through_BHG11: torch.Tensor,
    removed_BHGKK: torch.Tensor,
    states_BHGKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, through, removed, states = (
        _by_head(t) for t in (grad_BHGKV, through_BHG11, removed_BHGKK, states_BHGKV)
    )
    after_NGKV = torch.empty_like(grad)  # the gradient of the state after each chunk
    after_NKV = _sums_like(grad)
    for chunk in reversed(range(grad.shape[1])):
        after_NGKV[:, chunk] = after_NKV
        change_NKV = torch.bmm(removed[:, chunk].transpose(1, 2), after_NGKV[:, chunk])
        after_NKV.mul_(through[:, chunk]).add_(grad[:, chunk]).sub_(change_NKV)
    products = after_NGKV.to(after_NKV.dtype) * states
    return (
        products.sum(dim=(-1, -2)).to(through.dtype).view(through_BHG11.shape),
        -(after_NGKV @ states.transpose(-1, -2)).view(removed_BHGKK.shape),
        after_NGKV.view(grad_BHGKV.shape),
    )


def _by_head(tensor_BHG: torch.Tensor) -> torch.Tensor:
    return tensor_BHG.contiguous().flatten(0, 1)


def _sums_like(tensor_NGKV: torch.Tensor) -> torch.Tensor:
    N, _, K, V = tensor_NGKV.shape
    return tensor_NGKV.new_zeros(N, K, V, dtype=torch.promote_types(tensor_NGKV.dtype, _SUMS))


@chunk_states.register_fake
def _(_through: torch.Tensor, _removed: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    return added.new_empty(added.shape)


@_states_backward.register_fake
def _(
    grad: torch.Tensor, through: torch.Tensor, removed: torch.Tensor, _states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        through.new_empty(through.shape),
        removed.new_empty(removed.shape),
        grad.new_empty(grad.shape),
    )


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    through, removed, _ = inputs
    ctx.save_for_backward(through, removed, output)


def _gradients(ctx: Any, grad: torch.Tensor) -> Any:
    return torch.ops.headrace.chunk_states_backward_v1(grad.contiguous(), *ctx.saved_tensors)


chunk_states.register_autograd(_gradients, setup_context=_save)


def unit_lower_inverse(lower_NCC: torch.Tensor) -> torch.Tensor:
    """The inverse of ``1 + lower`` for strictly lower triangular matrices, C a power of two."""
    inverse: torch.Tensor = _UnitLowerInverse.apply(lower_NCC)  # type: ignore[no-untyped-call]
    return inverse


class _UnitLowerInverse(torch.autograd.Function):
    """By merging blocks: as stable as substitution, where powers of the matrix would cancel."""

    @staticmethod
    def forward(ctx: Any, lower_NCC: torch.Tensor) -> torch.Tensor:
        C = lower_NCC.shape[-1]
        lower_NCC = lower_NCC.contiguous()
        inverse = lower_NCC.new_ones(lower_NCC.numel() // C**2, C, 1, 1)
        size = 1
        while size < C:
            num = C // (2 * size)
            pairs = lower_NCC.view(-1, num, 2, size, num, 2, size)
            block = torch.arange(num, device=lower_NCC.device)
            corner = pairs[:, block, 1, :, block, 0, :].transpose(0, 1)
            first, second = inverse[:, 0::2], inverse[:, 1::2]
            below = -_small_product(second, _small_product(corner, first))
            top = torch.cat([first, torch.zeros_like(first)], dim=-1)
            inverse = torch.cat([top, torch.cat([below, second], dim=-1)], dim=-2)
            size *= 2
        result = inverse.view(lower_NCC.shape)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (inverse_NCC,) = ctx.saved_tensors
        transposed = inverse_NCC.transpose(-1, -2)
        gradient: torch.Tensor = -(transposed @ grads[0] @ transposed).tril(-1)
        return gradient


def _small_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[-1] > _POINTWISE:
        return a @ b
    return (a[..., :, :, None] * b[..., None, :, :]).sum(dim=-2)
