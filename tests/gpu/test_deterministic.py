"""``deterministic: true`` on a CUDA device, in rows long enough to add up in any order."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from headrace.engine import AdamWConfig, Engine, EngineConfig
from on_cuda import COMPILED_ON_CUDA
from tiny import differing, make_batch, planes, tiny_state

pytestmark = [*COMPILED_ON_CUDA, pytest.mark.slow]

LENGTH = 2048
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512,
         "max_position_embeddings": LENGTH, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "tie_word_embeddings": True, "initializer_range": 0.1}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CONFIGS = {
    "dense": lambda: LlamaConfig(**SIZES),
    "experts": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
}


def trained(kind, cuts):
    spec, state = tiny_state(CONFIGS[kind](), "bfloat16")
    generator = torch.Generator().manual_seed(3)
    config = EngineConfig(deterministic=True, loss_chunk_tokens=LENGTH)
    with Engine(spec, state, "cuda", config, AdamWConfig()) as engine:
        for _ in range(3):
            ids_BT = torch.randint(0, 512, (4, LENGTH), generator=generator)
            engine.step([make_batch(ids_BT, cuts=cuts)], learning_rate=1e-3, max_grad_norm=0.5)
        engine.synchronize()
    return planes(state)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("cuts", [(), (700, 1500)])
def test_two_runs_are_bitwise_equal(kind, cuts):
    assert differing(trained(kind, cuts), trained(kind, cuts)) == []
    assert not torch.are_deterministic_algorithms_enabled()
