"""Model configurations from which no model can be built, or not the one that was meant."""

import json
import os
from types import SimpleNamespace

import pytest

from headrace.errors import ConfigError
from headrace.models.spec import ModelSpec
from headrace.trainer import model_checks, preflight
from headrace.trainer.config import resolve

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BAD_VALUES = [
    ({"hidden_size": "wide"}, "hidden_size"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"rope_parameters": 5}, "rope_parameters"),
    ({"dtype": "float31"}, "float31"),
]
BAD_SIZES = [
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0|division or modulo by zero"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"intermediate_size": 0}, "intermediate_size is 0"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"num_key_value_heads": 3}, "do not divide"),
]


def load(model_config, **changes):
    raw = {"model_config": model_config, "datasets": [{"path": "a"}], "output_dir": "out"}
    config, _ = resolve(raw | changes)
    return preflight.load_model_config(config, None), config


@pytest.mark.parametrize(("change", "message"), [*BAD_VALUES, *BAD_SIZES])
def test_an_impossible_model_config_is_refused_by_key(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(LLAMA | change)
    assert caught.value.remedy
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ConfigError, match=message):
        load(str(tmp_path))


def test_a_misspelt_model_key_does_not_leave_a_default_in_force():
    with pytest.raises(
        ConfigError, match=r"model_config\.num_hiden_layers; did you mean num_hidden_layers\?"
    ):
        load(LLAMA | {"num_hiden_layers": 1})


def test_every_key_that_a_saved_config_holds_is_known():
    config, _ = load(LLAMA)
    again, _ = load(json.loads(config.to_json_string(use_diff=False)))
    assert again.to_dict() == config.to_dict()
    older, _ = load(LLAMA | {"rope_theta": 5e5, "torch_dtype": "bfloat16", "use_cache": False})
    assert older.rope_parameters["rope_theta"] == 5e5


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load("~/config.json")[0].hidden_size == 32


def test_a_parameter_group_that_changes_nothing_is_refused():
    model, config = load(
        LLAMA, param_groups=[{"pattern": "norm"}, {"pattern": "input_layernorm", "weight_decay": 0}]
    )
    with pytest.raises(ConfigError, match=r"param_groups\.1 .* matches no parameter"):
        model_checks.check_param_groups(config, ModelSpec.from_config(model))
    model, config = load(LLAMA, param_groups=[{"pattern": "input_layernorm"}, {"pattern": "norm"}])
    model_checks.check_param_groups(config, ModelSpec.from_config(model))


def test_a_tokenizer_that_is_not_there_is_not_called_a_model():
    raw = {"model_config": LLAMA, "datasets": [{"path": "a"}], "output_dir": "out"}
    config, _ = resolve(raw | {"tokenizer_name_or_path": "corpora/absent/tokenizer"})
    with pytest.raises(ConfigError, match=r"^tokenizer_name_or_path: 'corpora/absent/tokenizer'"):
        preflight.load_tokenizer(config)


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_a_device_that_nothing_runs_on_is_refused(name):
    with pytest.raises(ConfigError, match="on the CPU and on CUDA"):
        preflight.choose_device(name)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    gpus = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(preflight.torch, "cuda", gpus)
    assert preflight.choose_device("cuda:1").index == 1
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        preflight.choose_device("cuda:2")


def test_memory_grows_in_place_unless_the_user_says_otherwise(monkeypatch):
    """A card filled by placement runs out of memory in the holes between fixed blocks."""
    variable = "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.delenv(variable, raising=False)
    preflight.choose_device("cpu")
    assert os.environ[variable] == "expandable_segments:True"
    monkeypatch.setenv(variable, "max_split_size_mb:512")
    preflight.choose_device("cpu")
    assert os.environ[variable] == "max_split_size_mb:512"


def test_a_launcher_s_count_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "several")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        preflight.refuse_several_processes("tune")


LONG_ROPE = {
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 1024,
        "long_factor": [4.0] * 4, "short_factor": [1.0] * 4,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"max_length": 1025}, True),
        ({"max_length": 1025, "packing": False}, True),
        ({"max_length": 1024}, False),
        ({"max_length": 4096, "packing": False, "per_device_train_batch_size": 1}, False),
    ],
)
def test_rotary_frequencies_that_the_longest_document_decides(changes, refused):
    """transformers switches them for a whole micro-batch: documents would depend on others."""
    model = LLAMA | LONG_ROPE
    config, _ = resolve(
        {"model_config": model, "datasets": [{"path": "a"}], "output_dir": "out"} | changes
    )
    spec = ModelSpec.from_config(preflight.load_model_config(config, None))
    if refused:
        with pytest.raises(ConfigError, match="longrope"):
            model_checks.check_lengths(config, spec, None)
    else:
        model_checks.check_lengths(config, spec, None)
