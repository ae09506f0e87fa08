"""Every decoder family, proven: streamed gradients, packed documents, export and reload."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from families import FAMILIES, family_config
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


REFUSED = {
    "gemma3n_text": ({}, "passes state between layers: argument 'per_layer_input'"),
    "gemma4_text": ({}, "passes state between layers: argument 'per_layer_input'"),
    "zaya": ({}, "passes state between layers: argument 'prev_router_hidden_states'"),
    "t5": ({}, "is an encoder-decoder"),
    "whisper": ({}, "is an encoder-decoder"),
    "llama4_text": ({}, "neither causal nor a sliding window"),
    "deepseek_v32": ({}, "reads its attention mask outside the attention function"),
    "falcon": ({}, "does not take its attention from transformers' attention interface"),
    "stablelm": ({}, "packed documents see each other"),
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
