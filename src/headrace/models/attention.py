"""The one attention function of headrace, registered with transformers as ``"headrace"``.

transformers builds no mask for an implementation it does not know a mask for, so none is ever
built: causality, documents and windows are arguments here. Anything this function does not
implement is an error, never silence.

Shape legend: B rows, H query heads, K key/value heads, T positions, E head size of queries and
keys, V head size of values, N tokens = B * T.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.errors import ModelRefusedError
from headrace.models import masks
from headrace.models.attention_documents import attend_by_document
from headrace.models.attention_flex import attend_flex
from headrace.models.determinism import deterministic_algorithms

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPLEMENTATION = "headrace"
DOCUMENTS = "headrace_documents"  # beside a layer's arguments, and bound to attention modules
_DISPATCH = "ALL_ATTENTION_FUNCTIONS"  # what transformers' layers look attention up in
_NO_CODE = compile("", "", "exec")
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)  # its kernel knows no others
EXAMINING = "headrace-examining"  # the same function, with mask functions answered by patterns


def register() -> None:
    """Make ``attn_implementation="headrace"`` known to transformers; repeated calls are free."""
    from transformers import AttentionInterface  # noqa: PLC0415 - slow; when a model is built
    from transformers.masking_utils import AttentionMaskInterface  # noqa: PLC0415 - as above

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionInterface.register(EXAMINING, attention)
    AttentionMaskInterface.register(EXAMINING, masks.answer)


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


def document_names(layer: torch.nn.Module) -> tuple[str, ...]:
    """What to bind to document boundaries so that every attention in ``layer`` has them.

    Some classes do not hand on what their layers are called with (StableLM, Nemotron).
    """
    return tuple(
        f"{path}.{DOCUMENTS}".lstrip(".")
        for path, module in layer.named_modules()
        if _DISPATCH in getattr(inspect.unwrap(type(module).forward), "__code__", _NO_CODE).co_names
    )


def padded_boundaries(cu_seqlens: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
    """``cu_seqlens`` followed by documents without tokens, so that few lengths occur.

    Room for documents of 256 tokens on average, and four times that again and again until it
    suffices: a handful of lengths, each a compiled graph, where every count of documents would be
    one and torch compiles eight of a function at most.
    """
    if cu_seqlens is None:
        return None
    length = max(16, num_tokens // 256)
    while length < len(cu_seqlens):
        length *= 4
    return F.pad(cu_seqlens, (0, length - len(cu_seqlens)), value=num_tokens)


def attention(
    module: torch.nn.Module,
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTV: torch.Tensor,
    attention_mask: torch.Tensor | masks.Pattern | None,
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

    Args:
        module: the attention layer that calls.
        query_BHTE: queries.
        key_BKTE: keys.
        value_BKTV: values.
        attention_mask: None, or a pattern while a model is examined.
        scaling: of the scores; ``E ** -0.5`` by default.
        dropout: must be 0.
        sliding_window: positions that each one sees, itself included; None for all before it.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        s_aux: ``(H,)``, a learned score a head that takes part in the softmax and has no value.
        cu_seq_lens_q: int32 document boundaries over the flattened tokens.
        max_length_q: no document is longer.
        kwargs: what else layers pass on; refused if it would change the result.

    Returns:
        ``(B, T, H, V)`` and None for the attention weights, which never exist.

    Raises:
        ModelRefusedError: a mask, dropout, bias or non-causal call was asked for.
    """
    _refuse_unsupported(module, attention_mask, sliding_window, dropout=dropout, kwargs=kwargs)
    if cu_seq_lens_q is None:
        # Bound for a call, never set otherwise.
        cu_seq_lens_q, max_length_q = getattr(module, DOCUMENTS, None), query_BHTE.shape[2]
    window = sliding_window if sliding_window and sliding_window < query_BHTE.shape[2] else None
    plain = softcap is None and s_aux is None
    if plain and cu_seq_lens_q is None and window is None:
        out_BHTV = _dense(query_BHTE, key_BKTE, value_BKTV, scaling)
    elif plain and query_BHTE.is_cuda and query_BHTE.dtype in _VARLEN_DTYPES:
        out_BHTV = _varlen(
            query_BHTE,
            key_BKTE,
            value_BKTV,
            cu_seq_lens_q,
            max_length=max_length_q,
            scaling=scaling,
            window=window,
        )
    else:
        attend = attend_flex if query_BHTE.is_cuda else attend_by_document
        out_BHTV = attend(
            query_BHTE,
            key_BKTE,
            value_BKTV,
            cu_seq_lens_q,
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks_H=s_aux,
        )
    # Contiguous, as transformers' own functions: some layers view the result.
    return out_BHTV.transpose(1, 2).contiguous(), None


def _refuse_unsupported(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | masks.Pattern | None,
    sliding_window: int | None,
    *,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    unsupported = {
        "an attention mask": isinstance(attention_mask, torch.Tensor),
        "attention dropout": dropout != 0.0,
        "non-causal attention": kwargs.get("is_causal") is False
        or not getattr(module, "is_causal", True),
    }
    for name, value in kwargs.items():
        # Document boundaries and positions are integers; biases and scores are not.
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            unsupported[f"{name!r} in its attention"] = True
    for what, given in unsupported.items():
        if given:
            raise ModelRefusedError(
                f"{type(module).__name__} asks for {what}, which headrace's attention does not "
                "implement"
            )
    if isinstance(attention_mask, masks.Pattern) and attention_mask.window != sliding_window:
        raise ModelRefusedError(
            f"{type(module).__name__} masks a window of {attention_mask.window} positions but "
            f"tells its attention {sliding_window}: the window would be lost"
        )


def _dense(
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTV: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    grouped = query_BHTE.shape[1] != key_BKTE.shape[1]
    if grouped and not query_BHTE.is_cuda:
        # The CPU kernels have no grouped heads; the fallback would build T x T scores.
        repeat = query_BHTE.shape[1] // key_BKTE.shape[1]
        key_BKTE = key_BKTE.repeat_interleave(repeat, dim=1)
        value_BKTV = value_BKTV.repeat_interleave(repeat, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        query_BHTE, key_BKTE, value_BKTV, is_causal=True, scale=scaling, enable_gqa=grouped
    )


def _varlen(
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTV: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    *,
    max_length: int | None,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - CUDA only

    B, H, T, E = query_BHTE.shape
    V = value_BKTV.shape[3]
    if V < E:  # the kernel wants one size; zeros are added and cut off again
        value_BKTV = F.pad(value_BKTV, (0, E - V))
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=query_BHTE.device)
        max_length = T
    assert max_length is not None
    query_NHE, key_NKE, value_NKE = (
        t.transpose(1, 2).reshape(B * T, -1, E) for t in (query_BHTE, key_BKTE, value_BKTV)
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
        scale=E**-0.5 if scaling is None else scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped_heads,
    )
    assert isinstance(out_NHE, torch.Tensor)
    return out_NHE.view(B, T, H, E)[..., :V].transpose(1, 2)


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

    The backward of cuDNN's and of the memory-efficient kernel add up in any order, so
    ``deterministic`` leaves them out; FlashAttention's does not where PyTorch is told so.
    """
    if not torch.cuda.is_available():
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415 - CUDA only

    backends = [SDPBackend.FLASH_ATTENTION]
    if not deterministic:
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)
        backends.append(SDPBackend.EFFICIENT_ATTENTION)
    # fp32 runs on the device (parity checks) have no fused kernel with grouped heads.
    backends.append(SDPBackend.MATH)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(backends, set_priority=True))
        if deterministic:
            stack.enter_context(deterministic_algorithms())
        yield
