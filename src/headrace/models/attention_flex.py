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

from headrace.models.compiling import own_code

if TYPE_CHECKING:
    from collections.abc import Callable

# The version is part of the name: a compiled graph may outlive the code that made it.
_LIBRARY: Any = torch.library.Library("headrace", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("written_v1(Tensor tensor) -> Tensor")


def _written(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, which the compiler cannot see through.

    It would put what makes the tensor into the attention kernel, in place of a read a token, and
    torch 2.11 cannot lower that (a pad: "'int' object has no attribute 'free_symbols'"; a gather:
    "convert FlexibleLayout to FixedLayout first").
    """
    return tensor.clone(memory_format=torch.contiguous_format)


_LIBRARY.impl("written_v1", _written, "CPU")
_LIBRARY.impl("written_v1", _written, "CUDA")
_LIBRARY.impl("written_v1", torch.empty_like, "Meta")

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
    padding = -(B * T) % BLOCK  # the kernels want whole blocks
    first_N = first_visible(
        cu_seqlens, length=T, num_tokens=B * T + padding, window=window, device=query_BHTE.device
    )
    joined = [t.transpose(0, 1).flatten(1, 2)[None] for t in (query_BHTE, key_BKTE, value_BKTV)]
    if padding or E < _SMALLEST_HEAD or V < _SMALLEST_HEAD:
        joined = [F.pad(t, (0, max(0, _SMALLEST_HEAD - t.shape[3]), 0, padding)) for t in joined]
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _flex
    if not torch.compiler.is_compiling():
        # Inside a compiled layer it is part of the layer's graph. Alone it must be compiled: run
        # eagerly it would make every score.
        kinds = tuple((tuple(tensor.shape), tensor.dtype) for tensor in joined)
        kernel = _compiled_kernel((kinds, softcap, scaling, torch.is_grad_enabled()))
    out_1HNV, lse_1HN = kernel(
        *joined,
        _soft_cap(softcap),
        block_mask(first_N),
        E**-0.5 if scaling is None else scaling,
        key_BKTE.shape[1] != H,
    )
    if sinks_H is not None:
        kept_1HN = torch.sigmoid(lse_1HN - sinks_H.float()[None, :, None])
        out_1HNV = out_1HNV * kept_1HN[..., None].to(out_1HNV.dtype)
    out_HNV: torch.Tensor = out_1HNV[0, :, : B * T, :V]
    return out_HNV.reshape(H, B, T, -1).transpose(0, 1)


def first_visible(
    cu_seqlens: torch.Tensor | None,
    *,
    length: int,
    num_tokens: int,
    window: int | None,
    device: torch.device,
) -> torch.Tensor:
    """``(N,)`` int32, never decreasing: the first token that each one sees; itself is the last.

    Args:
        cu_seqlens: document boundaries from 0 on, or None for rows. Tokens behind the last
            boundary are a document of their own.
        length: of a row.
        num_tokens: N.
        window: positions that each one sees, or None.
        device: of the result.
    """
    tokens_N = torch.arange(num_tokens, device=device, dtype=torch.int32)
    if cu_seqlens is None:
        first_N = tokens_N - tokens_N % length
    else:
        first_N = cu_seqlens[torch.searchsorted(cu_seqlens, tokens_N, right=True) - 1]
    if window is not None:
        first_N = torch.maximum(first_N, tokens_N - (window - 1))
    written: torch.Tensor = torch.ops.headrace.written_v1(first_N)
    return written


def block_mask(first_N: torch.Tensor) -> Any:
    """Which blocks of scores hold a visible pair, and which of them are visible whole.

    What a token sees is one stretch that ends in itself, and neither of its ends ever moves back
    from one token to the next. So the blocks of a row of blocks are a stretch too, and so are
    those of a column: all follow from where they begin and end, without sorting or searching.

    Args:
        first_N: the first token that each one sees, as of :func:`first_visible`; N a multiple of
            128.
    """
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415 - CUDA only

    N = first_N.shape[0]
    index_Q = torch.arange(N // BLOCK, device=first_N.device, dtype=torch.int32)
    # A query block sees something of the key blocks from `some` to its own. Those from `whole` to
    # the one before its own it sees whole: its last token, which sees the least, sees their first.
    some_Q = first_N[::BLOCK] // BLOCK
    whole_Q = torch.minimum((first_N[BLOCK - 1 :: BLOCK] + (BLOCK - 1)) // BLOCK, index_Q)
    # The other way: a key block is seen from its own to `until_some`, whole until `until_whole`.
    until_some_Q = (some_Q <= index_Q[:, None]).sum(dim=1, dtype=torch.int32) - 1
    until_whole_Q = (whole_Q <= index_Q[:, None]).sum(dim=1, dtype=torch.int32) - 1

    def blocks(
        count_Q: torch.Tensor, indices_QQ: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Those behind the count are not read.
        return count_Q[None, None], indices_QQ.clamp(0, N // BLOCK - 1)[None, None]

    columns_QQ = index_Q.expand(N // BLOCK, -1)
    edges_Q = whole_Q - some_Q
    own_Q1 = index_Q[:, None]
    keys_QQ = torch.where(columns_QQ < edges_Q[:, None], some_Q[:, None] + columns_QQ, own_Q1)
    queries_QQ = torch.where(columns_QQ == 0, own_Q1, until_whole_Q[:, None] + columns_QQ)

    def visible(
        _b: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key >= first_N[query]) & (key <= query)

    return BlockMask(
        (N, N),
        *blocks(edges_Q + 1, keys_QQ),
        *blocks(index_Q - whole_Q, whole_Q[:, None] + columns_QQ),
        *blocks(until_some_Q - until_whole_Q + 1, queries_QQ),
        *blocks(until_whole_Q - index_Q, own_Q1 + 1 + columns_QQ),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _soft_cap(softcap: float | None) -> Callable[..., torch.Tensor] | None:
    if softcap is None:
        return None

    def cap(
        score: torch.Tensor, _b: Any, _h: Any, _query: Any, _key: Any
    ) -> torch.Tensor:  # the signature is FlexAttention's
        return torch.tanh(score / softcap) * softcap

    return cap


def _flex(  # noqa: PLR0917 - what is compiled takes no keywords
    query_1HNE: torch.Tensor,
    key_1KNE: torch.Tensor,
    value_1KNV: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None,
    mask: Any,
    scale: float,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of each softmax's denominator ``(1, H, N)``."""
    from torch.nn.attention.flex_attention import (  # noqa: PLC0415 - CUDA only
        AuxRequest,
        flex_attention,
    )

    out_1HNV, more = flex_attention(
        query_1HNE,
        key_1KNE,
        value_1KNV,
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=enable_gqa,
        return_aux=AuxRequest(lse=True),
    )
    assert more.lse is not None
    return out_1HNV, more.lse


@functools.cache
def _compiled_kernel(kind: tuple[Any, ...]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """For calls of one ``kind``: torch keeps eight graphs of one code object at most."""
    del kind
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compile(
        own_code(_flex, "flex_attention"), fullgraph=True, dynamic=False
    )
    return compiled
