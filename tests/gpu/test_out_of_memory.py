"""Device memory that really runs out: the step is tried again with smaller waves, exactly."""

from __future__ import annotations

import pytest
import torch

from headrace.engine import AdamWConfig, Engine, EngineConfig
from headrace.trainer.failures import step_with_retry
from on_cuda import COMPILED_ON_CUDA
from tiny import differing, make_batch, planes, tiny_config, tiny_state

pytestmark = [*COMPILED_ON_CUDA, pytest.mark.slow]

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 512,
         "max_position_embeddings": 1024, "tied": True}  # fmt: skip


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    return [make_batch(torch.randint(0, 512, (4, 1024), generator=generator)) for _ in range(8)]


def engine_with(spec, state, per_wave):
    config = EngineConfig(
        deterministic=True, micro_batches_per_wave=per_wave, loss_chunk_tokens=1024
    )
    return Engine(spec, state, "cuda", config, AdamWConfig())


def step(engine, seed, said):
    return step_with_retry(
        engine, batches(seed), learning_rate=1e-3, max_grad_norm=0.5, say=said.append
    )


def test_the_retry_is_the_step_with_smaller_waves():
    spec, state = tiny_state(tiny_config("llama", **SIZES), "bfloat16")
    _, expected = tiny_state(tiny_config("llama", **SIZES), "bfloat16")
    said = []
    with engine_with(spec, state, None) as engine:
        step(engine, 0, said)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(engine, 1, said)
        wanted = torch.cuda.max_memory_allocated() - before
        assert said == []
        engine.synchronize()
        torch.cuda.empty_cache()
        # A limit of this process: other processes on the device keep their memory.
        _, total = torch.cuda.mem_get_info()
        allowed = torch.cuda.memory_reserved() + int(0.75 * wanted)
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            step(engine, 2, said)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        step(engine, 3, said)
        engine.synchronize()
    assert len(said) == 1
    assert "micro_batches_per_wave: 4" in said[0]
    with engine_with(spec, expected, None) as engine:
        for seed in (0, 1):
            step(engine, seed, said)
        engine.synchronize()
    with engine_with(spec, expected, 4) as engine:
        for seed in (2, 3):
            step(engine, seed, said)
        engine.synchronize()
    assert len(said) == 1
    assert differing(planes(state), planes(expected)) == []
