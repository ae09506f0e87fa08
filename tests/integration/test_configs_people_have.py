"""Configurations of axolotl and LLaMA-Factory run as they are, on small data of the same names.

The keys and values are those of fine-tunes that both publish as examples (axolotl
``examples/llama-3/fft-8b.yaml``, ``fft-8b-liger-fsdp.yaml``, ``lora-8b.yml``,
``examples/mistral/config.yml``;
LLaMA-Factory ``examples/train_full/llama3_full_sft.yaml``), empty ones included.
"""

import io
import json
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headrace.cli import main
from headrace.errors import ConfigError
from headrace.trainer import resolve, train
from headrace.trainer.metrics import read_rows

EMPTY = [
    "wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "fp16",
    "early_stopping_patience", "resume_from_checkpoint", "local_rank", "xformers_attention",
    "eval_table_size", "debug", "deepspeed", "fsdp", "fsdp_config",
]  # fmt: skip
AXOLOTL = {
    "base_model": "meta-llama/Meta-Llama-3-8B",
    "model_type": "LlamaForCausalLM",
    "tokenizer_type": "AutoTokenizer",
    **dict.fromkeys(["load_in_8bit", "load_in_4bit", "strict", "group_by_length", "tf32"], False),
    **dict.fromkeys(EMPTY),
    **dict.fromkeys(["sample_packing", "pad_to_sequence_len", "gradient_checkpointing"], True),
    "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
    "dataset_prepared_path": "last_run_prepared",
    "val_set_size": 0.05,
    "output_dir": "./out",
    "sequence_len": 8192,
    "gradient_accumulation_steps": 8,
    "micro_batch_size": 1,
    "num_epochs": 1,
    "optimizer": "paged_adamw_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": "2e-5",
    "train_on_inputs": False,
    "bf16": "auto",
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "logging_steps": 1,
    "flash_attention": True,
    "warmup_steps": 100,
    "evals_per_epoch": 2,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
}
MISTRAL = AXOLOTL | {
    "base_model": "mistralai/Mistral-7B-v0.1",
    "is_mistral_derived_model": True,
    "datasets": [{"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}],
    "dataset_prepared_path": None,
    "eval_sample_packing": False,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 2,
    "optimizer": "adamw_bnb_8bit",
    "learning_rate": 0.000005,
    "warmup_steps": 10,
    "evals_per_epoch": 1,
    "eval_table_max_new_tokens": 128,
    "special_tokens": {"eos_token": "<eos>", "bos_token": "<eos>"},
}
LIGER = {
    **{key: value for key, value in AXOLOTL.items() if key not in EMPTY},
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    **dict.fromkeys(
        [f"liger_{part}" for part in ("rope", "rms_norm", "glu_activation")]
        + ["liger_fused_linear_cross_entropy"],
        True,
    ),
    "chat_template": "llama3",
    "datasets": [
        {
            "path": "mlabonne/FineTome-100k", "type": "chat_template", "split": "train[:20%]",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        }
    ],
    "optimizer": "adamw_torch_fused",
    "attention": "flash",
    "fsdp": ["full_shard", "auto_wrap"],
    "fsdp_config": {"fsdp_offload_params": True},
}  # fmt: skip
LORA = AXOLOTL | {
    "adapter": "lora",
    "lora_model_dir": None,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "datasets": [{"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}],
    "dataset_prepared_path": None,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 4,
    "optimizer": "adamw_bnb_8bit",
    "learning_rate": 0.0002,
    "warmup_steps": 10,
    "evals_per_epoch": 4,
}
LLAMA_FACTORY = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "deepspeed": "examples/deepspeed/ds_z3_config.json",
    "dataset": "identity,alpaca_en_demo",
    "template": "llama3",
    "cutoff_len": 2048,
    "max_samples": 40,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
    "output_dir": "saves/llama3-8b/full/sft",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1.0e-5,
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
    "val_size": 0.1,
    "per_device_eval_batch_size": 1,
    "eval_strategy": "steps",
    "eval_steps": 500,
}


@pytest.fixture
def at_home(tmp_path, monkeypatch, tokenizer_dir, tiny_model, sentences):
    """A folder with small models and datasets under the names that the files use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    settings = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=8192)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    for name in ("meta-llama/Meta-Llama-3-8B", "mistralai/Mistral-7B-v0.1"):
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
    rows = [
        {"instruction": sentences[n % 8], "input": "", "output": sentences[(n + 1) % 8]}
        for n in range(40)
    ]
    talk = {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "Yes."}]}
    for name in (
        "tatsu-lab/alpaca",
        "mhenrichsen/alpaca_2k_test",
        "data",
        "mlabonne/FineTome-100k",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tatsu-lab/alpaca/train.json").write_text(json.dumps(rows))
    shutil.copy("tatsu-lab/alpaca/train.json", "mhenrichsen/alpaca_2k_test/rows.json")
    pq.write_table(pa.Table.from_pylist([talk] * 40), "mlabonne/FineTome-100k/train-0.parquet")
    (tmp_path / "data/identity.json").write_text(json.dumps(rows[:10]))
    (tmp_path / "data/alpaca.json").write_text(json.dumps(rows))
    info = {
        "identity": {"file_name": "identity.json"}, "alpaca_en_demo": {"file_name": "alpaca.json"},
    }  # fmt: skip
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "overrides", "num_steps"),
    [
        (AXOLOTL, [], 1),
        (MISTRAL, [], 2),
        (LIGER, ["fsdp=", "fsdp_config="], 1),
        (LORA, [], 4),
        (LLAMA_FACTORY, ["deepspeed="], 23),
    ],
    ids=["axolotl", "axolotl-mistral", "axolotl-chat", "axolotl-lora", "llama-factory"],
)
def test_a_published_file_runs_as_it_is(at_home, settings, overrides, num_steps):
    file = at_home / "published.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    for key in {override.partition("=")[0] for override in overrides}:
        if key != "fsdp_config":
            with pytest.raises(ConfigError, match=f"{key}: .* is refused: headrace replaces"):
                resolve(file)
    console = Console(record=True, width=200, file=io.StringIO())
    if settings is LIGER:  # its special token is not one of this tokenizer
        overrides = [*overrides, "special_tokens={eos_token: <eos>}"]
    result = train(file, [*overrides, "progress=lines", "device=cpu"], console=console)
    assert (result.status, result.step) == ("finished", num_steps)
    said = console.export_text()
    unsaid = {
        "output_dir", "learning_rate", "weight_decay", "logging_steps", "warmup_steps", "datasets",
        "gradient_accumulation_steps", "val_set_size", "model_name_or_path", "trust_remote_code",
        "save_steps", "overwrite_output_dir", "report_to", "per_device_train_batch_size",
        "num_train_epochs", "lr_scheduler_type", "warmup_ratio", "resume_from_checkpoint",
        "per_device_eval_batch_size", "eval_strategy", "eval_steps", "early_stopping_patience",
        "chat_template", "max_samples",
        *(key for key in LORA if key.startswith(("adapter", "lora_"))),
    }  # fmt: skip
    (empty,) = re.findall(r"^config: (.*) -> dropped \(empty\)$", said, re.MULTILINE) or [""]
    for key in settings.keys() - unsaid - set(empty.split(", ")):
        assert f"config: {key}" in said, key
    (row,) = [row for row in read_rows(result.output_dir / "metrics.jsonl") if "eval_loss" in row][
        -1:
    ]
    assert row["eval_loss"] > 0


def test_the_command_line_wins_over_another_name_of_a_key():
    config, _ = resolve(AXOLOTL, ["per_device_train_batch_size=4", "max_length=128"])
    assert (config.per_device_train_batch_size, config.max_length) == (4, 128)
    config, _ = resolve(AXOLOTL, ["micro_batch_size=3", "datasets.0.path=x.json"])
    assert config.per_device_train_batch_size == 3
    tested = AXOLOTL | {"val_set_size": 0, "test_datasets": [{"path": "a", "type": "alpaca"}]}
    assert resolve(tested, ["eval_datasets.0.path=b"])[0].eval_datasets[0].path == "b"


def test_defaults_of_the_other_trainer_are_said():
    config, notes = resolve(
        {"base_model": "m", "datasets": [{"path": "a", "type": "alpaca"}], "output_dir": "o"}
    )
    assert (config.max_length, config.packing, config.num_train_epochs) == (512, False, 1.0)
    assert config.excess_length == "drop"
    assert "packing: False (axolotl's default)" in notes
    config, _ = resolve(AXOLOTL | {"cosine_min_lr_ratio": 0.1, "evals_per_epoch": 0})
    assert config.lr_scheduler_type == "cosine_with_min_lr"
    assert config.evaluates == "no"
    nothing, notes = resolve(AXOLOTL | {"val_set_size": 0.0})
    assert nothing.evaluates == "no"
    assert "eval_steps: 0.5 -> dropped (there is nothing to evaluate on)" in notes


def test_keys_of_axolotl_mean_the_same_beside_a_model_from_random_weights():
    """Such a file has no base_model, by which axolotl's are told."""
    given = {key: v for key, v in AXOLOTL.items() if key not in {"base_model", "special_tokens"}}
    given |= {"model_config": {"model_type": "llama"}, "cosine_min_lr_ratio": 0.1, "num_epochs": 4}
    config, notes = resolve(
        given | {"evals_per_epoch": 2, "saves_per_epoch": 1, "val_set_size": 0.1}
    )
    assert (config.eval_steps, config.save_strategy) == (0.125, "epoch")
    assert config.lr_scheduler_type == "cosine_with_min_lr"
    assert not any("axolotl's default" in note for note in notes)


def test_dataset_descriptions_of_llama_factory(at_home):
    info = {
        "talks": {
            "file_name": "talks.json", "formatting": "sharegpt",
            "columns": {"messages": "turns", "system": "about", "tools": "tools"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                     "assistant_tag": "assistant", "function_tag": "call"},
        },
        "hub": {"hf_hub_url": "nobody/rows", "subset": "en", "split": "train[:10]",
                "columns": {"prompt": "q", "response": "a", "history": "before"}},
        "plain": {"file_name": "plain.json", "columns": {"prompt": "text"}},
        "pairs": {"file_name": "pairs.json", "ranking": True},
    }  # fmt: skip
    (at_home / "data/dataset_info.json").write_text(json.dumps(info))
    settings = {key: v for key, v in LLAMA_FACTORY.items() if key != "deepspeed"}

    def sources(**changes):
        return resolve(settings | changes)[0].datasets

    talks, hub = sources(dataset="talks, hub", max_samples=7, enable_thinking=False)
    assert (talks.type, talks.field_messages, talks.field_system) == ("messages", "turns", "about")
    assert talks.message_property_mappings == {"role": "role", "content": "content"}
    assert talks.roles["function_call"] == ["call"]
    assert talks.chat_template_kwargs == {"enable_thinking": False}
    assert (hub.path, hub.split, hub.max_samples) == ("nobody/rows/en", "train[:10]", 7)
    assert (hub.type, hub.field_instruction, hub.field_history) == ("instruction", "q", "before")
    (plain,) = sources(dataset="plain", stage="pt", val_size=0, eval_strategy="no", eval_steps=None)
    assert (plain.type, plain.text_field) == ("text", "text")
    assert sources(dataset="talks", train_on_prompt=True)[0].train_on_inputs
    for name, message in (("pairs", "preferences"), ("absent", "not described in")):
        with pytest.raises(ConfigError, match=message):
            sources(dataset=name)
    with pytest.raises(ConfigError, match="cannot be read"):
        sources(dataset_dir="elsewhere")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"type": "oasst"}, "'oasst' is not known"),
        ({"type": "chat_template", "revision": "abc"}, "revision: 'abc' is refused"),
        ({"type": "alpaca", "name": "en"}, "a configuration of a hub dataset"),
        ({"type": "alpaca", "data_files": ["a", "b"]}, "holds 2 files"),
        ({"type": "alpaca", "shards": 4}, "split: train"),
    ],
)
def test_an_entry_that_cannot_be_honoured_is_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        resolve(AXOLOTL | {"datasets": [{"path": "x", **entry}]})


