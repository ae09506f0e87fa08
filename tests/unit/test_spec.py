"""Models taken apart: every parameter in one unit; what cannot be trained exactly is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig, T5Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from headrace.errors import ConfigError, ModelRefusedError
from headrace.models import attention
from headrace.models import spec as spec_module
from headrace.models.building import load_config
from headrace.models.spec import ModelSpec
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
        {"tail.0.weight"} if tied else {"tail.0.weight", "head.weight"}
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


def test_encoder_decoder_is_refused():
    with pytest.raises(ModelRefusedError, match="t5 is an encoder-decoder"):
        ModelSpec(T5Config())


def test_model_that_sees_ahead_is_refused():
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with pytest.raises(ModelRefusedError, match="neither causal nor a sliding window"):
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


@pytest.fixture
def change_forward(monkeypatch):
    """Lets a test change what LlamaModel does, and forget that it was examined before."""
    monkeypatch.setattr(spec_module, "_anatomies", {})

    def change(around):
        original = LlamaModel.forward

        def forward(self, **kwargs):
            return around(self, original, kwargs)

        monkeypatch.setattr(LlamaModel, "forward", forward)

    return change


def call_layers_twice(model, original, kwargs):
    original(model, **kwargs)
    return original(model, **kwargs)


def scale_the_output(model, original, kwargs):
    output = original(model, **kwargs)
    output.last_hidden_state = output.last_hidden_state * 2
    return output


def scale_between_layers(model, original, kwargs):
    handle = model.layers[0].register_forward_hook(lambda _, args, output: output * 2)
    try:
        return original(model, **kwargs)
    finally:
        handle.remove()


def pass_state(model, original, kwargs):
    seen = []
    handles = [
        model.layers[0].register_forward_hook(lambda _, args, output: seen.append(output)),
        model.layers[1].register_forward_pre_hook(
            lambda _, args, kw: (args, kw | {"earlier": seen[0]}), with_kwargs=True, prepend=True
        ),
    ]
    try:
        return original(model, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def pass_weights(model, original, kwargs):
    return original(model, **kwargs, extra=model.embed_tokens.weight * 2)


def pass_a_store(model, original, kwargs):
    return original(model, **kwargs, extra={})


def add_noise(model, original, kwargs):
    handle = model.embed_tokens.register_forward_hook(
        lambda _, args, output: output + torch.randn_like(output)
    )
    try:
        return original(model, **kwargs)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("around", "message"),
    [
        (call_layers_twice, "calls its layers more than once"),
        (scale_the_output, "computes something after its last layer"),
        (scale_between_layers, "computes something between layers 0 and 1"),
        (pass_state, "argument 'earlier' of layer 1 comes from another layer"),
        (pass_weights, "argument 'extra' of layer 0 comes from trained weights"),
        (pass_a_store, "argument 'extra' of layer 0 is a dict"),
        (add_noise, "random in training"),
    ],
)
def test_layers_that_cannot_be_streamed_are_refused(change_forward, around, message):
    change_forward(around)
    with pytest.raises(ModelRefusedError, match=message):
        ModelSpec(tiny_config("llama"))


def test_parameter_that_is_never_used_is_refused(monkeypatch):
    """Its gradient is None in plain autograd, and decay would still move it."""
    monkeypatch.setattr(spec_module, "_anatomies", {})
    original = LlamaForCausalLM.__init__

    def with_extra(self, config):
        original(self, config)
        self.model.extra = torch.nn.Linear(2, 2)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_extra)
    with pytest.raises(ModelRefusedError, match=r"does not use: extra\.weight"):
        ModelSpec(tiny_config("llama"))


def test_parameter_outside_of_base_and_head_is_refused(monkeypatch):
    original = LlamaForCausalLM.__init__

    def with_extra(self, config):
        original(self, config)
        self.extra = torch.nn.Linear(2, 2)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_extra)
    with pytest.raises(ModelRefusedError, match=r"outside .*extra\.weight"):
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
    with pytest.raises(ConfigError, match="'nobody/nothing' is neither a folder"):
        load_config("nobody/nothing")
