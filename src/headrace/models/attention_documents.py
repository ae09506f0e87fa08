"""Attention document by document, in plain torch: what the CPU runs and other paths are checked by.

No mask is larger than the longest document that needs one. Boundaries are read on the host, so
this path is for the CPU.

Shape legend: B rows, H query heads, K key/value heads, T positions, E head size of queries and
keys, V head size of values, N tokens = B * T, L positions of one document.
"""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere


def attend_by_document(
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTV: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention inside documents; see :func:`headrace.models.attention.attention`.

    Returns:
        ``(B, H, T, V)``.
    """
    B, H, T, _ = query_BHTE.shape
    bounds = [row * T for row in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    repeat = H // key_BKTE.shape[1]
    query_HNE = _joined(query_BHTE)
    key_HNE = _joined(key_BKTE.repeat_interleave(repeat, dim=1))
    value_HNV = _joined(value_BKTV.repeat_interleave(repeat, dim=1))
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        piece = (query_HNE[:, start:stop], key_HNE[:, start:stop], value_HNV[:, start:stop])
        if softcap is None and sinks_H is None:
            pieces.append(_fused(*piece, scaling=scaling, window=window))
        else:
            pieces.append(
                _explicit(*piece, scaling=scaling, window=window, softcap=softcap, sinks_H=sinks_H)
            )
    out_HNV = torch.cat(pieces, dim=1)
    return out_HNV.reshape(H, B, T, -1).transpose(0, 1)


def _joined(tensor_BHTE: torch.Tensor) -> torch.Tensor:
    """``(H, N, E)``: rows joined along the tokens, the order in which boundaries count them."""
    B, H, T, E = tensor_BHTE.shape
    return tensor_BHTE.transpose(0, 1).reshape(H, B * T, E)


def _fused(
    query_HLE: torch.Tensor,
    key_HLE: torch.Tensor,
    value_HLV: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    length = query_HLE.shape[1]
    mask = None
    if window is not None and length > window:
        mask = _visible(length, window, query_HLE.device)
    return F.scaled_dot_product_attention(
        query_HLE[None],
        key_HLE[None],
        value_HLV[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )[0]


def _explicit(
    query_HLE: torch.Tensor,
    key_HLE: torch.Tensor,
    value_HLV: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    length = query_HLE.shape[1]
    factor = query_HLE.shape[2] ** -0.5 if scaling is None else scaling
    scores_HLL = (query_HLE @ key_HLE.transpose(1, 2)).float() * factor
    if softcap is not None:
        scores_HLL = torch.tanh(scores_HLL / softcap) * softcap
    visible_LL = _visible(length, window, query_HLE.device)
    scores_HLL = scores_HLL.masked_fill(~visible_LL, float("-inf"))
    if sinks_H is not None:
        sinks_HL1 = sinks_H.float()[:, None, None].expand(-1, length, 1)
        weights = torch.softmax(torch.cat([scores_HLL, sinks_HL1], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores_HLL, dim=-1)
    return weights.to(value_HLV.dtype) @ value_HLV


def _visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < (length if window is None else window))
