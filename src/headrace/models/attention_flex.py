"""Attention with soft caps and sinks on CUDA, and all of float32: FlexAttention over documents.

Which blocks of 128 x 128 scores exist follows from document boundaries and window by arithmetic
on block indices: no dense mask is ever made. Sinks need no kernel of their own: with ``lse`` the
logarithm of the softmax's denominator, a score ``s`` without value scales the output by
``sigmoid(lse - s)``.

Shape legend: B rows, H query heads, K key/value heads, T positions, E head size of queries and
keys, V head size of values, N tokens = B * T, Q blocks of 128 tokens.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 128
_SMALLEST_HEAD = 16  # of the kernels; smaller heads are filled with zeros


def attend_flex(
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
    B, H, T, E = query_BHTE.shape
    V = value_BKTV.shape[3]
    document_N = document_numbers(cu_seqlens, B, T, query_BHTE.device)
    joined = [t.transpose(0, 1).flatten(1, 2)[None] for t in (query_BHTE, key_BKTE, value_BKTV)]
    joined = [F.pad(t, (0, max(0, _SMALLEST_HEAD - t.shape[3]))) for t in joined]
    padding = -(B * T) % BLOCK
    if padding:  # the kernels want whole blocks; padding is a document of its own
        joined = [F.pad(t, (0, 0, 0, padding)) for t in joined]
        document_N = F.pad(document_N, (0, padding), value=-1)
    from torch.nn.attention.flex_attention import AuxRequest  # noqa: PLC0415 - CUDA only

    out_1HNV, more = _kernel()(
        *joined,
        score_mod=_soft_cap(softcap),
        block_mask=block_mask(document_N, window),
        scale=E**-0.5 if scaling is None else scaling,
        enable_gqa=key_BKTE.shape[1] != H,
        return_aux=AuxRequest(lse=True),
    )
    if sinks_H is not None:
        kept_1HN = torch.sigmoid(more.lse - sinks_H.float()[None, :, None])
        out_1HNV = out_1HNV * kept_1HN[..., None].to(out_1HNV.dtype)
    out_HNV: torch.Tensor = out_1HNV[0, :, : B * T, :V]
    return out_HNV.reshape(H, B, T, -1).transpose(0, 1)


def document_numbers(
    cu_seqlens: torch.Tensor | None, num_rows: int, length: int, device: torch.device
) -> torch.Tensor:
    """``(N,)`` int32: which document a token belongs to; without boundaries, which row."""
    tokens_N = torch.arange(num_rows * length, device=device, dtype=torch.int32)
    if cu_seqlens is None:
        return tokens_N // length
    return torch.searchsorted(cu_seqlens, tokens_N, right=True, out_int32=True)


def block_mask(document_N: torch.Tensor, window: int | None) -> Any:
    """The blocks of scores that hold a visible pair, and among them those that are visible whole.

    Args:
        document_N: non-decreasing (a padding of -1 at the end excepted), N a multiple of 128.
        window: positions that each one sees, or None.
    """
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415 - CUDA only

    N = document_N.shape[0]
    first_Q, last_Q = document_N[::BLOCK], document_N[BLOCK - 1 :: BLOCK]
    index_Q = torch.arange(N // BLOCK, device=document_N.device)
    apart_QQ = (index_Q[:, None] - index_Q) * BLOCK  # between the blocks' first tokens
    limit = N if window is None else window
    # Documents do not decrease, so two blocks share one exactly if the later begins in or before
    # the document in which the earlier ends. Padding shares with itself alone, which is harmless.
    shares_QQ = (first_Q[:, None] <= last_Q) | (last_Q[:, None] < 0)
    some_QQ = (apart_QQ >= 0) & (apart_QQ - (BLOCK - 1) < limit) & shares_QQ
    same_QQ = (first_Q[:, None] == last_Q) & (first_Q == last_Q) & (last_Q == first_Q)[:, None]
    whole_QQ = (apart_QQ > 0) & (apart_QQ + (BLOCK - 1) < limit) & same_QQ
    partial, full = _ordered(some_QQ & ~whole_QQ), _ordered(whole_QQ & some_QQ)

    def visible(
        _b: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        same = document_N[query] == document_N[key]
        return same & (query >= key) & (query - key < limit)

    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(N, N)
    )


def _ordered(blocks_QQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of the marked blocks of every row, as BlockMask holds them."""
    counts_Q = blocks_QQ.sum(dim=1, dtype=torch.int32)
    indices_QQ = torch.argsort(blocks_QQ.int(), dim=1, descending=True, stable=True)
    return counts_Q[None, None], indices_QQ.to(torch.int32)[None, None]


def _soft_cap(softcap: float | None) -> Callable[..., torch.Tensor] | None:
    if softcap is None:
        return None

    def cap(
        score: torch.Tensor, _b: Any, _h: Any, _query: Any, _key: Any
    ) -> torch.Tensor:  # the signature is FlexAttention's
        return torch.tanh(score / softcap) * softcap

    return cap


def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - CUDA only

    # Inside a compiled layer it is part of the layer's graph. Alone it must be compiled: run
    # eagerly it would make every score.
    kernel: Callable[..., Any] = flex_attention
    return kernel if torch.compiler.is_compiling() else _compiled_kernel()


@functools.cache
def _compiled_kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - CUDA only

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled
