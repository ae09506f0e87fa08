"""Sizes from a configuration equal those of the module that transformers builds from it."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.models.flops import flops_per_token
from headrace.models.left_out import num_left_out
from headrace.models.lora import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.plan.architecture import read_architecture
from headrace.plan.families import FAMILIES
from headrace.plan.records import all_records, find_record, nearest_names, size_in_name

# Every size differs from every other, so that a wrong product shows.
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 320,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def sizes(family: str) -> dict[str, object]:
    values = dict(SIZES)
    if family == "deepseek_v3":
        del values["head_dim"]
        values["num_key_value_heads"] = values["num_attention_heads"]
    if family == "olmoe":  # its key norm assumes hidden / heads
        del values["head_dim"]
    return values


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parameters_counted_unlike_transformers(family, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config_class = type(transformers.AutoConfig.for_model(family))
    config = config_class(**sizes(family), tie_word_embeddings=tied)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    expected = sum(p.numel() for p in model.parameters())
    layers = sum(p.numel() for p in model.base_model.layers.parameters())
    ours = read_architecture(config.to_dict())
    assert ours.num_parameters == expected
    assert sum(x.num_parameters for x in ours.layers) == layers
    assert ours.tied == tied


def test_defaults_of_transformers_missed_where_the_config_is_silent():
    written = {"model_type": "qwen3", **sizes("qwen3"), "tie_word_embeddings": True}
    explicit = read_architecture({**written, "head_dim": 128})
    del written["head_dim"]
    assert read_architecture(written) == explicit


@pytest.mark.parametrize("record", all_records(), ids=lambda r: r.name)
def test_shipped_record_differs_from_the_published_count(record):
    published = record.published["num_parameters"]
    digits = len(published.rstrip("BM").partition(".")[2])
    scale = 1e9 if published.endswith("B") else 1e6
    ours = read_architecture(record.config).num_parameters / scale
    # A published "405B" or "1.23B" may be cut rather than rounded: one unit of the last digit.
    assert abs(ours - float(published[:-1])) < 10**-digits
    assert record.sources["config"]
    assert record.sources["num_parameters"]


def test_active_parameters_of_a_mixture_are_those_of_its_experts_in_use():
    record = find_record("openai/gpt-oss-120b")
    assert record is not None
    assert read_architecture(record.config).num_active_parameters / 1e9 == pytest.approx(
        5.13, abs=0.005
    )


def test_flops_follow_the_documented_convention():
    record = find_record("Qwen/Qwen3-8B")
    assert record is not None
    model = read_architecture(record.config)
    heads_times_dim, layers, length = 32 * 128, 36, 4096
    matmul = 6 * (model.num_parameters - model.num_embedding)
    norms = model.num_parameters - model.num_embedding - model.num_active_parameters
    attention = 6 * layers * length * heads_times_dim
    assert model.flops_per_token(length) == matmul - 6 * norms + attention


def test_sliding_window_counts_only_the_keys_it_sees():
    record = find_record("openai/gpt-oss-20b")
    assert record is not None
    model = read_architecture(record.config)
    sliding, full = model.layers[0], model.layers[1]
    assert (sliding.mixer, full.mixer) == ("sliding", "full")
    length, window = 1000, 128
    keys = sum(min(i, window) for i in range(1, length + 1)) / length
    assert sliding.attention_flops(length) == pytest.approx(2 * 2 * 64 * 64 * keys, rel=0.01)
    assert full.attention_flops(length) == 2 * 2 * 64 * 64 * length / 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model_type"),
        ({"model_type": "qwen33"}, "nearest: qwen3"),
        ({"model_type": "llama"}, "hidden_size is None"),
        ({"model_type": "llama", **SIZES, "vocab_size": -1}, "vocab_size is -1"),
        ({"model_type": "llama", **SIZES, "num_hidden_layers": 10**7}, "limit is 10,000"),
        ({"model_type": "llama", **SIZES, "num_key_value_heads": 0}, "num_key_value_heads is 0"),
        (
            {"model_type": "mixtral", **SIZES, "num_experts_per_tok": 9},
            "the limit is 8, as many as",
        ),
        ({"model_type": "llama", **SIZES, "head_dim": "x"}, "head_dim is 'x'"),
        ({"model_type": "llama", **SIZES, "layer_types": ["full_attention"]}, "1 entries"),
        ({"model_type": "llama", **SIZES, "layer_types": ["odd"] * 6}, "unknown kinds odd"),
    ],
)
def test_unusable_configuration_is_refused_with_its_reason(config, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(config)


def test_names_are_found_by_alias_short_form_and_any_case():
    base = find_record("Qwen/Qwen3.5-35B-A3B-Base")
    assert base is not None
    assert find_record("qwen3.5-35b-a3b") is base
    assert find_record("Qwen/Qwen4") is None
    assert nearest_names("Qwen3-8b-bas")[0] == "Qwen/Qwen3-8B-Base"


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Qwen/Qwen3.5-35B-A3B-Base", 35_000_000_000),
        ("HuggingFaceTB/SmolLM2-135M", 135_000_000),
        ("Qwen/Qwen3-0.6B", 600_000_000),
        ("openai/gpt-oss-120b", 120_000_000_000),
        ("/data/my-model", None),
    ],
)
def test_size_stated_by_a_name(name, size):
    assert size_in_name(name) == size


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "deepseek_v3"])
def test_plan_and_engine_count_the_same_work_and_state(family):
    transformers = pytest.importorskip("transformers")
    config_class = type(transformers.AutoConfig.for_model(family))
    config = config_class(**sizes(family), tie_word_embeddings=True)
    spec, planned = ModelSpec(config), read_architecture(config.to_dict())
    assert spec.num_parameters == planned.num_parameters
    assert flops_per_token(spec, 128) == pytest.approx(planned.flops_per_token(128))
    largest = max(unit.num_parameters for unit in spec.units[1:-1])
    assert largest == planned.largest_layer


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_plan_and_engine_leave_the_same_out_of_recompute(family):
    transformers = pytest.importorskip("transformers")
    config_class = type(transformers.AutoConfig.for_model(family))
    config = config_class(**sizes(family))
    spec, planned = ModelSpec(config), read_architecture(config.to_dict())
    engine = [num_left_out(spec, index) for index in range(spec.num_layers)]
    assert [layer.num_left_out for layer in planned.layers] == engine


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_plan_and_engine_count_the_same_adapters(family):
    transformers = pytest.importorskip("transformers")
    config_class = type(transformers.AutoConfig.for_model(family))
    config = config_class(**sizes(family))
    spec = ModelSpec(config, lora=LoraSettings(rank=3))
    planned = read_architecture(config.to_dict())
    assert spec.num_trainable_parameters == planned.num_adapter_parameters(3)
