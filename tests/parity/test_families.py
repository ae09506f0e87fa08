"""Every decoder family, proven: streamed gradients, packed documents, export and reload."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from families import FAMILIES, family_config
from headrace.models.shrink import shrink
from headrace.selftest import run_selftest
from headrace.selftest.checks import MAX_GRADIENT_ERROR, MAX_PACKING_LEAK


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, record_family):
    """A tiny twin of the released configuration, in float32, with poisoned slots."""
    verdict = run_selftest(family_config(family), use_cache=False)
    assert verdict.verdict == "ok", verdict.reason
    assert verdict.gradient_error <= MAX_GRADIENT_ERROR
    assert verdict.packing_leak <= MAX_PACKING_LEAK
    assert verdict.reload_error == 0
    record_family(family, verdict)


def test_page_of_models_has_a_row_for_every_family():
    """``python docs/generate_models.py`` writes it."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"\n| {name} | `" not in text] == []


NO_DROPOUT = {
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
# Not in the table of families: each has something that none of those has.
OTHERS = {
    "gpt2": NO_DROPOUT,  # Conv1D in place of Linear, learned positions
    "gpt_neox": {},  # a dropout of a classifier that it does not have; parallel residual
    "opt": NO_DROPOUT,  # calls the decoder inside its base model; a key's bias has no gradient
    "afmoe": {},  # a parameter that its class freezes
    "ernie4_5_moe": {},  # the same, in its router
    "diffllama": {},  # results of attention that cancel
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 1},  # so does its router
    "deepseek_v2": {
        "num_experts_per_tok": 6, "n_routed_experts": 64, "n_group": 8, "topk_group": 3,
        "topk_method": "group_limited_greedy", "first_k_dense_replace": 1,
    },
    # Its configuration asks for the balancing loss, which is of a micro-batch as a whole.
    "granitemoe": {
        "num_local_experts": 40, "num_experts_per_tok": 8, "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
    },
    "qwen3_next": {"mlp_only_layers": list(range(48))},  # experts in no layer
    "cohere2": {},  # logit scale, windows on three layers of four, one norm a block
}  # fmt: skip


@pytest.mark.parametrize("model_type", OTHERS)
def test_class_that_no_family_stands_for(model_type):
    config = AutoConfig.for_model(model_type)
    values = {k: v for k, v in OTHERS[model_type].items() if k in config.to_dict() or "moe" in k}
    verdict = run_selftest(AutoConfig.for_model(model_type, **values), use_cache=False)
    assert verdict.verdict == "ok", verdict.reason
    assert verdict.gradient_error <= MAX_GRADIENT_ERROR


# Sizes whose relations the tiny twin must keep, or the verdict is of another model.
RELATIONS = {
    "embeddings narrower than layers": ("opt", NO_DROPOUT | {"word_embed_proj_dim": 512,
        "hidden_size": 1024, "num_attention_heads": 16, "do_layer_norm_before": False}),
    "four tenths of a head turn": ("phi", NO_DROPOUT | {"partial_rotary_factor": 0.4,
        "hidden_size": 2560, "num_attention_heads": 32, "qk_layernorm": True}),
    "grouped heads make up the hidden size": ("helium", {"num_attention_heads": 20,
        "num_key_value_heads": 4, "head_dim": 128}),
    "three value heads a key head": ("qwen3_next", {"linear_num_key_heads": 8,
        "linear_num_value_heads": 24, "layer_types": ["linear_attention"] * 48}),
    "boundaries that layers do not hand on": ("stablelm", NO_DROPOUT),
    "convolutions before attention": ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}),
    "the same, and squared activations": ("nemotron", NO_DROPOUT | {"num_key_value_heads": 8}),
}  # fmt: skip


@pytest.mark.parametrize("case", RELATIONS)
def test_configuration_whose_sizes_depend_on_each_other(case):
    model_type, values = RELATIONS[case]
    known = AutoConfig.for_model(model_type).to_dict()
    values = {k: v for k, v in values.items() if k in known}
    verdict = run_selftest(AutoConfig.for_model(model_type, **values), use_cache=False)
    assert verdict.verdict == "ok", verdict.reason
    assert verdict.gradient_error <= MAX_GRADIENT_ERROR


def test_tiny_twin_loses_a_relation_between_sizes():
    def tiny(case):
        model_type, values = RELATIONS[case]
        return shrink(AutoConfig.for_model(model_type, **values), 2)

    narrow = tiny("embeddings narrower than layers")
    assert narrow.word_embed_proj_dim < narrow.hidden_size
    whole = tiny("grouped heads make up the hidden size")
    assert whole.num_attention_heads * whole.head_dim == whole.hidden_size
    assert whole.num_key_value_heads < whole.num_attention_heads
    three = tiny("three value heads a key head")
    assert three.linear_num_value_heads == 3 * three.linear_num_key_heads
    plain = shrink(AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=8), 2)
    assert plain.num_attention_heads == plain.num_key_value_heads


REFUSED = {
    "gemma3n_text": ({}, "passes state between layers: argument 'per_layer_input'"),
    "gemma4_text": ({}, "passes state between layers: argument 'per_layer_input'"),
    "zaya": ({}, "passes state between layers: argument 'prev_router_hidden_states'"),
    "t5": ({}, "is an encoder-decoder"),
    "whisper": ({}, "is an encoder-decoder"),
    "llama4_text": ({}, "neither causal nor a sliding window"),
    "deepseek_v32": ({}, "reads its attention mask outside the attention function"),
    "falcon": ({}, "does not take its attention from transformers' attention interface"),
    "mamba2": ({}, "packed documents see each other"),
    "gpt2": ({}, "resid_pdrop is 0.1"),
    "bert": (NO_DROPOUT, "neither causal nor a sliding window"),
    "modernbert-decoder": ({}, "between its base model and its logits"),
    "mixtral": ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refusal_with_its_reason(model_type):
    values, reason = REFUSED[model_type]
    known = AutoConfig.for_model(model_type).to_dict()
    values = {key: value for key, value in values.items() if key in known}
    verdict = run_selftest(AutoConfig.for_model(model_type, **values), use_cache=False)
    assert verdict.verdict == "refused"
    assert reason in verdict.reason
