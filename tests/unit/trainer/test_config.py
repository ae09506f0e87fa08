"""Configurations: every key is honoured, translated with a note, or refused."""

import json

import pytest
import yaml
from transformers import TrainerState, TrainingArguments

from headrace.engine.config import EngineConfig
from headrace.errors import ConfigError
from headrace.trainer.config import TrainConfig, resolve
from headrace.trainer.prepare import loop_settings
from headrace.trainer.schema import json_schema

BASE = {"model_name_or_path": "m", "datasets": [{"path": "a.jsonl"}], "output_dir": "out"}


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rat": 1}, "unknown key learning_rat; did you mean learning_rate?"),
        ({"engine": {"activation": "keep"}}, "engine.activation; did you mean activations?"),
        ({"datasets": [{"path": "a", "kind": "x"}]}, "datasets.0.kind"),
        ({"param_groups": [{"pattrn": "x"}]}, "param_groups.0.pattrn; did you mean pattern?"),
        ({"qqqq": 1}, "unknown key qqqq; known:"),
        ({"learning_rate": -1}, "learning_rate: .*greater than 0"),
        ({"learning_rate": float("inf")}, "learning_rate: .*finite"),
        ({"learning_rate": True}, "learning_rate: .*not true or false"),
        ({"max_steps": True}, "max_steps: .*not true or false"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"logging_steps": 1.5}, "logging_steps: .*count of steps"),
        ({"save_steps": float("inf")}, "save_steps"),
        ({"seed": 10**30}, "seed"),
        ({"output_dir": ""}, "output_dir: .*name of a folder"),
        ({"output_dir": "a\0b"}, "output_dir: .*name of a folder"),
        ({"output_dir": "~nobody-of-this-name/x"}, "output_dir: .*home"),
        ({"learning_rate": 2, "weight_decay": 0.6}, "decay weights through zero"),
        (
            {"learning_rate": 1, "param_groups": [{"pattern": "a", "weight_decay": 1}]},
            "param_groups.0: .*through zero",
        ),
        ({"param_groups": [{"pattern": "a", "weight_decay": -1}]}, "weight_decay is -1"),
        ({"param_groups": [{"pattern": "a", "learning_rate_scale": -1}]}, "scale is -1"),
        ({1: 2}, "the key 1 is no name"),
        ({"optim": ["adamw"]}, "optim: .* is refused"),
        ({"datasets": [{"path": "a", "type": ["text"]}]}, "datasets.0.type"),
        ({"learning_rate": "fast"}, "learning_rate: .*number.*got 'fast'"),
        ({"max_length": 1}, "max_length"),
        ({"datasets": []}, "datasets: .*at least 1"),
        ({"datasets": [{"type": "text"}]}, "datasets.0.path is missing"),
        ({"datasets": [{"path": "a", "type": "chat"}]}, "datasets.0.type"),
        ({"output_dir": None}, "output_dir"),
        ({"dtype": "float16"}, "dtype"),
        ({"engine": {"activations": "sometimes"}}, "engine.activations"),
        ({"engine": {"weight_slots": 1}}, "at least 2"),
        ({"engine": {"chunk_bytes": "64 lightyears"}}, "not a size in bytes"),
        ({"async_save_memory": 64}, "async_save_memory: 64 has no unit"),
        ({"model_config": {"model_type": "llama"}}, "both are given"),
        ({"model_name_or_path": None}, "neither is given"),
        ({"lr_scheduler_type": "cosin"}, "use cosine"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "could not be repeated"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs a floor"),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, "exclude each other"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"eval_steps": 10}, "no eval_datasets"),
        ({"eval_datasets": [{"path": "b"}, {"path": "b"}]}, "same name"),
        ({"packing_strategy": "wrapped", "excess_length": "drop"}, "has no effect"),
        ({"save_total_limit": 0}, "save_total_limit"),
        ({"param_groups": [{"pattern": "("}]}, "is no regular expression"),
        ({"param_groups": [{"pattern": "x", "weight_decay": True}]}, "not true or false"),
        ({"engine": {"gradient_slots": True}}, "not true or false"),
        ({"datasets": [{"path": "a", "weight": True}]}, "not true or false"),
        ({"adam_epsilon": 1e-300}, "adam_epsilon is 1e-300"),
        ({"gguf_file": "x", "model_name_or_path": None, "model_config": "c"}, "gguf_file"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(BASE | change)
    assert caught.value.exit_code == 2
    assert caught.value.remedy


def test_several_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"(?s)seed.*learning_rate"):
        resolve(BASE | {"learning_rate": "x", "seed": "y"})
    with pytest.raises(ConfigError, match=r"(?s)max_lenght; did you mean max_length.*sed"):
        resolve(BASE | {"max_lenght": 1, "sed": 1})


def test_a_required_key_is_named():
    with pytest.raises(ConfigError, match="output_dir is missing"):
        resolve({"model_name_or_path": "m", "datasets": [{"path": "a"}]})


def test_the_resolved_configuration_resolves_to_itself(tmp_path):
    config, _ = resolve(
        BASE
        | {
            "learning_rate": "3e-4",
            "lr_scheduler_kwargs": {"num_cycles": 1},
            "lr_scheduler_type": "cosine",
            "param_groups": [{"pattern": "norm", "learning_rate_scale": 2}],
            "engine": {"chunk_bytes": "1MiB", "activations": "recompute"},
            "data_cache_dir": "/tmp/cache",
            "report_to": "tensorboard",
        }
    )
    assert config.learning_rate == 3e-4
    assert config.engine == EngineConfig(chunk_bytes=1 << 20, activations="recompute")
    again, notes = resolve(write(tmp_path, config.to_yaml()))
    assert again == config
    assert notes == []
    assert resolve(config)[0] == config


def test_overrides_reach_into_mappings_and_lists(tmp_path):
    path = write(tmp_path, yaml.safe_dump(BASE))
    config, _ = resolve(
        path,
        [
            "learning_rate=1e-4", "engine.activations=recompute", "datasets.0.path=b.jsonl",
            "eval_datasets=[{path: c.jsonl}]", "run_name=", "packing=false", "save_steps=0.1",
            "lr_scheduler_kwargs.num_cycles=2", "lr_scheduler_type=cosine",
        ],
    )  # fmt: skip
    assert (config.learning_rate, config.engine.activations) == (1e-4, "recompute")
    assert (config.datasets[0].path, config.eval_datasets[0].path) == ("b.jsonl", "c.jsonl")
    assert (config.run_name, config.packing, config.save_steps) == (None, False, 0.1)
    assert config.lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rate", "is not key=value"),
        ("=3", "is not key=value"),
        ("datasets.7.path=x", "no index into a list of 1"),
        ("datasets.first.path=x", "no index"),
        ("datasets.².path=x", "no index"),
        ("datasets.0.path.deep=x", "path is 'a', which has no parts"),
        ("report_to.0.deep=x", "report_to.0 has no parts"),
        ("seed=[1", "not YAML"),
        ("run_name=2021-13-45", "not YAML"),
        ("model_name_or_path.hidden_size=8", "'m', which has no parts"),
        ("sede=1", "did you mean seed"),
    ],
)
def test_an_override_that_goes_nowhere_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        resolve(BASE | {"datasets": [{"path": "a"}], "report_to": ["wandb"]}, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "is not YAML"),
        ("- 1\n", "holds list, not keys"),
        ("", "holds NoneType"),
        ("? [a]\n: b\n", "run.yaml:1: a key is a list"),
        ("run_name: 2021-13-45\n", "is not YAML: month"),
        ("a: \0\n", "is not YAML"),
        ("seed: 1\nlearning_rate: 1\nseed: 2\n", r"run.yaml:3: seed is given twice"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        resolve(write(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        resolve(tmp_path / "absent.yaml")


def test_keys_of_other_trainers_are_translated_with_a_note():
    axolotl = {
        "base_model": "m",
        "datasets": [{"path": "a.jsonl", "ds_type": "json", "type": "completion", "field": "body"}],
        "sequence_len": 4096,
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_epochs": 1,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "learning_rate": 0.0002,
        "bf16": "auto",
        "tf32": False,
        "gradient_checkpointing": True,
        "flash_attention": True,
        "load_in_8bit": False,
        "adapter": None,
        "lora_r": None,
        "val_set_size": 0.0,
        "wandb_project": "x",
        "deepspeed": None,
        "strict": False,
        "output_dir": "out",
    }
    config, notes = resolve(axolotl)
    expected = resolve(
        {
            "model_name_or_path": "m",
            "datasets": [{"path": "a.jsonl", "type": "text", "text_field": "body"}],
            "max_length": 4096,
            "packing": True,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 1,
            "lr_scheduler_type": "cosine",
            "learning_rate": 0.0002,
            "engine": {"activations": "recompute"},
            "output_dir": "out",
        }
    )[0]
    assert config == expected
    # Everything but the canonical keys was said.
    said = " ".join(notes)
    canonical = {"datasets", "gradient_accumulation_steps", "learning_rate", "output_dir"}
    canonical.add("val_set_size")
    for key in axolotl:
        assert (key in said) != (key in canonical - {"datasets"}), key
    llama_factory = {
        "model_name_or_path": "m", "stage": "pt", "do_train": True, "finetuning_type": "full",
        "datasets": [{"path": "a"}], "cutoff_len": 2048, "output_dir": "out", "bf16": True,
        "plot_loss": True, "ddp_timeout": 180000000, "overwrite_cache": True,
        "preprocessing_num_workers": 2, "warmup_ratio": 0.1, "overwrite_output_dir": True,
        "eval_strategy": "no", "deepspeed": "", "resume_from_checkpoint": None,
    }  # fmt: skip
    assert resolve(llama_factory)[0].max_length == 2048


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("deepspeed", "ds.json", "replaces DeepSpeed"),
        ("load_in_4bit", True, "plain weights"),
        ("adapter", "qlora", "unquantised"),
        ("finetuning_type", "freeze", "unfrozen_parameters"),
        ("loraplus_lr_ratio", 16, "one learning rate"),
        ("fp16", True, "overflow"),
        ("optimizer", "lion_32bit", "float32 moments"),
        ("rl", "dpo", "next token"),
        ("fsdp", ["full_shard"], "replaces FSDP"),
        ("sequence_parallel_degree", 2, "stays on one GPU"),
        ("plugins", ["axolotl.integrations.spectrum.SpectrumPlugin"], "change its trainer"),
        ("mix_strategy", "interleave_under", "weighted by tokens"),
        ("mask_history", True, "train: false in a message"),
        ("use_galore", True, "headrace has AdamW"),
        ("use_dynamic_finetuning", True, "cross-entropy"),
        ("use_eaft_loss", True, "cross-entropy"),
        ("quantize_moe_experts", True, "bfloat16 or float32"),
        ("float16", True, "overflow"),
        ("new_special_tokens_config", "tokens.yaml", "the vocabulary is the model's"),
        ("profiler_steps", 5, "--trace"),
        ("push_to_hub", True, "sends nothing"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(key, value, reason):
    foreign = {"plugins": "base_model", "mix_strategy": "cutoff_len"}.get(key)
    settings = BASE | {key: value}
    if foreign == "base_model":
        settings["base_model"] = settings.pop("model_name_or_path")
    elif foreign:
        settings["cutoff_len"] = 64
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve(settings)
    assert caught.value.remedy
    if key in {"deepspeed", "fsdp"}:  # the file may stay as it is
        assert f"add {key}=" in caught.value.remedy
        resolve(settings, [f"{key}="])


@pytest.mark.parametrize(
    "keys",
    [
        {"base_model": "m", "eot_tokens": ["<|im_end|>"], "chunked_cross_entropy": True},
        {"base_model": "m", "cls_model_config": "C", "base_model_ignore_patterns": "pytorch*"},
        {"stage": "pt", "use_v1_kernels": True, "use_kernels": True, "kernel_name": "a/b"},
        {"stage": "pt", "use_liger_kernel": True, "freeze_original_embeddings": False},
    ],
)
def test_what_changes_no_result_is_dropped_with_a_note(keys):
    config, notes = resolve({k: v for k, v in BASE.items() if k not in keys} | keys)
    assert config.max_steps == resolve(BASE)[0].max_steps
    for key in set(keys) - {"base_model", "stage"}:
        assert any(note.startswith(f"{key}: ") for note in notes), key


def test_an_alias_that_contradicts_is_refused():
    with pytest.raises(ConfigError, match="sequence_len and max_length both set max_length"):
        resolve(BASE | {"sequence_len": 10, "max_length": 20})
    # What is written under engine: wins over what an alias implies.
    config, _ = resolve(BASE | {"gradient_checkpointing": True, "engine": {"activations": "keep"}})
    assert config.engine.activations == "keep"


@pytest.mark.parametrize("name", ["deterministic", "full_determinism"])
def test_determinism_goes_by_the_names_of_others(name):
    config, notes = resolve(BASE | {name: True, "engine": {"activations": "keep"}})
    assert config.engine.deterministic
    assert config.engine.activations == "keep"
    assert any(note.startswith(f"{name}: ") for note in notes)
    assert not resolve(BASE | {name: False})[0].engine.deterministic


@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy"])
def test_an_unquoted_no_is_the_word(name):
    config, notes = resolve(BASE | {name: False})
    assert getattr(config, name) == "no"
    assert any(note.startswith(f"{name}: False -> ") for note in notes)
    assert not any(note.startswith(name) for note in resolve(BASE | {name: "no"})[1])


def test_the_schema_describes_every_key():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {
        field.alias or name for name, field in TrainConfig.model_fields.items()
    }
    assert "model_config" in schema["properties"]
    for key, value in schema["properties"].items():
        assert value.get("description"), key
    for name in ("DatasetSource", "EngineConfig", "ParamGroup"):
        inner = schema["$defs"][name]
        assert inner["additionalProperties"] is False
        assert all(value["description"] for value in inner["properties"].values())


def test_a_home_directory_is_expanded_as_in_every_other_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    config, _ = resolve(BASE | {"output_dir": "~/run", "data_cache_dir": "~/cache"})
    assert str(config.output_dir) == "/home/user/run"
    assert str(config.data_cache_dir) == "/home/user/cache"


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 10, 100])
@pytest.mark.parametrize("value", [0.01, 0.1, 0.3, 0.5, 0.999, 1, 2, 5, None])
def test_intervals_are_those_of_transformers(tmp_path, num_steps, value):
    """A share of a tiny run is rounded up, never to 0; without a number every logged row."""
    keys = {"eval_strategy": "steps", "eval_steps": value, "logging_steps": 3}
    theirs = TrainerState(max_steps=num_steps)
    arguments = TrainingArguments(output_dir=str(tmp_path), save_steps=value or 500, **keys)
    theirs.compute_steps(arguments, num_steps)
    config, _ = resolve(
        BASE | keys | {"save_steps": value or 500, "max_steps": num_steps, "val_set_size": 0.5}
    )
    ours = loop_settings(config, steps_per_epoch=5)
    for name in ("eval_steps", "save_steps", "logging_steps"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_everything_that_is_refused_is_named_at_once(tmp_path):
    """And what is empty takes one line."""
    multimodal = {
        "base_model": "m", "processor_type": "AutoProcessor", "skip_prepare_dataset": True,
        "rl": "dpo", "deepspeed": "ds.json",
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        resolve(BASE | multimodal)
    for key in ("processor_type", "skip_prepare_dataset", "rl", "deepspeed"):
        assert f"{key}: {multimodal[key]!r} is refused" in caught.value.message
    _, notes = resolve(
        {"base_model": "m", "datasets": [{"path": "a", "type": "alpaca"}], "output_dir": "o",
         "sequence_len": 64, "micro_batch_size": 1, "debug": None, "fsdp": None}
    )  # fmt: skip
    assert "debug, fsdp -> dropped (empty)" in notes
