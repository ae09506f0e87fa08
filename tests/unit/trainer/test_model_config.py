"""Model configurations from which no model can be built, or not the one that was meant."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from headrace.errors import ConfigError, ModelRefusedError
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
    ({"vocab_size": 10**12}, "vocab_size is 1,000,000,000,000; the limit is 2,147,483,648"),
    ({"num_hidden_layers": 20_000}, "num_hidden_layers is 20,000; the limit is 10,000"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is no number"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta is no"),
]
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4}


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


@pytest.mark.parametrize("chosen", [0, 5])
def test_tokens_cannot_go_to_more_experts_than_there_are(chosen):
    with pytest.raises(ConfigError, match=f"each token to {chosen} of 4 experts"):
        load(MIXTRAL | {"num_experts_per_tok": chosen})
    load(MIXTRAL | {"num_experts_per_tok": 4})


def test_sizes_that_differ_between_layers_are_no_error_of_the_configuration():
    load({"model_type": "gemma4_text"})  # has a head_dim for each layer; whether it trains is next


def test_a_model_that_cannot_be_built_says_what_was_raised():
    config, _ = load(LLAMA | {"hidden_act": "relv"})
    with pytest.raises(ModelRefusedError, match="KeyError: 'relv'"):
        ModelSpec.from_config(config)


def test_a_token_that_pads_outside_the_vocabulary_is_refused_with_its_reason():
    config, _ = load(LLAMA | {"pad_token_id": 64})
    with pytest.raises(ModelRefusedError, match=r"cannot build .* Padding_idx"):
        ModelSpec.from_config(config)


def _tokenizer_of(folder, **changes):
    raw = {"model_name_or_path": str(folder), "datasets": [{"path": "a"}], "output_dir": "out"}
    config, _ = resolve(raw | changes)
    return preflight.load_tokenizer(config)


@pytest.mark.parametrize("family", ["qwen3", "gemma", "gemma3_text", "cohere", "gpt2"])
def test_a_model_without_its_tokenizer_files_is_not_trained_on_special_tokens(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ConfigError, match=r"no tokenizer in .* none of text") as caught:
        _tokenizer_of(tmp_path)
    assert "tokenizer_name_or_path" in caught.value.remedy
    tokens = {"datasets": [{"path": "a", "type": "tokens"}]}
    assert _tokenizer_of(tmp_path, **tokens) is None  # nothing asks for one


@pytest.mark.parametrize(
    ("file", "text"),
    [("tokenizer_config.json", "[]"), ("tokenizer.json", "{}"), ("tokenizer.json", '{"model": 3}')],
)
def test_damaged_tokenizer_files_are_named(tmp_path, tokenizer_dir, file, text):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    _tokenizer_of(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match="no tokenizer in"):
        _tokenizer_of(tmp_path)


BROKEN = [{"dtype": "zzz"}, {"quantization_config": "x"}]


@pytest.mark.parametrize("text", ["", "[]", *(json.dumps(LLAMA | bad) for bad in BROKEN)])
def test_a_broken_configuration_is_not_called_a_missing_tokenizer(tmp_path, tokenizer_dir, text):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no model configuration at"):
        _tokenizer_of(tmp_path)


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
