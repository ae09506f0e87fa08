"""Configurations written for other trainers, translated key by key.

Owns the table of names. The invariant: nothing is translated in silence (every change is a
note that gets printed), a key that headrace cannot honour is refused with the reason, and a key
is dropped only where dropping it cannot change the result. Knows no YAML and no defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

# Same meaning, other name.
RENAMED = {
    # axolotl
    "base_model": "model_name_or_path",
    "tokenizer_config": "tokenizer_name_or_path",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "excess_length_strategy": "excess_length",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "dataset_prepared_path": "data_cache_dir",
    "test_datasets": "eval_datasets",
    # LLaMA-Factory
    "cutoff_len": "max_length",
    "moe_aux_loss_coef": "router_aux_loss_coef",
    "lora_rank": "lora_r",
    "additional_target": "lora_modules_to_save",
    "adapter_name_or_path": "lora_model_dir",
    "use_rslora": "peft_use_rslora",
    # transformers, TRL and their older versions
    "max_seq_length": "max_length",
    "block_size": "max_length",
    "evaluation_strategy": "eval_strategy",
    "tokenizer_name": "tokenizer_name_or_path",
    "config_name": "model_config",
    "torch_dtype": "dtype",
    "adam_eps": "adam_epsilon",
    "tokenized_path": "data_cache_dir",
}

_ATTENTION = "headrace chooses the attention backend itself"
_WORKERS = "headrace reads tokens from a memory-mapped cache and needs no loader processes"
_DISPLAY = "headrace has its own display"

# Keys whose value cannot change the result, with the reason they are dropped.
DROPPED = {
    "flash_attention": _ATTENTION,
    "flash_attn": _ATTENTION,
    "sdp_attention": _ATTENTION,
    "xformers_attention": _ATTENTION,
    "attn_implementation": _ATTENTION,
    "dataloader_num_workers": _WORKERS,
    "dataloader_pin_memory": _WORKERS,
    "dataloader_prefetch_factor": _WORKERS,
    "dataset_processes": _WORKERS,
    "preprocessing_num_workers": _WORKERS,
    "overwrite_cache": "the token cache is keyed by content and never stale",
    "tf32": "headrace computes in the dtype of the model",
    "strict": "unknown keys are always refused",
    "plot_loss": "metrics.jsonl holds every logged step",
    "ddp_timeout": "no collective waits while one process writes",
    "disable_tqdm": _DISPLAY,
    "logging_dir": "metrics.jsonl lies in output_dir; report_to chooses other trackers",
    "use_fast_tokenizer": "fast tokenizers are the default",
    "tokenizer_type": "the tokenizer's own class is used",
    "model_type": "the model's own class is used",
    "is_llama_derived_model": "the model's own class is used",
    "pad_to_sequence_len": "packed rows are always max_length long, others padded to the longest",
    "remove_unused_columns": "only the columns a dataset type needs are read",
    "lora_fan_in_fan_out": "it follows from the layer's class",
    "lora_on_cpu": "the base lies in host memory in any case",
    "lora_mlp_kernel": "layers are compiled",
    "lora_qkv_kernel": "layers are compiled",
    "lora_o_kernel": "layers are compiled",
    "eval_sample_packing": "evaluation rows are made like training rows",
}

# Keys that are refused when set to anything but null, false or an empty value.
REFUSED = {
    "deepspeed": "headrace replaces DeepSpeed: state lives in host memory without its settings",
    "fsdp": "headrace replaces FSDP: state lives in host memory without its settings",
    "fsdp_config": "headrace replaces FSDP: state lives in host memory without its settings",
    "load_in_8bit": "full-parameter training needs plain weights",
    "load_in_4bit": "full-parameter training needs plain weights",
    "quantization_bit": "full-parameter training needs plain weights",
    "peft_use_dora": "headrace has plain LoRA; DoRA reads the whole weight for its norm",
    "use_dora": "headrace has plain LoRA; DoRA reads the whole weight for its norm",
    "lora_target_parameters": "adapters are for linear layers; experts are one fused tensor",
    "target_parameters": "adapters are for linear layers; experts are one fused tensor",
    "peft_layers_pattern": "peft_layers_to_transform counts the decoder layers",
    "loraplus_lr_ratio": "A and B have one learning rate; param_groups gives them others",
    "loftq": "full-precision bases need no LoftQ",
    "relora": "restarts of adapters are not supported",
    "lisa_n_layers": "LISA is not supported; unfrozen_parameters chooses what is trained",
    "fp16": "float16 gradients overflow; headrace trains in bfloat16 or float32",
    "group_by_length": "grouping by length biases the order; packing wastes less",
    "neftune_noise_alpha": "noise in the embeddings is not supported",
    "label_smoothing_factor": "label smoothing is not supported",
    "val_set_size": "an evaluation set must not depend on a split made on the fly",
    "pretraining_dataset": "streamed hub datasets are not supported; datasets are local files",
    "rl": "this version trains on the next token only",
    "push_to_hub": "headrace sends nothing anywhere",
    "hub_model_id": "headrace sends nothing anywhere",
    "load_best_model_at_end": "the last checkpoint is the result; evaluations name the best step",
}

_REMEDY = {
    "deepspeed": "remove it; engine: holds what is left to choose",
    "fsdp": "remove it; engine: holds what is left to choose",
    "fsdp_config": "remove it; engine: holds what is left to choose",
    "fp16": "dtype: bfloat16",
    "group_by_length": "packing: true",
    "val_set_size": "put the rows in a file of their own and name it under eval_datasets:",
    "load_best_model_at_end": "remove it",
}

_ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf")


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", 0, [], {})


def _bf16(value: Any) -> dict[str, Any]:
    return {} if value in ("auto", False, "false") else {"dtype": "bfloat16"}


def _gradient_checkpointing(value: Any) -> dict[str, Any]:
    return {"engine": {"activations": "recompute" if value else "keep"}}


def _use_cpu(value: Any) -> dict[str, Any]:
    return {"device": "cpu"} if value else {}


def _auto_resume(value: Any) -> dict[str, Any]:
    return {"resume_from_checkpoint": "auto"} if value else {}


def _only(key: str, *allowed: Any) -> Callable[[Any], dict[str, Any]]:
    def check(value: Any) -> dict[str, Any]:
        if value not in allowed:
            raise ConfigError(
                f"{key}: {value!r} is refused: this version trains all weights on the next token",
                remedy=f"{key}: {allowed[0]}, or remove it",
            )
        return {}

    return check


def _finetuning_type(value: Any) -> dict[str, Any]:
    if value not in ("full", "lora"):
        raise ConfigError(
            f"finetuning_type: {value!r} is refused: headrace trains all weights or LoRA adapters",
            remedy="finetuning_type: full or lora; unfrozen_parameters chooses what is trained",
        )
    return {"adapter": "lora"} if value == "lora" else {}


def _use_peft(value: Any) -> dict[str, Any]:
    return {"adapter": "lora"} if value else {}


def _lora_target(value: Any) -> dict[str, Any]:
    if value == "all":
        return {"lora_target_linear": True}
    names = value.split(",") if isinstance(value, str) else value
    return {"lora_target_modules": [name.strip() for name in names]}


# Keys that become something else, by value.
CONVERTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "bf16": _bf16,
    "gradient_checkpointing": _gradient_checkpointing,
    "use_cpu": _use_cpu,
    "no_cuda": _use_cpu,
    "auto_resume_from_checkpoints": _auto_resume,
    "stage": _only("stage", "pt", "sft"),
    "finetuning_type": _finetuning_type,
    "use_peft": _use_peft,
    "lora_target": _lora_target,
    "do_train": _only("do_train", True),
}


def translate(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Canonical keys, and one note for every change.

    Args:
        raw: a configuration as its file has it.

    Raises:
        ConfigError: for a key that cannot be honoured, or two keys of one meaning.
    """
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    notes: list[str] = []

    def put(key: str, value: Any, given: str) -> None:
        if key == "engine" and isinstance(result.get(key), dict):
            result[key] = {**value, **result[key]}  # what is written under engine: wins
            return
        if key in result and result[key] != value:
            raise ConfigError(
                f"{given} and {origin[key]} both set {key}: {value!r} and {result[key]!r}",
                remedy="keep one of them",
            )
        result[key] = value
        origin[key] = given

    # Canonical keys first, so that a contradiction names the alias as the second one.
    for key in sorted(raw, key=lambda name: name in RENAMED or name in CONVERTED):
        value = raw[key]
        if key in RENAMED:
            notes.append(f"{key} -> {RENAMED[key]}")
            put(RENAMED[key], value, key)
        elif key in CONVERTED:
            changes = CONVERTED[key](value)
            said = ", ".join(f"{name}: {new}" for name, new in changes.items()) or "nothing to set"
            notes.append(f"{key}: {value} -> {said}")
            for name, new in changes.items():
                put(name, new, key)
        elif key in REFUSED:
            if not _is_off(value):
                raise ConfigError(
                    f"{key}: {value!r} is refused: {REFUSED[key]}",
                    remedy=_REMEDY.get(key, "remove it"),
                )
            notes.append(f"{key}: {value} -> dropped (it is off)")
        elif key in DROPPED:
            notes.append(f"{key}: {value} -> dropped ({DROPPED[key]})")
        elif key.startswith("wandb_"):
            notes.append(f"{key} -> dropped (set {key.upper()} in the environment)")
        else:
            put(key, value, key)
    if "optim" in result:
        _check_optimizer(result, notes)
    for name in ("datasets", "eval_datasets"):
        if isinstance(result.get(name), list):
            result[name] = [_dataset(entry, name, notes) for entry in result[name]]
    return result, notes


