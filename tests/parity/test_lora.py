"""Low-rank adapters on streamed bases: gradients, files and merging against PEFT itself."""

import pytest

from families import family_config
from headrace.models.adapters import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.selftest.adapters import check_adapters
from headrace.selftest.twin import tiny_config

MAX_GRADIENT_ERROR = 1e-5
FAMILIES = [
    "Qwen3",
    "Llama 3.2 1B",
    "Phi-3",
    "Gemma 3",
    "Granite",
    "Qwen3-MoE",
    "gpt-oss",
    "DeepSeek-V3",
    "Qwen3-Next",
    "Qwen3.5",
]


def tiny(family):
    return tiny_config(ModelSpec.from_config(family_config(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_and_merging_are_those_of_peft(family):
    found = check_adapters(tiny(family), LoraSettings(rank=3, alpha=5.0))
    assert found.error <= MAX_GRADIENT_ERROR
