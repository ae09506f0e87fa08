"""Layers whose experts are sent in slices, on a CUDA device: the gradients of whole layers."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig

from headrace.engine import AdamWConfig, Engine, EngineConfig
from on_cuda import COMPILED_ON_CUDA
from tiny import distances, make_batch, returned_gradients, tiny_state

pytestmark = [*COMPILED_ON_CUDA, pytest.mark.slow]

SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 512,
         "max_position_embeddings": 1024, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "num_experts_per_tok": 4, "initializer_range": 0.05}  # fmt: skip
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(num_experts=16, moe_intermediate_size=128, **SIZES),
    # Biased experts of their own activation, sinks and windows.
    "gpt_oss": lambda: GptOssConfig(num_local_experts=16, sliding_window=256, **SIZES),
}


def gradients(family, dtype, **settings):
    spec, state = tiny_state(CONFIGS[family](), dtype)
    generator = torch.Generator().manual_seed(0)
    batches = [
        make_batch(torch.randint(0, 512, (2, 1024), generator=generator), cuts=(100, 612))
        for _ in range(2)
    ]
    config = EngineConfig(activations="recompute", gradient_dtype="float32", **settings)
    with Engine(spec, state, "cuda", config, AdamWConfig()) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        found = returned_gradients(engine)
        assert not engine.compile_counts or engine.compile_counts.eager_calls == {}
        engine.synchronize()
    state.close()
    return result.loss, found


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_as_exact_as_those_of_whole_layers(family, dtype):
    """In bfloat16 a rounding may send a token to another expert: whole layers are off as well."""
    exact_loss, exact = gradients(family, "float32", expert_slices=1, compile=False)
    limits, off = dict.fromkeys(exact, 1e-4), 1e-5
    if dtype == "bfloat16":
        loss, whole = gradients(family, dtype, expert_slices=1)
        limits = {name: 2 * d + 1e-2 for name, d in distances(whole, exact).items()}
        off = 2 * abs(loss / exact_loss - 1) + 1e-3
    for settings in (
        {"expert_slices": 1},
        {"expert_slices": 3, "poison_slots": True},
        {"expert_slices": 16, "micro_batches_per_wave": 1},
    ):
        loss, found = gradients(family, dtype, **settings)
        assert loss == pytest.approx(exact_loss, rel=off)
        over = {n: (d, limits[n]) for n, d in distances(found, exact).items() if d > limits[n]}
        assert over == {}, settings
