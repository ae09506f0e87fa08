"""Adapters on stacked experts: PEFT's gradients, files and merged weights, and no more work."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from families import family_config
from headrace.errors import ConfigError, DataError, ModelRefusedError
from headrace.models.lora import LoraSettings
from headrace.models.slices import check_slices
from headrace.models.spec import ModelSpec
from headrace.models.structure import structure
from headrace.selftest.adapters import check_adapters, tiny_settings
from headrace.selftest.checks import CheckFailedError, relative_errors, streamed_gradients
from headrace.selftest.reference import reference_gradients, reference_model, with_adapters
from headrace.selftest.twin import filled_state, make_batches, tiny_config
from headrace.store.adapter_files import (
    initialise_adapters,
    read_adapter,
    read_settings,
    write_adapter,
)
from headrace.trainer.config import checked
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


@pytest.mark.parametrize(("rank", "copies"), [(8, 2), (5, 4)])
def test_a_kept_layer_holds_no_more_copies_of_adapters_than_products_need(rank, copies):
    """B's experts lie side by side, and are copied; A only to fill up its rank."""
    settings = replace(LORA, rank=rank)
    config = AutoConfig.for_model("qwen3_moe", **EXPERT_SIZES | {"head_dim": 16})
    experts = ModelSpec(config, lora=settings).parts.layers[0].mlp.experts
    experts = experts.to_empty(device="cpu").float()
    stacks = set()
    for name, parameter in experts.named_parameters():
        torch.nn.init.ones_(parameter.requires_grad_("lora" in name))
        stacks.add(parameter.untyped_storage().data_ptr())

    def saved(tensor):
        if tensor.dim() == 3 and tensor.untyped_storage().data_ptr() not in stacks:
            stacks.add(tensor.untyped_storage().data_ptr())
            made.append(tensor)
        return tensor

    made = []
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        chosen_NK = torch.tensor([[0, 1], [2, 3]])
        experts(torch.ones(2, config.hidden_size), chosen_NK, torch.ones(2, 2))
    assert len(made) == copies


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
        ("Qwen3-MoE", {"target_modules": ("gate_proj", "up_proj")}, r"lora_target_parameters: \["),
        ("Mixtral", {"target_modules": ("w1", "w2", "w3")}, r"lora_target_parameters: \["),
    ],
)
def test_what_experts_cannot_have_is_refused(family, keys, message):
    with pytest.raises((ConfigError, ModelRefusedError), match=message) as refused:
        ModelSpec.from_config(tiny(family), lora=LoraSettings(**keys))
    assert refused.value.remedy


LORA_KEYS = {
    "model_name_or_path": "model", "datasets": [{"path": "d"}], "output_dir": "o",
    "adapter": "lora",
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_dropout": 0.1, "lora_target_parameters": list(EXPERTS)}, "PEFT has none"),
        ({"lora_target_parameters": [""]}, "an empty name"),
        ({"lora_modules_to_save": "gate,"}, "an empty name"),
    ],
)
def test_keys_that_no_model_can_have_are_refused_before_one_is_read(keys, message):
    with pytest.raises(ConfigError, match=message) as refused:
        checked(LORA_KEYS | keys)
    assert refused.value.remedy


def test_names_may_be_one_text_as_in_other_trainers_files():
    keys = {"lora_target_parameters": EXPERTS[0], "lora_modules_to_save": "embed_tokens, gate"}
    settings = checked(LORA_KEYS | keys).lora_settings()
    assert settings.target_parameters == EXPERTS[:1]
    assert settings.modules_to_save == ("embed_tokens", "gate")


def test_layers_whose_experts_have_adapters_are_not_sliced():
    spec = ModelSpec(AutoConfig.for_model("mixtral", **EXPERT_SIZES), lora=LORA)
    assert not spec.experts
    with pytest.raises(ConfigError, match=r"down_proj has adapters, which are sent with"):
        check_slices(spec, 2)


