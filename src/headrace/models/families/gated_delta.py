"""Gated DeltaNet for packed documents: a causal convolution and a recurrence that begin anew.

transformers' plain torch versions know nothing of documents. Here a convolution's taps stop at a
document's first token, and a document starts from an empty state. The mixer's own code runs with
these two functions in place of its own, whatever else it does; so do mixers that are convolutions
alone (LFM2).

The recurrence (Gated Delta Networks, arXiv:2412.06464), for keys k, values v, decays
``exp(g)`` and write strengths beta, is ``S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) +
beta_t v_t k_t^T``, ``o_t = S_t q_t``. In chunks (:mod:`.gated_delta_chunks`) tokens of different
documents are uncoupled, read the carried state only in the document that it comes from, and write
only to that of the last token.

Shape legend: B rows, T positions, H heads, K key size, V value size, C tokens of a chunk, G chunks
of a row, D channels.
"""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.models.families import gated_delta_kernel
from headrace.models.families.gated_delta_chunks import PADDING, chunk_rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_RULE, _CONV = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"


def adapt(model: nn.Module) -> None:
    """Let every gated DeltaNet and short convolution of ``model`` call this module's functions."""
    for module, uses_rule in _mixers(model):
        _rebind(
            module, {_CONV: causal_conv} | ({_RULE: chunk_gated_delta_rule} if uses_rule else {})
        )


def restore(model: nn.Module) -> None:
    """Let them call transformers' own torch functions, as where no other package is installed.

    transformers prefers a package's kernels that take no tensors of a CPU, and that may be wrong.
    """
    for module, uses_rule in _mixers(model):
        names = (_CONV, _RULE) if uses_rule else (_CONV,)
        scope = inspect.unwrap(type(module).forward).__globals__
        _rebind(module, {name: inspect.unwrap(scope[name]) for name in names})


