"""Checkpoints in the form transformers writes: experts apart, other prefixes, extra tensors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import CheckpointError
from headrace.models.spec import ModelSpec
from headrace.store import checkpoint as store
from headrace.store.checkpoint import export_pretrained, load_checkpoint, save_checkpoint
from headrace.store.loading import load_pretrained
from headrace.store.state import ModelState

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MOE = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "minimax_m2", "deepseek_v3"]


def config_of(family, **values):
    return AutoConfig.for_model(family, **SIZES | values)


def saved_by_transformers(folder, family, dtype=torch.float32, **values):
    """A folder as transformers writes it, and its tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **values), dtype=dtype)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def loaded(folder, family, dtype="float32", **values):
    spec = ModelSpec(config_of(family, **values))
    state = ModelState(spec.units, dtype)
    return spec, state, load_pretrained(spec, state, folder)


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MOE)
def test_keys_and_bits_are_those_that_transformers_writes(tmp_path, family, dtype):
    """Per expert, where transformers splits its fused experts on the way out."""
    wanted = saved_by_transformers(tmp_path / "hf", family, getattr(torch, dtype))
    spec, state, report = loaded(tmp_path / "hf", family, dtype)
    assert report.ignored == ()
    export_pretrained(spec, state, tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        # What a class keeps in float32 is written as such, whatever the file held.
        assert torch.equal(tensor.float(), wanted[name].float()), name
        assert tensor.dtype in (wanted[name].dtype, torch.float32), name
    experts = [name for name in found if ".experts.0." in name]
    assert bool(experts) == (family != "gpt_oss")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MOE)
def test_checkpoint_gives_the_same_bits_back(tmp_path, family, dtype, monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 40_000)
    saved_by_transformers(tmp_path / "hf", family)
    spec, state, _ = loaded(tmp_path / "hf", family, dtype)
    for unit in state.units:
        for param in unit.layout.params:  # alignment gaps are zero, and no part of a checkpoint
            if param.trainable:
                unit.exp_avg[param.slice] = torch.rand(param.numel)
                if unit.remainder is not None:
                    low = torch.randint(-30000, 30000, (param.numel,))
                    unit.remainder[param.slice] = low.to(torch.int16)
    path = save_checkpoint(tmp_path / "run", spec, state, step=1, trainer_state={"a": 1})
    assert len(list(path.glob("model-*.safetensors"))) > 1
    again = ModelSpec(config_of(family))
    other = ModelState(again.units, dtype)
    assert load_checkpoint(path, again, other) == {"a": 1}
    for before, after in zip(state.units, other.units, strict=True):
        before.refresh_low_halves()
        after.refresh_low_halves()
        for kind in ("weights", "remainder", "exp_avg", "exp_avg_sq"):
            a, b = getattr(before, kind), getattr(after, kind)
            assert (a is None and b is None) or torch.equal(a, b), (before.layout.name, kind)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    masters = {p.name: u.stored(p).float() for u in state.units for p in u.layout.params}
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in masters.items())


def test_checkpoint_in_the_models_own_form_stays_in_it(tmp_path):
    """Fused experts in, fused experts out."""
    saved_by_transformers(tmp_path / "hf", "mixtral")
    spec, state, _ = loaded(tmp_path / "hf", "mixtral")
    fused = {p.name: u.stored(p).clone() for u in state.units for p in u.layout.params}
    save_file(fused, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    spec, state, report = loaded(tmp_path / "hf", "mixtral")
    assert report.ignored == ()
    export_pretrained(spec, state, tmp_path / "out")
    assert tensors_of(tmp_path / "out").keys() == fused.keys()


def test_missing_expert(tmp_path):
    tensors = saved_by_transformers(tmp_path, "qwen3_moe")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"do not make model\.layers\.1\.mlp\.experts"):
        loaded(tmp_path, "qwen3_moe")


