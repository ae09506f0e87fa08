"""Every decoder family, proven: streamed gradients, packed documents, export and reload."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from families import FAMILIES, family_config
from headrace.models.spec import VERIFIED_FAMILIES, ModelSpec
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


def test_verified_families_are_those_of_these_tests():
    proven = {ModelSpec(family_config(name)).config.model_type for name in FAMILIES}
    assert proven == set(VERIFIED_FAMILIES)


def test_page_of_models_has_a_row_for_every_family():
    """``python docs/generate_models.py`` writes it."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"\n| {name} | `" not in text] == []


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
    "mixtral": ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refusal_with_its_reason(model_type):
    values, reason = REFUSED[model_type]
    verdict = run_selftest(AutoConfig.for_model(model_type, **values), use_cache=False)
    assert verdict.verdict == "refused"
    assert reason in verdict.reason