def test_entries_of_axolotl_are_translated():
    entries = [
        {"path": "json", "data_files": "a.jsonl", "type": "chat_template", "ds_type": "json",
         "message_field_role": "from", "message_field_content": "value", "chat_template": "qwen3",
         "field_thinking": "thought", "train_on_eot": "last", "shards": None},
        {"path": "b.jsonl", "type": {"field_instruction": "q", "field_output": "a",
                                     "format": "{instruction}:", "system_prompt": ""}},
        {"path": "c.jsonl", "type": "sharegpt.load_role"},
        {"path": "d.jsonl", "type": None},
        {"path": "e.jsonl", "type": "completion", "field": "body"},
        {"path": "f.jsonl", "type": "input_output"},
    ]  # fmt: skip
    config, notes = resolve(AXOLOTL | {"datasets": entries, "train_on_inputs": True})
    chat, own, shared, tokens, text, segments = config.datasets
    assert (chat.path, chat.type, chat.train_on_eos) == ("a.jsonl", "messages", "last")
    assert chat.message_property_mappings == {
        "role": "from", "content": "value", "reasoning_content": "thought",
    }  # fmt: skip
    assert chat.chat_template == "tokenizer_default_fallback_chatml"
    assert (own.type, own.format, own.field_output) == ("alpaca", "{instruction}:", "a")
    assert [s.type for s in (shared, tokens, text, segments)] == [
        "messages", "tokens", "text", "segments",
    ]  # fmt: skip
    assert text.text_field == "body"
    assert (own.train_on_inputs, text.train_on_inputs) == (True, False)
    assert any("train_on_inputs: True -> train_on_inputs of each dataset" in n for n in notes)
    again, more = resolve(config)
    assert (again, more) == (config, [])


def test_a_published_file_is_planned_as_it_is(tmp_path, capsys):
    file = tmp_path / "published.yaml"
    file.write_text(yaml.safe_dump(LLAMA_FACTORY))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(file), "--gpu", "h200", "--host-memory", "192GiB"])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert "FITS on NVIDIA H200" in said.out
    assert "deepspeed -> not looked at (headrace replaces it)" in said.err


def test_a_pretraining_dataset_is_streamed():
    settings = {key: value for key, value in AXOLOTL.items() if key != "datasets"} | {
        "pretraining_dataset": [{"path": "c4", "type": "pretrain", "text_column": "body"}],
        "max_steps": 100, "val_set_size": 0,
    }  # fmt: skip
    config, notes = resolve(settings)
    (source,) = config.datasets
    assert (source.type, source.text_field, source.streaming) == ("text", "body", True)
    assert (config.save_strategy, config.evaluates, config.excess_length) == ("no", "no", "split")
    assert any(note.startswith("pretraining_dataset: ") for note in notes)
