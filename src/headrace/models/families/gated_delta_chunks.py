"""The gated delta rule over chunks: everything batched but what truly follows in order.

Within a chunk of C tokens the corrections solve one unit triangular system (arXiv:2406.06484),
which is inverted by merging blocks, log2(C) times for all chunks at once. From chunk to chunk the
state obeys ``S' = (t - M) S + B`` with a scalar t, a matrix M of keys and a matrix B of keys and
values. Such maps compose to one of the same kind, so chunks are joined in groups, groups in groups
of groups, and only their number's logarithm is left to walk in order. Documents need nothing more:
where one starts, t and M are exactly zero.

Products are taken in the dtype of what came in, states are summed in float32.

Shape legend: B rows, H heads, G chunks of a row, C tokens of a chunk, K key size, V value size,
R groups of a row, P chunks of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

GROUP = 8  # chunks of a group: walked in order, twice
PADDING = -1  # document number of what fills the last chunk
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
    state_BHGKV = states(
        through_BHG11, leaving_BHGKC @ reading_BHGCK, leaving_BHGKC @ fresh_BHGCV, dtype=dtype
    )
    corrected_BHGCV = fresh_BHGCV - reading_BHGCK @ state_BHGKV
    scores = (query_BHGCK.to(dtype) @ key_BHGCK.to(dtype).transpose(-1, -2)) * between
    read = (query_BHGCK * from_start).to(dtype) @ state_BHGKV
    return read + scores.to(dtype) @ corrected_BHGCV


def states(
    through_BHG11: torch.Tensor,
    removed_BHGKK: torch.Tensor,
    added_BHGKV: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The state before every chunk, ``(B, H, G, K, V)`` in ``dtype``.

    Args:
        through_BHG11: t, what of the state stays.
        removed_BHGKK: M.
        added_BHGKV: B.
        dtype: of the products; sums are float32.
    """
    B, H, _, K, V = added_BHGKV.shape
    start_BHKV = torch.zeros(B, H, K, V, dtype=torch.float32, device=added_BHGKV.device)
    return _walk(start_BHKV, through_BHG11, removed_BHGKK, added_BHGKV, dtype)


def _walk(
    start: torch.Tensor,
    through: torch.Tensor,
    removed: torch.Tensor,
    added: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same after a first state; chunks are the third axis from the end."""
    num_chunks = added.shape[-3]
    if num_chunks <= GROUP:
        state, found = start, []
        for chunk in range(num_chunks):
            found.append(state.to(dtype))
            if chunk < num_chunks - 1:
                change = added[..., chunk, :, :] - removed[..., chunk, :, :] @ found[-1]
                state = through[..., chunk, :, :] * state + change
        return torch.stack(found, dim=-3)
    padding = -num_chunks % GROUP
    t, m, b = (
        F.pad(part, (0, 0, 0, 0, 0, padding)).reshape(*part.shape[:-3], -1, GROUP, *part.shape[-2:])
        for part in (through, removed, added)
    )
    starts = _walk(start, *_joined(t, m, b, dtype), dtype)
    found_BHGKV = _walk(starts.float(), t, m, b, dtype).flatten(-4, -3)
    return found_BHGKV[..., :num_chunks, :, :]


def _joined(
    through: torch.Tensor, removed: torch.Tensor, added: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The chunks of every group as one: ``(t2 - M2)(t1 - M1) S + (t2 - M2) B1 + B2``."""
    K = removed.shape[-1]
    t, m, b = (part[..., 0, :, :].float() for part in (through, removed, added))
    for chunk in range(1, GROUP):
        t2, m2, b2 = (part[..., chunk, :, :] for part in (through, removed, added))
        both = m2.to(dtype) @ torch.cat([m, b], dim=-1).to(dtype)
        t, m, b = t2 * t, t2 * m + t * m2 - both[..., :K], t2 * b + b2 - both[..., K:]
    return t, m.to(dtype), b.to(dtype)


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