def _check_optimizer(result: dict[str, Any], notes: list[str]) -> None:
    name = result["optim"]
    if not isinstance(name, str) or name not in _ADAMW:
        raise ConfigError(
            f"optim: {name!r} is refused: headrace has AdamW with float32 moments",
            remedy="optim: adamw, or remove it",
        )
    if name != "adamw":
        notes.append(f"optim: {name} -> adamw (same update, on the host)")
    result["optim"] = "adamw"


_DATASET_RENAMED = {"field": "text_field"}
_DATASET_TYPES = {"completion": "text", "pretrain": "text"}


def _dataset(entry: Any, name: str, notes: list[str]) -> Any:
    if not isinstance(entry, dict):
        return entry
    result = {}
    for key, value in entry.items():
        if key in _DATASET_RENAMED:
            notes.append(f"{name}: {key} -> {_DATASET_RENAMED[key]}")
            result[_DATASET_RENAMED[key]] = value
        elif key == "type" and isinstance(value, str) and value in _DATASET_TYPES:
            notes.append(f"{name}: type: {value} -> {_DATASET_TYPES[value]}")
            result[key] = _DATASET_TYPES[value]
        elif key == "ds_type":
            notes.append(f"{name}: ds_type: {value} -> dropped (the file's name says it)")
        else:
            result[key] = value
    return result