def _rebind(module: nn.Module, functions: dict[str, Any]) -> None:
    """Let the forward of ``module`` call ``functions`` by these global names."""
    forward = inspect.unwrap(type(module).forward)
    scope = forward.__globals__ | functions
    # The compiler takes globals that have a module's name for the module's own, and guards on
    # what it finds there.
    del scope["__name__"]
    own = types.FunctionType(
        forward.__code__,
        scope,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(own, module)


def prepare(model: nn.Module, device: torch.device) -> None:
    """Decide whether the layers of ``model`` use the extra kernel on ``device``."""
    if any(uses_rule for _, uses_rule in _mixers(model)):
        gated_delta_kernel.prepare(device, compare=torch_gated_delta_rule)


def _mixers(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Modules with a convolution, and whether the rule comes after it; not those that scan."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        names = getattr(forward, "__globals__", {})
        used = getattr(getattr(forward, "__code__", None), "co_names", ())
        called = [name for name in used if name in names]
        if _CONV in called and not any("scan" in name for name in called):
            yield module, _RULE in called


def document_numbers(cu_seqlens: torch.Tensor | None, num_rows: int, length: int) -> Any:
    """``(B, T)``: which document a token belongs to; None when every row is one."""
    if cu_seqlens is None:
        return None
    tokens_N = torch.arange(num_rows * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens_N, right=True).view(num_rows, length)


def causal_conv(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """A depthwise convolution over the past of each document, with transformers' signature.

    Args:
        hidden_states: ``(B, D, T)``.
        weight: taps ``(D, width)``, the last one for the present token.
        bias: ``(D,)`` or None.
        activation: name of a function, or None.
        cu_seq_lens_q: document boundaries over the flattened tokens.

    Returns:
        ``(B, D, T)`` in the input's dtype.
    """
    B, T = hidden_states.shape[0], hidden_states.shape[2]
    width = weight.shape[1]
    document_BT = document_numbers(cu_seq_lens_q, B, T)
    source_BDT, taps = hidden_states.float(), weight.float()
    out_BDT = source_BDT * taps[:, -1, None]
    for back in range(1, min(width, T)):
        past_BDT = F.pad(source_BDT[:, :, : T - back], (back, 0))
        if document_BT is not None:
            earlier_BT = F.pad(document_BT[:, : T - back], (back, 0), value=PADDING)
            past_BDT = past_BDT * (earlier_BT == document_BT)[:, None]
        out_BDT = out_BDT + past_BDT * taps[:, width - 1 - back, None]
    if bias is not None:
        out_BDT = out_BDT + bias.float()[:, None]
    if activation is not None:
        out_BDT = _activation(activation)(out_BDT)
    return out_BDT.to(hidden_states.dtype)


def _activation(name: str) -> Any:
    from transformers.activations import ACT2FN  # noqa: PLC0415 - slow; a model exists by now

    return ACT2FN[name]


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The gated delta rule with transformers' signature, documents kept apart.

    Args:
        query: ``(B, T, heads, K)``; heads divide those of ``value``.
        key: as ``query``.
        value: ``(B, T, H, V)``.
        g: logarithms of decays ``(B, T, H)``.
        beta: write strengths ``(B, T, H)``.
        chunk_size: C.
        initial_state: must be None: training starts from empty states.
        output_final_state: must be False.
        use_qk_l2norm_in_kernel: normalise queries and keys.
        cu_seqlens: document boundaries over the flattened tokens.

    Returns:
        ``(B, T, H, V)`` in the query's dtype, and None.
    """
    assert initial_state is None
    assert not output_final_state
    dtype, H = query.dtype, value.shape[2]
    if use_qk_l2norm_in_kernel and gated_delta_kernel.is_used(value.device):
        repeat = H // query.shape[2]
        if repeat > 1:
            query, key = (t.repeat_interleave(repeat, dim=2) for t in (query, key))
        return gated_delta_kernel.run(query, key, value, g, beta, cu_seqlens).to(dtype), None
    out = torch_gated_delta_rule(
        query, key, value, g, beta, cu_seqlens, normalise=use_qk_l2norm_in_kernel,
        chunk_size=chunk_size,
    )  # fmt: skip
    return out, None


def torch_gated_delta_rule(  # noqa: PLR0917 - as the kernel
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    *,
    normalise: bool = True,
    chunk_size: int = 64,
) -> torch.Tensor:
    """The same on torch operators alone.

    Args:
        query: ``(B, T, heads, K)``; heads divide those of ``value``.
        key: as ``query``.
        value: ``(B, T, H, V)``.
        g: logarithms of decays ``(B, T, H)``.
        beta: write strengths ``(B, T, H)``.
        cu_seqlens: document boundaries over the flattened tokens.
        normalise: queries and keys.
        chunk_size: C, a power of two.

    Returns:
        ``(B, T, H, V)`` in the query's dtype.
    """
    dtype = query.dtype
    B, T, H = value.shape[:3]
    document_BT = document_numbers(cu_seqlens, B, T)
    if document_BT is None:
        document_BT = torch.zeros(B, T, dtype=torch.long, device=value.device)
    padding = -T % chunk_size
    document_BGC = F.pad(document_BT, (0, padding), value=PADDING).view(B, -1, chunk_size)
    query_BHGCK, key_BHGCK = (
        _chunks(_normalised(x.float()) if normalise else x.float(), H, chunk_size)
        for x in (query, key)
    )
    out_BHGCV = chunk_rule(
        query_BHGCK * query.shape[-1] ** -0.5,
        key_BHGCK,
        _chunks(value.float(), H, chunk_size),
        beta_BHGC1=_chunks(beta.float()[..., None], H, chunk_size),
        g_BHGC1=_chunks(g.float()[..., None], H, chunk_size),
        document_BGC=document_BGC,
        dtype=dtype,
    )
    out_BTHV = out_BHGCV.flatten(2, 3)[:, :, :T].transpose(1, 2)
    return out_BTHV.to(dtype, memory_format=torch.contiguous_format)


def _normalised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt(tensor.square().sum(dim=-1, keepdim=True) + 1e-6)


def _chunks(tensor: torch.Tensor, num_heads: int, chunk_size: int) -> torch.Tensor:
    """``(B, T, heads, E)`` to ``(B, H, G, C, E)``, heads repeated, the end filled with zeros."""
    repeat = num_heads // tensor.shape[2]
    if repeat > 1:
        tensor = tensor.repeat_interleave(repeat, dim=2)
    padding = -tensor.shape[1] % chunk_size
    padded = F.pad(tensor.transpose(1, 2), (0, 0, 0, padding))
    return padded.reshape(*padded.shape[:2], -1, chunk_size, padded.shape[3])
