"""Models taken apart: every parameter in one unit; what cannot be trained exactly is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from headrace.errors import ConfigError, ModelRefusedError
from headrace.models import attention
from headrace.models.spec import ModelSpec, find_parts, load_config
from tiny import make_batches, make_engine, tiny_config, tiny_state

FAMILIES = ["qwen3", "llama", "llama-bias", "mistral", "qwen2"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_in_one_unit(family, tied):
    config = tiny_config(family, tied=tied)
    spec = ModelSpec(config)
    reference = {
        name: tuple(p.shape)
        for name, p in AutoModelForCausalLM.from_config(config).named_parameters()
    }
    names = list(spec.parameter_names())
    assert len(names) == len(set(names))
    assert {p.name: p.shape for unit in spec.units for p in unit.params} == reference
    assert spec.tied == tied
    assert spec.num_parameters == sum(torch.Size(shape).numel() for shape in reference.values())
    assert [unit.name for unit in spec.units] == [
        "embed",
        "layers.0",
        "layers.1",
        "layers.2",
        "head",
    ]
    assert {p.local_name for p in spec.units[-1].params} == (
        {"norm.weight"} if tied else {"norm.weight", "head.weight"}
    )
    assert all(".layers.1." in p.name for p in spec.units[2].params)


def test_sizes():
    spec = ModelSpec(tiny_config(num_hidden_layers=5))
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (5, 32, 96)


def test_nothing_is_allocated():
    """A model of 80 billion parameters is taken apart without memory."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, num_attention_heads=64
    )
    spec = ModelSpec(config)
    assert spec.num_parameters > 3e9
    assert all(p.device.type == "meta" for p in spec.model.parameters())


def test_layouts_of_layers_agree():
    """One slot layout, one template: every layer's local names lie at the same offsets."""
    spec = ModelSpec(tiny_config())
    places = [[(p.local_name, p.offset, p.shape) for p in unit.params] for unit in spec.units[1:-1]]
    assert places[0] == places[1] == places[2]


def test_trainable_is_asked_by_name():
    spec = ModelSpec(tiny_config(), trainable=lambda name: name.endswith("norm.weight"))
    trained = [p.name for unit in spec.units for p in unit.params if p.trainable]
    assert trained
    assert all(name.endswith("norm.weight") for name in trained)


def test_configuration_shared_with_another_model():
    """Building a model from the spec's configuration leaves the engine's attention alone.

    transformers writes the attention it was asked for into the configuration it was given.
    """
    config = tiny_config("mistral")
    spec, state = tiny_state(config)
    batches = make_batches(1, cuts=(3,))
    losses = []
    for other in (None, spec.config, config):
        if other is not None:
            AutoModelForCausalLM.from_config(other, attn_implementation="eager")
        with make_engine(spec, state) as engine:
            losses.append(engine.evaluate(batches).loss_sum)
        assert spec.parts.base.config._attn_implementation == attention.IMPLEMENTATION
    assert losses[0] == losses[1] == losses[2]


def test_given_configuration_is_not_changed():
    config = tiny_config()
    before = config.to_dict()
    ModelSpec(config)
    assert config.to_dict() == before
    assert config._attn_implementation != attention.IMPLEMENTATION


# -- refusals ------------------------------------------------------------------------------


def test_dropout_is_refused():
    with pytest.raises(ModelRefusedError, match=r"attention_dropout is 0\.1"):
        ModelSpec(tiny_config("llama", attention_dropout=0.1))


@pytest.mark.parametrize(
    ("config", "family"), [(GPT2Config(), "gpt2"), (MixtralConfig(), "mixtral")]
)
def test_unknown_family_is_refused(config, family):
    """With the families that are verified."""
    with pytest.raises(ModelRefusedError, match=f"'{family}' .*llama, mistral, qwen2, qwen3"):
        ModelSpec(config)


def test_quantized_weights_are_refused():
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ModelRefusedError, match="quantized"):
        ModelSpec(config)


def test_attention_with_a_mask_is_refused():
    """A model that builds a mask of its own meets an error in its first layer, not silence."""
    spec, state = tiny_state(tiny_config())
    with make_engine(spec, state) as engine:
        run = engine._passes._templates.run

        def masked(index, parameters, hidden, arguments, **kwargs):
            arguments = arguments | {"attention_mask": torch.ones(1, 1, 14, 14)}
            return run(index, parameters, hidden, arguments, **kwargs)

        engine._passes._templates.run = masked
        with pytest.raises(ModelRefusedError, match="asks for an attention mask"):
            engine.evaluate(make_batches(1))


def changed_model(change):
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_config("llama"))
    change(model)
    return model


def set_head_bias(model):
    model.lm_head = torch.nn.Linear(32, 96, bias=True, device="meta")


def rename_layers(model):
    model.model.blocks = model.model.layers
    del model.model.layers


def drop_norm(model):
    del model.model.norm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_head_bias, "head that is not a linear layer without bias"),
        (rename_layers, "not laid out as embedding, 'layers'"),
        (drop_norm, "not laid out as embedding, 'layers'"),
    ],
)
def test_other_structures_are_refused(change, message):
    with pytest.raises(ModelRefusedError, match=message):
        find_parts(changed_model(change))


def test_parameters_outside_of_the_units_are_refused(monkeypatch):
    original = LlamaForCausalLM.__init__

    def with_extra(self, config):
        original(self, config)
        self.model.extra = torch.nn.Linear(2, 2)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_extra)
    with pytest.raises(ModelRefusedError, match=r"outside .*model\.extra\.weight"):
        ModelSpec(tiny_config("llama"))


# -- reading configurations ----------------------------------------------------------------


def test_configuration_of_a_folder_or_file(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        assert load_config(str(source)).model_type == "qwen3"
    assert ModelSpec.from_pretrained(str(tmp_path)).num_layers == 3
    assert ModelSpec.from_config(tiny_config()).num_layers == 3


@pytest.mark.parametrize("text", [None, "{", "{}", json.dumps({"model_type": "no-such-model"})])
def test_folder_without_a_configuration(tmp_path, text):
    folder = tmp_path / "model"
    folder.mkdir()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="no model configuration"):
        load_config(str(folder))


def test_name_that_is_not_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="no model configuration at 'nobody/nothing'"):
        load_config("nobody/nothing")
