"""Low-rank adapters on streamed bases: gradients, files and merging against PEFT itself."""

import peft
import pytest

from families import family_config
from headrace.errors import ModelRefusedError
from headrace.models.building import build_model
from headrace.models.lora import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.models.structure import structure
from headrace.selftest.adapters import check_adapters
from headrace.selftest.checks import relative_errors, streamed_gradients
from headrace.selftest.twin import filled_state, make_batches, tiny_config

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


def test_layers_with_the_same_adapters_share_a_template_and_a_graph():
    spec = ModelSpec.from_config(tiny("Qwen3"), lora=LoraSettings(rank=3))
    assert len({structure(layer) for layer in spec.parts.layers}) == 1
    some = ModelSpec.from_config(tiny("Qwen3"), lora=LoraSettings(rank=3, layers=(0,)))
    assert len({structure(layer) for layer in some.parts.layers}) == 2
    scaled = ModelSpec.from_config(tiny("Qwen3"), lora=LoraSettings(rank=3, use_rslora=True))
    assert structure(scaled.parts.layers[0]) != structure(spec.parts.layers[0])


@pytest.mark.parametrize(("family", "activations"), [("Qwen3", "keep"), ("Qwen3-MoE", "recompute")])
def test_compiled_layers_with_adapters(family, activations):
    """One graph a layer, weights recognised in the slot, the gradients of the eager layer."""
    spec = ModelSpec.from_config(tiny(family), lora=LoraSettings(rank=3, alpha=5.0))
    state = filled_state(spec)
    batches = make_batches(2)
    _, wanted = streamed_gradients(spec, state, batches, activations=activations)
    _, found = streamed_gradients(
        spec, state, batches, activations=activations, compile=True, compile_backend="aot_eager"
    )
    assert max(relative_errors(found, wanted).values()) <= 5e-5
    state.close()


def test_a_regular_expression_and_lists_mean_what_they_mean_to_peft():
    plain = tiny("Qwen3")
    for targets in (
        r".*layers\.0\..*q_proj",
        ("q_proj", "mlp.down_proj"),
        ("layers.1.mlp.up_proj",),
    ):
        spec = ModelSpec.from_config(plain, lora=LoraSettings(rank=2, target_modules=targets))
        config = peft.LoraConfig(
            r=2, target_modules=targets if isinstance(targets, str) else list(targets)
        )
        model = peft.inject_adapter_in_model(config, build_model(plain, device="meta"))
        wanted = {
            name.rpartition(".lora_A")[0]
            for name, _ in model.named_parameters()
            if "lora_A" in name
        }
        assert set(spec.adapters.targets) == wanted


def test_experts_get_no_adapter():
    config = tiny("Qwen3-MoE")
    spec = ModelSpec.from_config(config, lora=LoraSettings(rank=2))
    assert all("mlp" not in target for target in spec.adapters.targets)
    for name in ("gate", "experts"):
        with pytest.raises(ModelRefusedError, match="only linear layers have adapters"):
            ModelSpec.from_config(config, lora=LoraSettings(target_modules=("q_proj", name)))
    # PEFT means experts by these names even where a dense layer has them.
    dense_first = tiny("DeepSeek-V3")
    with pytest.raises(ModelRefusedError, match="fused experts"):
        ModelSpec.from_config(
            dense_first, lora=LoraSettings(target_modules=("gate_proj", "up_proj"))
        )


def test_tied_matrices_are_not_saved_as_two():
    settings = LoraSettings(modules_to_save=("embed_tokens",))
    with pytest.raises(ModelRefusedError, match="in one matrix"):
        ModelSpec.from_config(tiny("Llama 3.2 1B"), lora=settings)
    spec = ModelSpec.from_config(tiny("Qwen3"), lora=settings)
    assert [p.name for p in spec.units[0].params if p.trainable] == ["model.embed_tokens.weight"]