def test_missing_routing_bias_is_a_fresh_one(tmp_path):
    """Converted checkpoints leave it out; it is a buffer, and no parameter is missing."""
    tensors = saved_by_transformers(tmp_path, "deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    _, state, _ = loaded(tmp_path, "deepseek_v3")
    unit = state.units[2]
    (bias,) = (p for p in unit.layout.params if p.name == name)
    assert torch.equal(unit.master(bias), torch.zeros(4))


def test_fp32_strict_values_of_a_bfloat16_model(tmp_path):
    """A routing bias keeps all its bits, in the state, in checkpoints and in exports."""
    wanted = saved_by_transformers(tmp_path / "hf", "glm4_moe")
    spec, state, _ = loaded(tmp_path / "hf", "glm4_moe", "bfloat16")
    export_pretrained(spec, state, tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    strict = sorted(name for name, tensor in found.items() if tensor.dtype == torch.float32)
    assert strict == [
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.gate.weight",
    ]
    for name in strict:
        assert torch.equal(found[name], wanted[name])
        assert not torch.equal(wanted[name].bfloat16().float(), wanted[name])


# -- tensors that the causal LM has no place for ------------------------------------------------


def with_extras(folder):
    tensors = saved_by_transformers(folder, "llama")
    extras = {
        "mtp.layers.0.weight": torch.randn(5, 3).to(torch.float16),
        "model.visual.patch.bias": torch.randn(7).to(torch.bfloat16),
        "model.visual.index": torch.arange(4),
        "model.visual.flags": torch.tensor([True, False]),
    }
    save_file(tensors | extras, folder / "model.safetensors", {"format": "pt"})
    return tensors, extras


def test_tensors_without_a_place_come_through_unchanged(tmp_path):
    tensors, extras = with_extras(tmp_path / "hf")
    spec, state, report = loaded(tmp_path / "hf", "llama")
    assert set(report.ignored) == extras.keys()
    (tmp_path / "hf" / "model.safetensors").unlink()  # the source may go while a run trains
    path = save_checkpoint(tmp_path / "run", spec, state, step=1, trainer_state={})
    export_pretrained(spec, state, tmp_path / "out")
    for folder in (path, tmp_path / "out"):
        found = tensors_of(folder)
        assert found.keys() == tensors.keys() | extras.keys()
        for name, tensor in extras.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
        AutoModelForCausalLM.from_pretrained(folder)
    record = json.loads((path / "headrace.json").read_text())
    assert record["carried"] == sorted(extras)
    # And from the checkpoint on, without the source.
    again = ModelSpec(config_of("llama"))
    other = ModelState(again.units, "float32")
    load_checkpoint(path, again, other)
    export_pretrained(again, other, tmp_path / "later")
    assert tensors_of(tmp_path / "later").keys() == tensors.keys() | extras.keys()


def test_carried_tensors_are_held_in_files_not_in_memory(tmp_path):
    with_extras(tmp_path / "hf")
    spec, _, _ = loaded(tmp_path / "hf", "llama")
    groups = spec.carried.groups()
    assert all(t.device.type == "meta" for g in groups for t in g.described.values())
    assert spec.carried.num_bytes == 5 * 3 * 2 + 7 * 2 + 4 * 8 + 2


def test_language_model_of_a_multimodal_checkpoint(tmp_path):
    """Names with another prefix are read, and written as they were, with the whole config."""
    config = AutoConfig.for_model(
        "gemma3",
        text_config={k: v for k, v in SIZES.items() if "expert" not in k} | {"head_dim": 16},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config)
    assert type(whole).__name__ == "Gemma3ForConditionalGeneration"
    whole.save_pretrained(tmp_path / "hf")
    source = load_file(tmp_path / "hf" / "model.safetensors")
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    spec = ModelSpec(config)
    state = ModelState(spec.units, "float32")
    report = load_pretrained(spec, state, tmp_path / "hf")
    assert all("vision" in name or "projector" in name for name in report.ignored)
    assert len(report.ignored) > 10
    unit, param = state.units[1], state.units[1].layout.params[0]
    unit.set_master(param, unit.master(param) + 1)
    export_pretrained(spec, state, tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    assert found.keys() == source.keys()
    changed = [name for name in found if not torch.equal(found[name], source[name])]
    assert len(changed) == 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(whole)
    text = dict(again.model.language_model.named_parameters())
    assert torch.equal(text[param.name.removeprefix("model.")], unit.master(param))
