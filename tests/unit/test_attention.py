"""Attention: causal, inside documents, inside windows, grouped; everything else is refused.

Shape legend: B rows, H query heads, K key/value heads, T positions, E head size.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace.errors import ModelRefusedError
from headrace.models import attention as attention_module
from headrace.models.attention import attention, packing_arguments, padded_boundaries
from tiny import tiny_config

B, H, K, T, E = 2, 4, 2, 13, 8


class Caller(nn.Module):
    """Stands for the attention module that calls."""

    is_causal = True


def inputs(seed=0, heads=(H, K, K)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, n, T, E, generator=generator, requires_grad=True) for n in heads]


def plain(query, key, value, *, scaling, cu_seqlens=None, window=None):
    """Scores, a mask and a softmax, written out."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeat, 1) for t in (key, value))
    document = torch.zeros(B * T, dtype=torch.long)
    bounds = [0, T, 2 * T] if cu_seqlens is None else cu_seqlens.tolist()
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        document[start:stop] = number
    document = document.view(B, 1, T)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    allowed = (distance >= 0) & (document[..., None] == document[..., None, :])
    if window is not None:
        allowed = allowed & (distance < window)
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores.masked_fill(~allowed, float("-inf"))
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


CUTS = torch.tensor([0, 3, 4, 13, 20, 26], dtype=torch.int32)


@pytest.mark.parametrize("cu_seqlens", [None, CUTS], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 1, 3, 12, 13, 50])
@pytest.mark.parametrize("heads", [(H, K, K), (H, H, H), (H, 1, 1)], ids=["gqa", "mha", "mqa"])
def test_attention_written_out(heads, window, cu_seqlens):
    query, key, value = inputs(heads=heads)
    packing = packing_arguments(cu_seqlens, T)
    out, weights = attention(
        Caller(), query, key, value, None, scaling=0.3, sliding_window=window, **packing
    )
    assert weights is None
    assert out.shape == (B, T, heads[0], E)
    wanted = plain(query, key, value, scaling=0.3, cu_seqlens=cu_seqlens, window=window)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, (query, key, value), upstream)
    expected = torch.autograd.grad(wanted, (query, key, value), upstream)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(0, 2 * T), max_size=6), st.one_of(st.none(), st.integers(1, 5)))
def test_any_documents(cuts, window):
    """Documents across row ends, of one token, and empty ones."""
    cu_seqlens = torch.tensor([*sorted({0, T, 2 * T} | set(cuts)), 2 * T], dtype=torch.int32)
    with torch.no_grad():
        query, key, value = inputs()
        out, _ = attention(
            Caller(),
            query,
            key,
            value,
            None,
            scaling=1.0,
            sliding_window=window,
            **packing_arguments(cu_seqlens, T),
        )
        wanted = plain(query, key, value, scaling=1.0, cu_seqlens=cu_seqlens[:-1], window=window)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)


def test_default_scaling():
    query, key, value = inputs()
    out, _ = attention(Caller(), query, key, value, None)
    torch.testing.assert_close(out, plain(query, key, value, scaling=E**-0.5))


def test_no_documents_need_no_arguments():
    assert packing_arguments(None, 128) == {}
    found = packing_arguments(CUTS, 128)
    assert found["cu_seq_lens_q"] is CUTS
    assert found["cu_seq_lens_k"] is CUTS
    assert (found["max_length_q"], found["max_length_k"]) == (128, 128)


REFUSED = {
    "an attention mask": {"attention_mask": torch.ones(B, 1, T, T)},
    "attention dropout": {"dropout": 0.1},
    "non-causal attention": {"is_causal": False},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_implemented_is_refused(what):
    arguments = {"attention_mask": None} | REFUSED[what]
    mask = arguments.pop("attention_mask")
    with pytest.raises(ModelRefusedError, match=f"Caller asks for {what}"):
        attention(Caller(), *inputs(), mask, **arguments)


def test_module_that_is_not_causal_is_refused():
    caller = Caller()
    caller.is_causal = False
    with pytest.raises(ModelRefusedError, match="non-causal"):
        attention(caller, *inputs(), None)


def test_registered_with_transformers():
    """Under its name no mask is ever built, whatever the model is called with."""
    attention_module.register()
    attention_module.register()
    assert ALL_ATTENTION_FUNCTIONS["headrace"] is attention
    model = AutoModelForCausalLM.from_config(
        tiny_config("mistral"), attn_implementation=attention_module.IMPLEMENTATION
    )
    ids = torch.randint(0, 96, (2, 9))
    reference = AutoModelForCausalLM.from_config(
        tiny_config("mistral"), attn_implementation="eager"
    )
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        difference = model(ids).logits - reference(ids).logits
    assert difference.abs().max() < 1e-5


def test_memory_of_packed_rows(monkeypatch):
    """No mask is larger than the longest windowed document, and none without a window."""
    masks = []
    original = functional.scaled_dot_product_attention

    def recording(*args, attn_mask=None, **kwargs):
        if attn_mask is not None:
            masks.append(tuple(attn_mask.shape))
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recording)
    with torch.no_grad():
        attention(Caller(), *inputs(), None, **packing_arguments(CUTS, T))
        assert masks == []
        attention(Caller(), *inputs(), None, sliding_window=4, **packing_arguments(CUTS, T))
    assert sorted(masks) == [(6, 6), (7, 7), (9, 9)]


def test_numbers_of_documents_share_a_few_lengths_of_boundaries():
    """Each length is a graph of the compiled layer, of which there may be eight."""
    bounds = torch.arange(32768, dtype=torch.int32)
    lengths = {len(padded_boundaries(bounds[:n], 32768)) for n in range(2, 32768, 50)}
    assert len(lengths) == 5
    assert len(padded_boundaries(bounds[:100], 32768)) == 128


def test_padded_boundaries_are_documents_without_tokens():
    padded = padded_boundaries(torch.tensor([0, 5, 14, 28], dtype=torch.int32), 28)
    assert padded.dtype == torch.int32
    assert padded.tolist() == [0, 5, 14, 28] + [28] * 12
    assert padded_boundaries(None, 28) is None