class TestAdaptersThatPeftWrote:
    """``lora_model_dir``: whatever PEFT makes of a configuration, the file is gone on from."""

    @staticmethod
    def write(config, folder, **keys):
        """Save PEFT's own adapters on a model's own weights; returns all it was made of."""
        plain = ModelSpec(config)
        state = filled_state(plain)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(reference_model(plain, state), LoraConfig(**keys))
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn(parameter.shape)
        model.save_pretrained(folder)
        return state, model.base_model.model

    @pytest.mark.parametrize(
        "keys",
        [
            # PEFT turns these into adapters on stacks, of twice the rank where two are one.
            {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
            {
                "target_modules": ["q_proj"],
                "target_parameters": list(EXPERTS),
                "rank_pattern": {"gate_up_proj": 3},
                "alpha_pattern": {"layers.1.self_attn.q_proj": 2},
            },
            # PEFT's key is for modules alone.
            {
                "target_modules": ["q_proj"],
                "target_parameters": list(EXPERTS),
                "layers_to_transform": [1],
            },
        ],
        ids=["converted", "patterns", "layers"],
    )
    def test_have_the_gradients_of_peft(self, tmp_path, keys):
        config = AutoConfig.for_model("qwen3_moe", **EXPERT_SIZES | {"head_dim": 16})
        base, model = self.write(config, tmp_path, **keys)
        settings = read_settings(tmp_path)
        spec = ModelSpec(config, lora=settings)
        state = filled_state(spec)
        for unit, same in zip(state.units, base.units, strict=True):
            values = {param.name: same.master(param) for param in same.layout.params}
            for param in unit.layout.params:
                if not param.adapter:
                    unit.set_master(param, values[param.name])
        read_adapter(tmp_path, state)
        batches = make_batches(2, cuts=(4, 11))
        wanted_loss, wanted = reference_gradients(model, batches)
        loss, found = streamed_gradients(spec, state, batches)
        assert loss == pytest.approx(wanted_loss, abs=2e-6)
        assert max(relative_errors(found, wanted).values()) <= MAX_GRADIENT_ERROR
        again_loss, _ = reference_gradients(with_adapters(spec, state), batches)
        assert again_loss == wanted_loss
        assert check_adapters(tiny_config(spec), tiny_settings(spec.adapters)).error <= 1e-5
        base.close()
        state.close()

    @pytest.mark.parametrize("entry", [{"r": None}, {"rank_pattern": {"q_proj": "x"}}])
    def test_a_file_that_is_not_as_peft_writes_it_is_refused(self, tmp_path, entry):
        values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | entry
        (tmp_path / "adapter_config.json").write_text(json.dumps(values))
        with pytest.raises(DataError, match="not as PEFT writes it"):
            read_settings(tmp_path)


@pytest.mark.parametrize("initialisation", ["default", "gaussian"])
def test_every_expert_begins_as_in_peft(initialisation):
    settings = replace(LORA, rank=4, initialisation=initialisation)
    spec = ModelSpec(AutoConfig.for_model("mixtral", **EXPERT_SIZES), lora=settings)
    state = filled_state(spec)
    initialise_adapters(spec, state, seed=0)
    for unit in state.units:
        for param in unit.layout.params:
            if not param.adapter:
                continue
            value = unit.master(param)
            if ".lora_B." in param.name:
                assert not value.any()
            elif initialisation == "gaussian":
                assert value.std() == pytest.approx(1 / settings.rank, rel=0.1)
            else:
                bound = param.shape[1] ** -0.5
                assert 0.95 * bound < value.abs().max() <= bound
    state.close()


def test_an_adapter_that_peft_loses_on_loading_is_named():
    """transformers renames ``shared_expert.`` of this class, by a pattern whose dot means any."""
    spec = ModelSpec.from_config(AutoConfig.for_model("laguna"))
    settings = LoraSettings(rank=2, target_modules=("shared_experts.up_proj",))
    with pytest.raises(CheckFailedError, match=r"does not load .*shared_experts\.up_proj\.lora_A"):
        check_adapters(tiny_config(spec), settings)
