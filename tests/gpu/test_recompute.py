"""Compiled recompute on a GPU: what it leaves out changes no bit of a gradient."""

from __future__ import annotations

import pytest
import torch

from headrace.engine import AdamWConfig, Engine, EngineConfig
from headrace.models.templates import Templates
from tiny import make_batch, returned_gradients, tiny_config, tiny_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The compiler's warnings, made errors, would be reasons to run eagerly.
    pytest.mark.filterwarnings("default"),
]
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "vocab_size": 512,
         "max_position_embeddings": 1024}  # fmt: skip
CUTS = (100, 612)


def gradients(family, dtype, cuts):
    spec, state = tiny_state(tiny_config(family, **SIZES), dtype)
    generator = torch.Generator().manual_seed(0)
    batches = [
        make_batch(torch.randint(0, 512, (2, 1024), generator=generator), cuts=cuts)
        for _ in range(2)
    ]
    config = EngineConfig(activations="recompute", deterministic=True, gradient_dtype="float32")
    with Engine(spec, state, "cuda", config, AdamWConfig()) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        found = returned_gradients(engine)
        assert engine.compile_counts.eager_calls == {}
        graphs = engine.compile_counts.graphs
        engine.synchronize()
    state.close()
    return result.loss, found, graphs


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
def test_gradients_keep_their_bits(monkeypatch, family, dtype, cuts):
    loss, found, graphs = gradients(family, dtype, cuts)
    monkeypatch.setattr(Templates, "leaves_out", False)
    whole_loss, wanted, whole_graphs = gradients(family, dtype, cuts)
    assert (loss, graphs) == (whole_loss, whole_graphs)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
