"""Gated DeltaNet with documents: transformers' plain versions, one document at a time."""

import itertools

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as plain

from headrace.models.families.gated_delta import causal_conv, chunk_gated_delta_rule
from headrace.models.families.gated_delta_chunks import chunk_states, unit_lower_inverse

# Chunks hold 64 tokens: documents inside one, across several, ending at a boundary, of one token.
CUTS = {
    "one-chunk": (10, 3, 20),
    "across": (50, 100, 1, 60),
    "boundaries": (64, 128, 64),
    "single-tokens": (1, 1, 1, 130, 1),
    "whole": (200,),
}


def bounds_of(lengths, rows=1):
    total = sum(lengths)
    ends = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(
        [row * total + end for row in range(rows) for end in ends[: -1 if row < rows - 1 else None]]
        if rows > 1
        else ends,
        dtype=torch.int32,
    )


def inputs(rows, length, *, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(rows, length, *shape, generator=generator)

    query, key, value = draw(2, 8), draw(2, 8), draw(4, 6)
    decay = -0.3 * torch.nn.functional.softplus(draw(4))
    strength = torch.sigmoid(draw(4))
    return [t.requires_grad_() for t in (query, key, value, decay, strength)]


def run(function, tensors, **options):
    query, key, value, decay, strength = tensors
    out, state = function(
        query, key, value, g=decay, beta=strength, use_qk_l2norm_in_kernel=True, **options
    )
    assert state is None
    return out


def relative(found, wanted):
    return float(((found - wanted).norm() / wanted.norm()).detach())


def check_documents(out, tensors, lengths, *, bound):
    """Values and gradients of ``out`` are those of the documents alone, one after another."""
    pieces = []
    for start, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        here = [t[:, start:stop] for t in tensors]
        pieces.append(run(plain.torch_chunk_gated_delta_rule, here))
    wanted = torch.cat(pieces, dim=1)
    assert relative(out, wanted) < bound
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad(out, tensors, upstream)
    reference = torch.autograd.grad(wanted, tensors, upstream)
    assert max(relative(a, b) for a, b in zip(found, reference, strict=True)) < 1e-5


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("lengths", CUTS.values(), ids=CUTS)
def test_recurrence_begins_anew_with_every_document(lengths, rows):
    total = sum(lengths)
    tensors = inputs(rows, total)
    out = run(chunk_gated_delta_rule, tensors, cu_seqlens=bounds_of(lengths, rows))
    check_documents(out, tensors, lengths, bound=2e-6)


def test_without_boundaries_a_row_is_one_document():
    tensors = inputs(2, 150)
    found = run(chunk_gated_delta_rule, tensors)
    assert relative(found, run(plain.torch_chunk_gated_delta_rule, tensors)) < 2e-6


def test_not_even_rounding_depends_on_the_neighbour():
    """The decays of a document are summed over its own tokens."""
    tensors = inputs(1, 120)
    bounds = torch.tensor([0, 40, 120], dtype=torch.int32)
    first = run(chunk_gated_delta_rule, tensors, cu_seqlens=bounds)
    with torch.no_grad():
        for tensor in tensors:
            tensor[:, :40] *= 3
    second = run(chunk_gated_delta_rule, tensors, cu_seqlens=bounds)
    assert torch.equal(first[:, 40:], second[:, 40:])
    assert not torch.equal(first[:, :40], second[:, :40])


def test_one_step_at_a_time():
    """The recurrence itself, token by token, in float64."""
    tensors = [t.detach().double() for t in inputs(1, 70)]
    query, key, value, decay, strength = tensors
    query, key = (
        (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, dim=2)
        for t in (query, key)
    )
    state = torch.zeros(1, 4, 8, 6, dtype=torch.float64)
    outputs = []
    for t in range(70):
        if t == 30:  # a document starts
            state = torch.zeros_like(state)
        k, v = key[:, t], value[:, t]
        state = state * decay[:, t].exp()[..., None, None]
        correction = strength[:, t, :, None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * correction[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * 8**-0.5)
    wanted = torch.stack(outputs, dim=1)
    bounds = torch.tensor([0, 30, 70], dtype=torch.int32)
    found = run(chunk_gated_delta_rule, [t.float() for t in tensors], cu_seqlens=bounds)
    assert relative(found.double(), wanted) < 1e-6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("lengths", [(9,), (1, 2, 6), (3, 3, 3)])
def test_convolution_stops_at_a_documents_start(lengths, activation, bias):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    hidden = torch.randn(2, 5, total, generator=generator)
    weight = torch.randn(5, 4, generator=generator)
    offset = torch.randn(5, generator=generator) if bias else None
    found = causal_conv(
        hidden, weight, offset, activation, cu_seq_lens_q=bounds_of(lengths, rows=2)
    )
    ends = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    wanted = torch.cat(
        [plain.causal_conv1d_fn(hidden[:, :, a:b], weight, offset, activation) for a, b in ends],
        dim=2,
    )
    assert relative(found, wanted) < 1e-6
    whole = causal_conv(hidden, weight, offset, activation)
    assert relative(whole, plain.causal_conv1d_fn(hidden, weight, offset, activation)) < 1e-6


@pytest.mark.parametrize("num_chunks", [1, 3, 70])
def test_states_and_their_gradients_are_those_of_the_recurrence(num_chunks):
    generator = torch.Generator().manual_seed(0)
    through = torch.rand(1, 2, num_chunks, 1, 1, generator=generator)
    through[:, :, ::5] = 0  # documents start
    removed, added = (
        0.1 * torch.randn(1, 2, num_chunks, 4, size, generator=generator) for size in (4, 3)
    )
    removed[:, :, ::5] = 0
    tensors = [t.requires_grad_() for t in (through, removed, added)]
    found = chunk_states(*tensors)
    state, wanted = torch.zeros(1, 2, 4, 3), []
    for chunk in range(num_chunks):
        wanted.append(state)
        state = through[:, :, chunk] * state - removed[:, :, chunk] @ state + added[:, :, chunk]
    wanted = torch.stack(wanted, dim=2)
    assert (found - wanted).abs().max() < 1e-6
    if num_chunks > 1:
        upstream = torch.randn(found.shape, generator=generator)
        pairs = [torch.autograd.grad(out, tensors, upstream) for out in (found, wanted)]
        assert max(relative(a, b) for a, b in zip(*pairs, strict=True)) < 1e-6


def test_long_rows_of_many_documents():
    """Chunks of 16 tokens, 73 of them."""
    lengths = (300, 1, 16, 500, 207, 130)
    tensors = inputs(1, sum(lengths))
    out = run(chunk_gated_delta_rule, tensors, cu_seqlens=bounds_of(lengths), chunk_size=16)
    check_documents(out, tensors, lengths, bound=1e-6)


@pytest.mark.parametrize("kind", ["random", "equal keys"])
def test_the_triangular_system_is_inverted(kind):
    """Equal keys: powers of the matrix reach 10 ** 17 and would cancel."""
    generator = torch.Generator().manual_seed(0)
    lower = (
        torch.ones(64, 64)
        if kind == "equal keys"
        else torch.randn(3, 64, 64, generator=generator) / 8
    )
    lower = lower.tril(-1).requires_grad_()
    found = unit_lower_inverse(lower)
    eye = torch.eye(64, dtype=torch.float64)
    exact = lower.detach().double().requires_grad_()
    wanted = torch.linalg.inv(eye + exact)
    assert relative(found.double(), wanted) < 1e-6
    upstream = torch.randn(found.shape, generator=generator)
    (gradient,) = torch.autograd.grad(found, lower, upstream)
    (reference,) = torch.autograd.grad(wanted, exact, upstream.double())
    assert relative(gradient.double(), reference.tril(-1)) < 1e-6
