"""The one attention function of headrace, registered with transformers as ``"headrace"``.

transformers builds no mask for an implementation it does not know a mask for, so none is ever
built: causality, documents and windows are arguments here. Anything this function does not
implement is an error, never silence.

Shape legend: B rows, H query heads, K key/value heads, T positions, E head size, N tokens = B * T.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.errors import ModelRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPLEMENTATION = "headrace"


def register() -> None:
    """Make ``attn_implementation="headrace"`` known to transformers; repeated calls are free."""
    from transformers import AttentionInterface  # noqa: PLC0415 - slow; when a model is built

    AttentionInterface.register(IMPLEMENTATION, attention)


def packing_arguments(cu_seqlens: torch.Tensor | None, max_length: int) -> dict[str, Any]:
    """Keyword arguments that carry document boundaries through a model to its attention layers.

    Args:
        cu_seqlens: int32 ``(num_documents + 1,)`` over the flattened tokens, or None.
        max_length: the longest document possible; constant, so that compiled graphs are reused.
    """
    if cu_seqlens is None:
        return {}
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_length,
        "max_length_k": max_length,
    }


def attention(
    module: torch.nn.Module,
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside documents, with transformers' attention signature.

    Returns:
        ``(B, T, H, E)`` and None for the attention weights, which never exist.

    Raises:
        ModelRefusedError: a mask, dropout, soft cap, sink or non-causal call was asked for.
    """
    _refuse_unsupported(
        module, attention_mask, dropout=dropout, softcap=softcap, s_aux=s_aux, kwargs=kwargs
    )
    window = sliding_window if sliding_window and sliding_window < query_BHTE.shape[2] else None
    if cu_seq_lens_q is None and window is None:
        out_BHTE = _dense(query_BHTE, key_BKTE, value_BKTE, scaling)
    elif query_BHTE.is_cuda:
        out_BHTE = _varlen(
            query_BHTE,
            key_BKTE,
            value_BKTE,
            cu_seq_lens_q,
            max_length=max_length_q,
            scaling=scaling,
            window=window,
        )
    else:
        out_BHTE = _by_document(
            query_BHTE, key_BKTE, value_BKTE, cu_seq_lens_q, scaling=scaling, window=window
        )
    return out_BHTE.transpose(1, 2), None


def _refuse_unsupported(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    unsupported = {
        "an attention mask": attention_mask is not None,
        "attention dropout": dropout != 0.0,
        "a logit soft cap": softcap is not None,
        "attention sinks": s_aux is not None,
        "non-causal attention": kwargs.get("is_causal") is False
        or not getattr(module, "is_causal", True),
    }
    for what, given in unsupported.items():
        if given:
            raise ModelRefusedError(
                f"{type(module).__name__} asks for {what}, which headrace's attention does not "
                "implement"
            )


def _dense(
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTE: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    grouped = query_BHTE.shape[1] != key_BKTE.shape[1]
    if grouped and not query_BHTE.is_cuda:
        # The CPU kernels have no grouped heads; the fallback would build T x T scores.
        repeat = query_BHTE.shape[1] // key_BKTE.shape[1]
        key_BKTE = key_BKTE.repeat_interleave(repeat, dim=1)
        value_BKTE = value_BKTE.repeat_interleave(repeat, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        query_BHTE, key_BKTE, value_BKTE, is_causal=True, scale=scaling, enable_gqa=grouped
    )


def _by_document(
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTE: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend document by document: no mask larger than the longest windowed document."""
    B, H, T, E = query_BHTE.shape
    bounds = [row * T for row in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    repeat = H // key_BKTE.shape[1]
    # (heads, N, E): rows joined along the tokens, the order in which boundaries count them.
    query_HNE = query_BHTE.transpose(0, 1).reshape(H, B * T, E)
    key_HNE = key_BKTE.repeat_interleave(repeat, dim=1).transpose(0, 1).reshape(H, B * T, E)
    value_HNE = value_BKTE.repeat_interleave(repeat, dim=1).transpose(0, 1).reshape(H, B * T, E)
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        mask = None
        if window is not None and stop - start > window:
            mask = _window_mask(stop - start, window, query_BHTE.device)
        pieces.append(
            F.scaled_dot_product_attention(
                query_HNE[None, :, start:stop],
                key_HNE[None, :, start:stop],
                value_HNE[None, :, start:stop],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
        )
    out_HNE = torch.cat(pieces, dim=2)[0]
    return out_HNE.reshape(H, B, T, E).transpose(0, 1)


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _varlen(
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTE: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    *,
    max_length: int | None,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - CUDA only

    B, H, T, E = query_BHTE.shape
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=query_BHTE.device)
        max_length = T
    assert max_length is not None
    query_NHE, key_NKE, value_NKE = (
        t.transpose(1, 2).reshape(B * T, -1, E) for t in (query_BHTE, key_BKTE, value_BKTE)
    )
    grouped_heads: dict[str, Any] = _grouped_heads(H, key_BKTE.shape[1])
    out_NHE = varlen_attn(
        query_NHE,
        key_NKE,
        value_NKE,
        cu_seqlens,
        cu_seqlens,
        max_length,
        max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped_heads,
    )
    assert isinstance(out_NHE, torch.Tensor)
    return out_NHE.view(B, T, H, E).transpose(1, 2)


def _grouped_heads(num_heads: int, num_key_value_heads: int) -> dict[str, bool]:
    # 2.11 takes grouped heads as they come; later versions want to be told.
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - as above

    if num_heads == num_key_value_heads:
        return {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return {"enable_gqa": True}
    return {}


@contextlib.contextmanager
def pinned_backend(*, deterministic: bool) -> Iterator[None]:
    """Fix the dense attention backend: cuDNN first, then FlashAttention, never a T x T fallback.

    cuDNN's backward is not deterministic, so ``deterministic`` leaves it out.
    """
    if not torch.cuda.is_available():
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415 - CUDA only

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if not deterministic:
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)
    # fp32 runs on the device (parity checks) have no fused kernel with grouped heads.
    backends.append(SDPBackend.MATH)
    with sdpa_kernel(backends, set_priority=True):
        yield
