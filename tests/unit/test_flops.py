"""Model FLOPs against counts made by hand."""

import numpy as np
import pytest

from families import family_config
from headrace.models.flops import (
    flops_per_token,
    forward_flops_per_token,
    matmul_parameters,
    step_flops,
)
from headrace.models.spec import ModelSpec
from tiny import tiny_config


def test_a_dense_model():
    spec = ModelSpec.from_config(tiny_config("llama"))
    config = spec.config
    hidden, inner = config.hidden_size, config.intermediate_size
    head = config.head_dim
    width = config.num_attention_heads * head
    groups = config.num_key_value_heads * head
    layer = hidden * (2 * width + 2 * groups) + 3 * hidden * inner
    matrices = config.num_hidden_layers * layer + config.vocab_size * hidden
    assert matmul_parameters(spec) == matrices
    attention = 6 * config.num_hidden_layers * width
    lengths = np.array([10, 20])
    assert step_flops(spec, lengths) == 6 * matrices * 30 + attention * (100 + 400)
    assert flops_per_token(spec, 20) == 6 * matrices + attention * 20


def test_experts_count_by_the_share_that_a_token_uses():
    spec = ModelSpec.from_config(family_config("Qwen3-MoE"))
    config = spec.config
    experts = sum(
        param.numel for unit in spec.units for param in unit.params if ".experts." in param.name
    )
    assert experts > 0
    whole = sum(
        param.numel for unit in spec.units[1:-1] for param in unit.params if len(param.shape) > 1
    )
    unused = experts * (1 - config.num_experts_per_tok / config.num_experts)
    head = config.vocab_size * config.hidden_size
    assert matmul_parameters(spec) == pytest.approx(whole - unused + head)


def test_layers_below_what_is_trained_go_forward_only():
    config = tiny_config("llama", num_hidden_layers=3)
    whole = ModelSpec.from_config(config)
    last = ModelSpec(config, trainable=lambda name: "layers.2." in name)
    layer = matmul_parameters(whole) - config.vocab_size * config.hidden_size
    forward, attention = forward_flops_per_token(whole, 20)
    assert forward == 2 * layer
    assert attention == 2 * 3 * config.num_attention_heads * config.head_dim * 20
    # Backward of two layers of three is missing, in their matrices and their attention.
    saved = flops_per_token(whole, 20) - flops_per_token(last, 20)
    assert saved == pytest.approx(2 / 3 * 2 * (forward + attention))


def test_a_window_bounds_what_attention_costs():
    spec = ModelSpec.from_config(tiny_config("llama"))
    full = step_flops(spec, np.array([64]))
    spec.config.sliding_window = 8
    band = step_flops(spec, np.array([64]))
    width = spec.config.num_attention_heads * spec.config.head_dim
    difference = 64**2 - (2 * 64 * 8 - 8**2)
    assert full - band == 6 * spec.num_layers * width * difference
    assert step_flops(spec, np.array([4])) < band
