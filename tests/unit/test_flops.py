"""Model FLOPs against counts made by hand."""

import numpy as np
import pytest
from transformers import AutoConfig

from families import family_config
from headrace.models.flops import (
    expert_counts,
    flops_per_token,
    forward_flops_per_token,
    head_sizes,
    matmul_parameters,
    step_flops,
)
from headrace.models.lora import LoraSettings
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


def test_experts_are_counted_under_the_names_of_every_class():
    config = AutoConfig.for_model(
        "aria_text", vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, moe_num_experts=8, moe_topk=2,
        pad_token_id=0,
    )  # fmt: skip
    assert expert_counts(config) == (8, 2)
    spec = ModelSpec.from_config(config)
    numel = {param.local_name: param.numel for param in spec.units[1].params}
    routed = sum(size for name, size in numel.items() if ".experts." in name)
    assert routed > 0
    layer = sum(p.numel for p in spec.units[1].params if len(p.shape) > 1) - routed * 3 / 4
    assert matmul_parameters(spec) == 2 * layer + 64 * 32


def test_latent_attention_counts_whole_queries_and_values():
    config = family_config("DeepSeek-V3")
    scores = config.qk_nope_head_dim + config.qk_rope_head_dim
    spec = ModelSpec.from_config(config)
    assert head_sizes(spec) == (scores, config.v_head_dim)
    assert config.head_dim != scores  # the rotary part alone
    # Forward: 2 FLOPs a multiply-add, half of the square.
    wanted = config.num_attention_heads * (scores + config.v_head_dim) * 20 * spec.num_layers
    assert forward_flops_per_token(spec, 20)[1] == wanted


def test_layers_below_what_is_trained_go_forward_only():
    config = tiny_config("llama", num_hidden_layers=3)
    whole = ModelSpec.from_config(config)
    last = ModelSpec(config, trainable=lambda name: "layers.2." in name)
    head = config.vocab_size * config.hidden_size
    layer = matmul_parameters(whole) - head
    forward, attention = forward_flops_per_token(whole, 20)
    assert forward == 2 * layer
    assert attention == 2 * 3 * config.num_attention_heads * config.head_dim * 20
    # Backward of two layers of three is missing, in their matrices and their attention, and the
    # gradient of the head's matrix.
    saved = flops_per_token(whole, 20) - flops_per_token(last, 20)
    assert saved == pytest.approx(2 / 3 * 2 * (forward + attention) + 2 * head)


@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_head_has_no_gradient_of_its_own(tied):
    config = tiny_config("llama", tied=tied)
    head = 2 * config.vocab_size * config.hidden_size
    found = [
        flops_per_token(ModelSpec(config, lora=LoraSettings(rank=2, modules_to_save=saved)), 20)
        for saved in ((), () if tied else ("lm_head",))
    ]
    assert found[1] - found[0] == (0 if tied else head)
    whole = ModelSpec(config)
    frozen = ModelSpec(config, trainable=lambda name: "layers" in name)
    assert flops_per_token(whole, 20) - flops_per_token(frozen, 20) == head


def test_adapters_of_experts_count_by_the_share_that_a_token_uses():
    config = family_config("Qwen3-MoE")
    lora = LoraSettings(rank=16, target_modules=(), target_parameters=("experts.down_proj",))
    adapted = matmul_parameters(ModelSpec(config, lora=lora)) - matmul_parameters(ModelSpec(config))
    used = config.num_experts_per_tok * 16 * (config.moe_intermediate_size + config.hidden_size)
    assert adapted == config.num_hidden_layers * used


def test_a_window_bounds_what_attention_costs():
    spec = ModelSpec.from_config(tiny_config("llama"))
    full = step_flops(spec, np.array([64]))
    spec.config.sliding_window = 8
    band = step_flops(spec, np.array([64]))
    width = spec.config.num_attention_heads * spec.config.head_dim
    difference = 64**2 - (2 * 64 * 8 - 8**2)
    assert full - band == 6 * spec.num_layers * width * difference
    assert step_flops(spec, np.array([4])) < band
