"""Attention with soft caps and sinks on CUDA, and all of float32: FlexAttention over documents.

Which blocks of 128 x 128 scores exist follows from document boundaries and window by arithmetic
on block indices: no dense mask is ever made. Sinks need no kernel of their own: with ``lse`` the
logarithm of the softmax's denominator, a score ``s`` without value scales the output by
``sigmoid(lse - s)``.

Inside a compiled layer it is one operator, which calls a kernel compiled by itself: lowered within
the layer's graph, with a mask that the graph computes, torch 2.11 fails. Its backward runs the
kernel's forward again.

Shape legend: B rows, H query heads, K key/value heads, T positions, E head size of queries and
keys, V head size of values, N tokens = B * T, Q blocks of 128 tokens.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.models.compiling import own_code
from headrace.models.recording import recording

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
    if torch.compiler.is_compiling():
        out_BHTV: torch.Tensor = torch.ops.headrace.flex_attention_v1(
            query_BHTE, key_BKTE, value_BKTV, cu_seqlens, sinks_H, scaling, window, softcap
        )
        return out_BHTV
    return _attend(query_BHTE, key_BKTE, value_BKTV, cu_seqlens, sinks_H, scaling, window, softcap)


def _attend(  # noqa: PLR0917 - as the operator
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTV: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    B, H, T, E = query_BHTE.shape
    V = value_BKTV.shape[3]
    document_N = document_numbers(cu_seqlens, B, T, query_BHTE.device)
    joined = [t.transpose(0, 1).flatten(1, 2)[None] for t in (query_BHTE, key_BKTE, value_BKTV)]
    joined = [F.pad(t, (0, max(0, _SMALLEST_HEAD - t.shape[3]))) for t in joined]
    padding = -(B * T) % BLOCK
    if padding:  # the kernels want whole blocks; padding is a document of its own
        joined = [F.pad(t, (0, 0, 0, padding)) for t in joined]
        document_N = F.pad(document_N, (0, padding), value=-1)
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in joined)
    out_1HNV, lse_1HN = _kernel((shapes, softcap, window, torch.is_grad_enabled()))(
        *joined,
        _soft_cap(softcap),
        block_mask(document_N, window),
        E**-0.5 if scaling is None else scaling,
        key_BKTE.shape[1] != H,
    )
    if sinks_H is not None:
        kept_1HN = torch.sigmoid(lse_1HN - sinks_H.float()[None, :, None])
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


def _flex(  # noqa: PLR0917 - what is compiled takes no keywords
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None,
    mask: Any,
    scale: float,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of each softmax's denominator."""
    from torch.nn.attention.flex_attention import (  # noqa: PLC0415 - CUDA only
        AuxRequest,
        flex_attention,
    )

    out, more = flex_attention(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=enable_gqa,
        return_aux=AuxRequest(lse=True),
    )
    assert more.lse is not None
    return out, more.lse


@functools.cache
def _kernel(kind: tuple[Any, ...]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Compiled, for calls of one ``kind``: run eagerly it would make every score.

    Each kind has a code object of its own, for the compiler keeps eight graphs of one at most.
    """
    del kind
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compile(
        own_code(_flex, "flex_attention"), fullgraph=True, dynamic=False
    )
    return compiled


# The version is part of the name: a compiled graph may outlive the code that made it.
@torch.library.custom_op("headrace::flex_attention_v1", mutates_args=())
def _forward(  # noqa: PLR0917 - an operator takes no keywords
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    with recording(), torch.no_grad():
        out = _attend(query, key, value, cu_seqlens, sinks, scaling, window, softcap)
    return out.contiguous()


@torch.library.custom_op("headrace::flex_attention_backward_v1", mutates_args=())
def _backward(  # noqa: PLR0917 - an operator takes no keywords
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> list[torch.Tensor]:
    given = [query, key, value] if sinks is None else [query, key, value, sinks]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    with recording():
        q, k, v, *learned = leaves
        sinks_H = learned[0] if learned else None
        out = _attend(q, k, v, cu_seqlens, sinks_H, scaling, window, softcap)
        found = torch.autograd.grad(out, leaves, grad)
    return [gradient.contiguous() for gradient in found]


@_forward.register_fake
def _(
    query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_: Any
) -> torch.Tensor:  # fmt: skip
    return query.new_empty(*query.shape[:3], value.shape[3])


@_backward.register_fake
def _(
    _grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _cu_seqlens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *_: Any,
) -> list[torch.Tensor]:
    given = [query, key, value] if sinks is None else [query, key, value, sinks]
    return [tensor.new_empty(tensor.shape) for tensor in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    found = torch.ops.headrace.flex_attention_backward_v1(
        grad.contiguous(), *ctx.saved_tensors, *ctx.settings
    )
    query, key, value, *sinks = found
    return query, key, value, None, sinks[0] if sinks else None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
