"""Adapters on stacked experts: PEFT's gradients, files and merged weights, and no more work."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from families import family_config
from headrace.errors import ConfigError, ModelRefusedError
from headrace.models.lora import LoraSettings
from headrace.models.slices import check_slices
from headrace.models.spec import ModelSpec
from headrace.models.structure import structure
from headrace.selftest.adapters import check_adapters
from headrace.selftest.checks import relative_errors, streamed_gradients
from headrace.selftest.reference import reference_gradients, with_adapters
from headrace.selftest.twin import filled_state, make_batches, tiny_config
from headrace.store.adapter_files import read_adapter, read_settings, write_adapter
from tiny import EXPERT_SIZES

MAX_GRADIENT_ERROR = 1e-5
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LORA = LoraSettings(rank=3, alpha=5.0, target_modules=(), target_parameters=EXPERTS)


def tiny(family):
    return tiny_config(ModelSpec.from_config(family_config(family)))


@pytest.mark.parametrize(
    ("family", "targets", "parameters"),
    [
        ("Qwen3-MoE", "all-linear", EXPERTS),
        ("gpt-oss", (), EXPERTS),  # input before output, biases
        ("DeepSeek-V3", "all-linear", EXPERTS),  # dense layers first, a shared expert
        ("Mixtral", (), ("down_proj",)),
        ("Qwen3-Next", ("q_proj",), ("experts.gate_up_proj",)),
    ],
)
def test_gradients_and_merging_are_those_of_peft(family, targets, parameters):
    settings = LoraSettings(rank=3, alpha=5.0, target_modules=targets, target_parameters=parameters)
    assert check_adapters(tiny(family), settings).error <= MAX_GRADIENT_ERROR


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "recompute"},
        {"offload_layers": 1, "micro_batches_per_wave": 1},
        {"compile": True, "compile_backend": "aot_eager"},
        {"compile": True, "compile_backend": "aot_eager", "activations": "recompute"},
    ],
)
def test_every_way_to_run_a_layer_has_the_gradients_of_peft(settings):
    """Experts without a token among them, whose adapters have zero gradients."""
    sizes = EXPERT_SIZES | {"head_dim": 16, "num_local_experts": 64}
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    spec = ModelSpec(config, lora=LORA)
    state = filled_state(spec)
    batches = make_batches(2, cuts=(4, 11))
    wanted_loss, wanted = reference_gradients(with_adapters(spec, state), batches)
    loss, found = streamed_gradients(spec, state, batches, **settings)
    state.close()
    assert loss == pytest.approx(wanted_loss, abs=2e-6)
    assert max(relative_errors(found, wanted).values()) <= 5e-5
    a = found["model.layers.0.mlp.experts.base_layer.lora_A.weight"]
    idle = [not bool(rows.any()) for rows in a.view(config.num_experts, 3, -1)]
    assert any(idle)
    assert not all(idle)


class _Stacks(TorchDispatchMode):
    """Elements of the three-dimensional tensors that operators made in compute's thread."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for made in result if isinstance(result, tuple) else (result,):
            if isinstance(made, torch.Tensor) and made.dim() == 3 and not function.is_view:
                self.elements.append(made.numel())
        return result


def test_neither_a_sum_of_the_experts_size_exists_nor_its_gradient():
    sizes = EXPERT_SIZES | {"head_dim": 16, "moe_intermediate_size": 256}
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    largest = {}
    for name, spec in (
        ("adapters", ModelSpec(config, lora=LORA)),
        ("experts", ModelSpec(config, trainable=lambda name: "experts" in name)),
    ):
        state = filled_state(spec)
        with _Stacks() as seen:
            streamed_gradients(spec, state, make_batches(1))
        state.close()
        largest[name] = max(seen.elements)
    experts = config.num_experts * config.moe_intermediate_size * config.hidden_size
    assert largest["adapters"] < experts <= largest["experts"]


def test_layers_with_the_same_adapters_share_a_template():
    config = AutoConfig.for_model("qwen3_moe", **EXPERT_SIZES)
    layers = ModelSpec(config, lora=LORA).parts.layers
    assert len({structure(layer) for layer in layers}) == 1
    some = LoraSettings(rank=3, target_modules=(), target_parameters=EXPERTS, layers=(0,))
    spec = ModelSpec(config, lora=some)
    assert spec.adapters.parameters == tuple(f"model.layers.0.{name}" for name in EXPERTS)
    assert len({structure(layer) for layer in spec.parts.layers}) == 2


def test_settings_and_values_come_back_from_the_files(tmp_path):
    spec = ModelSpec(AutoConfig.for_model("mixtral", **EXPERT_SIZES), lora=LORA)
    state = filled_state(spec)
    write_adapter(tmp_path, spec, state)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(saved["target_parameters"]) == ["down_proj", "gate_up_proj"]
    settings = read_settings(tmp_path)
    assert settings.target_modules == ()
    again = ModelSpec(spec.config, lora=settings)
    assert again.adapters.parameters == spec.adapters.parameters
    other = filled_state(again, seed=5)
    read_adapter(tmp_path, other)
    for unit, same in zip(state.units, other.units, strict=True):
        for param in unit.layout.params:
            if param.adapter:
                assert torch.equal(unit.master(param), same.master(param))
    state.close()
    other.close()


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("Qwen3-MoE", {"target_parameters": ("experts.up_proj",)}, "its stacked experts have mlp"),
        ("Qwen3-MoE", {"target_parameters": ("mlp.gate.weight",)}, "no parameter of stacked"),
        ("gpt-oss", {"target_parameters": ("gate_up_proj_bias",)}, "no parameter of stacked"),
        ("Qwen3", {"target_parameters": EXPERTS}, "the model has no stacked experts"),
        ("DeepSeek-V3", {"target_parameters": EXPERTS, "layers": (0,)}, "in the layers asked for"),
        ("Qwen3-MoE", {"target_parameters": EXPERTS, "modules_to_save": ("experts",)}, "whole"),
        ("DeepSeek-V3", {"target_modules": ("gate_proj", "up_proj")}, "lora_target_parameters: "),
    ],
)
def test_what_experts_cannot_have_is_refused(family, keys, message):
    with pytest.raises((ConfigError, ModelRefusedError), match=message) as refused:
        ModelSpec.from_config(tiny(family), lora=LoraSettings(**keys))
    assert refused.value.remedy


def test_dropout_is_refused_as_by_peft():
    with pytest.raises(ConfigError, match="PEFT has none"):
        LoraSettings(dropout=0.1, target_parameters=EXPERTS)


def test_layers_whose_experts_have_adapters_are_not_sliced():
    spec = ModelSpec(AutoConfig.for_model("mixtral", **EXPERT_SIZES), lora=LORA)
    assert not spec.experts
    with pytest.raises(ConfigError, match=r"down_proj has adapters, which are sent with"):
        check_slices(spec, 2)
