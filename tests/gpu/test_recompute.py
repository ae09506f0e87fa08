"""Compiled recompute on a GPU: what it leaves out changes no bit of a gradient."""

from __future__ import annotations

import logging

import pytest
import torch

from families import family_config
from headrace.engine import AdamWConfig, Engine, EngineConfig
from headrace.models.spec import ModelSpec
from headrace.models.templates import Templates
from headrace.selftest import twin
from on_cuda import COMPILED_ON_CUDA
from tiny import make_batch, returned_gradients, tiny_config, tiny_state

pytestmark = [*COMPILED_ON_CUDA, pytest.mark.slow]
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "vocab_size": 512,
         "max_position_embeddings": 1024}  # fmt: skip
CUTS = (100, 612)


def gradients(spec, state, batches):
    torch.compiler.reset()  # a test's graphs do not count against the next one's limit
    config = EngineConfig(activations="recompute", deterministic=True, gradient_dtype="float32")
    with Engine(spec, state, "cuda", config, AdamWConfig()) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        found = returned_gradients(engine)
        assert engine.compile_counts.eager_calls == {}
        graphs = engine.compile_counts.graphs
        engine.synchronize()
    return (result.loss, graphs), found


def compare(spec, state, batches, monkeypatch, caplog):
    """Both ways, from the same state: the learning rate is 0."""
    with caplog.at_level(logging.WARNING, logger="headrace.models.compiling"):
        said, found = gradients(spec, state, batches)
        monkeypatch.setattr(Templates, "leaves_out", False)
        whole_said, wanted = gradients(spec, state, batches)
    state.close()
    # Where recompute could not be compiled the plain graph ran in its place, and was named.
    assert [r.getMessage() for r in caplog.records if r.name == "headrace.models.compiling"] == []
    assert said == whole_said
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize(
    ("family", "dtype", "cuts"),
    [
        ("qwen3", "bfloat16", ()),
        ("qwen3", "bfloat16", CUTS),  # packed: attention within documents
        ("mistral", "bfloat16", ()),  # a sliding window
        ("llama-bias", "bfloat16", ()),
        ("qwen3", "float32", ()),
    ],
)
def test_gradients_keep_their_bits(monkeypatch, caplog, family, dtype, cuts):
    spec, state = tiny_state(tiny_config(family, **SIZES), dtype)
    generator = torch.Generator().manual_seed(0)
    batches = [
        make_batch(torch.randint(0, 512, (2, 1024), generator=generator), cuts=cuts)
        for _ in range(2)
    ]
    compare(spec, state, batches, monkeypatch, caplog)


@pytest.mark.parametrize("family", ["Gemma 2", "Granite", "Qwen3.5"])
def test_other_layers_keep_their_bits(monkeypatch, caplog, family):
    """FlexAttention before a norm, a residual multiplier, gated DeltaNet; float32."""
    config = twin.tiny_config(ModelSpec.from_config(family_config(family)))
    spec = ModelSpec.from_config(config)
    batches = twin.make_batches(2, vocab_size=spec.vocab_size)
    compare(spec, twin.filled_state(spec), batches, monkeypatch, caplog)
