"""Compiling: one graph a structure, no silent eager, and the same gradients when it fails."""

import logging

import pytest
import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd

from headrace.errors import ConfigError
from tiny import (
    make_batches,
    make_engine,
    reference_backward,
    reference_model,
    relative_error,
    returned_gradients,
    tiny_config,
    tiny_state,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
COMPILED = {"compile": True, "compile_backend": "aot_eager_decomp_partition", "weight_slots": 2}
TRACED = COMPILED | {"compile_backend": "eager"}  # for tests that look at counts alone


def no_compiler(graph, inputs):
    raise RuntimeError("no C++ compiler found\nand more lines")


def keep(graph, inputs):
    return graph


backward_fails = aot_autograd(fw_compiler=keep, bw_compiler=no_compiler)
register_backend(no_compiler, name="test_no_compiler")
register_backend(backward_fails, name="test_backward_fails")


def counts(engine):
    return engine.compile_counts.row()


def step(engine, batches):
    return engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)


def test_layers_of_one_structure_share_one_graph_in_every_step():
    spec, state = tiny_state(tiny_config("llama", num_hidden_layers=4))
    with make_engine(spec, state, **COMPILED) as engine:
        for seed in range(2):
            step(engine, make_batches(2, seed=seed))
            # A layer and a chunk of the loss.
            assert counts(engine) == {"graphs": 2, "recompilations": 0, "eager_calls": 0}


def test_nothing_is_counted_where_nothing_is_compiled():
    spec, state = tiny_state(tiny_config("llama", num_hidden_layers=1))
    with make_engine(spec, state) as engine:
        step(engine, make_batches(1))
        assert engine.compile_counts is None


def masked_attention(query_BHTE, key_BKTE, value_BKTV, cu_seqlens, *, scaling, **_):
    """By a mask of the same boundaries: the CPU's own walks over documents, as no graph can."""
    B, _, T, _ = query_BHTE.shape
    positions_N = torch.arange(B * T)
    document_BT = torch.searchsorted(cu_seqlens, positions_N, right=True).view(B, T)
    mask_BTT = (document_BT[:, :, None] == document_BT[:, None]) & torch.ones(T, T).tril().bool()
    return torch.nn.functional.scaled_dot_product_attention(
        query_BHTE, key_BKTE, value_BKTV, attn_mask=mask_BTT[:, None], scale=scaling,
        enable_gqa=True,
    )  # fmt: skip


def test_other_document_boundaries_do_not_recompile(monkeypatch):
    monkeypatch.setattr("headrace.models.attention.attend_by_document", masked_attention)
    spec, state = tiny_state(tiny_config("llama", num_hidden_layers=1))
    with make_engine(spec, state, **TRACED) as engine:
        seen = []
        for cuts in ((5,), (9,), (3, 6, 8), (1, 2, 3, 4, 5, 6)):
            engine.evaluate(make_batches(2, cuts=cuts))
            seen.append(counts(engine))
        assert seen == [seen[0]] * 4
        assert seen[0] == {"graphs": 2, "recompilations": 0, "eager_calls": 0}


def test_another_length_is_a_recompilation():
    spec, state = tiny_state(tiny_config("llama", num_hidden_layers=1))
    with make_engine(spec, state, **TRACED) as engine:
        engine.evaluate(make_batches(1, length=14))
        engine.evaluate(make_batches(1, length=10))
        assert counts(engine) == {"graphs": 4, "recompilations": 2, "eager_calls": 0}


def test_recompute_and_evaluation_are_no_recompilations():
    """Another way of calling a layer has a graph of its own."""
    spec, state = tiny_state(tiny_config("llama", num_hidden_layers=1))
    with make_engine(spec, state, activations="recompute", **TRACED) as engine:
        step(engine, make_batches(1))
        engine.evaluate(make_batches(1))
        found = counts(engine)
        assert found["graphs"] > 2
        assert found["recompilations"] == found["eager_calls"] == 0


def test_the_ninth_structure_is_compiled_too():
    """Torch's limit of graphs a code object is 8."""
    spec, state = tiny_state(tiny_config("mistral", num_hidden_layers=9))
    for index in range(9):
        spec.layer(index).self_attn.sliding_window = 20 + index  # longer than the rows
    with make_engine(spec, state, **TRACED) as engine:
        engine.evaluate(make_batches(1))
        assert counts(engine) == {"graphs": 10, "recompilations": 0, "eager_calls": 0}


@pytest.mark.parametrize(
    ("backend", "activations"),
    [
        ("test_no_compiler", "keep"),
        ("test_no_compiler", "offload"),
        ("test_no_compiler", "recompute"),
        ("test_backward_fails", "keep"),
    ],
)
def test_what_cannot_be_compiled_runs_eagerly_and_exactly(caplog, backend, activations):
    """A kept graph runs plainly: what a selective one recomputes would read stale weights."""
    spec, state = tiny_state(tiny_config("llama", tied=True, num_hidden_layers=2))
    model = reference_model(spec, state)
    batches = make_batches(2)
    loss = reference_backward(model, batches)
    settings = COMPILED | {"compile_backend": backend, "poison_slots": True}
    with (
        make_engine(spec, state, activations=activations, **settings) as engine,
        caplog.at_level(logging.WARNING),
    ):
        result = step(engine, batches)
        gradients = returned_gradients(engine)
        assert counts(engine)["eager_calls"] >= 4  # two layers of two micro-batches
        reasons = engine.compile_counts.eager_calls
    assert list(reasons) == ["RuntimeError: no C++ compiler found"]
    assert result.loss == pytest.approx(loss, abs=1e-5)
    for name, parameter in model.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 5e-5, name
    said = [r for r in caplog.records if r.name == "headrace.models.compiling"]
    assert len(said) == 1
    assert "no C++ compiler found" in said[0].getMessage()


def test_a_backend_that_does_not_exist_is_refused():
    spec, state = tiny_state(tiny_config("llama", num_hidden_layers=1))
    with pytest.raises(ConfigError, match="inductr"):
        make_engine(spec, state, compile=True, compile_backend="inductr")
