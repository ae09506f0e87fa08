"""Configurations written for other trainers, translated key by key.

Owns the order of translation and the names that several trainers share; ``axolotl.py`` and
``llama_factory.py`` hold what each has alone. The invariant: nothing is translated in silence (each
change is a note that gets printed), a key that headrace cannot honour is refused with the reason,
and a key is dropped only where dropping it cannot change the result. Knows no YAML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.trainer import axolotl, llama_factory
from headrace.trainer.foreign_datasets import spread, translate_entries

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
    "dataset_processes": "dataset_num_proc",
    # LLaMA-Factory
    "cutoff_len": "max_length",
    "moe_aux_loss_coef": "router_aux_loss_coef",
    "lora_rank": "lora_r",
    "additional_target": "lora_modules_to_save",
    "adapter_name_or_path": "lora_model_dir",
    "use_rslora": "peft_use_rslora",
    "preprocessing_num_workers": "dataset_num_proc",
    "val_size": "val_set_size",
    "train_on_prompt": "train_on_inputs",
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

_TRACKERS = ("wandb_", "mlflow_", "comet_", "swanlab_")
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
    "peft_layers_pattern": "peft_layers_to_transform counts the decoder layers",
    "loraplus_lr_ratio": "A and B have one learning rate; param_groups gives them others",
    "loftq": "full-precision bases need no LoftQ",
    "relora": "restarts of adapters are not supported",
    "lisa_n_layers": "LISA is not supported; unfrozen_parameters chooses what is trained",
    "fp16": "float16 gradients overflow; headrace trains in bfloat16 or float32",
    "group_by_length": "grouping by length biases the order; packing wastes less",
    "neftune_noise_alpha": "noise in the embeddings is not supported",
    "label_smoothing_factor": "label smoothing is not supported",
    "rl": "this version trains on the next token only",
    "push_to_hub": "headrace sends nothing anywhere",
    "hub_model_id": "headrace sends nothing anywhere",
    "load_best_model_at_end": "the last checkpoint is the result; evaluations name the best step",
}

_REMEDY = {
    "deepspeed": "remove it, or leave the file as it is and add deepspeed= to the command line",
    "fsdp": "remove it, or leave the file as it is and add fsdp= fsdp_config= to the command line",
    "fsdp_config": "remove it, or leave the file as it is and add fsdp_config= to the command line",
    "fp16": "dtype: bfloat16",
    "group_by_length": "packing: true",
    "load_best_model_at_end": "remove it",
}

_ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf")
# AdamW whose moments are rounded to 8 bits, or paged, to save the memory of a card.
_SMALL_ADAMW = (
    "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "paged_adamw",
    "adamw_torch_8bit",
)  # fmt: skip


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", 0, [], {})


def _bf16(value: Any) -> dict[str, Any]:
    return {} if value in ("auto", False, "false") else {"dtype": "bfloat16"}


def _gradient_checkpointing(value: Any) -> dict[str, Any]:
    return {"engine": {"activations": "recompute" if value else "keep"}}


def _never(key: str) -> Callable[[Any], dict[str, Any]]:
    """YAML reads an unquoted ``no`` as false."""
    return lambda value: {key: "no" if value is False else value}


def _deterministic(value: Any) -> dict[str, Any]:
    return {"engine": {"deterministic": True}} if value else {}


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
    "save_strategy": _never("save_strategy"),
    "eval_strategy": _never("eval_strategy"),
    "deterministic": _deterministic,
    "full_determinism": _deterministic,
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

    LLaMA-Factory's names of datasets stay: :func:`llama_factory.name_datasets` looks them up.

    Args:
        raw: a configuration as its file has it.

    Raises:
        ConfigError: for a key that cannot be honoured, or two keys of one meaning.
    """
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    notes: list[str] = []
    refusals: dict[str, str] = {}
    empty: list[str] = []
    convert = _converters(raw)
    empty_is_absent = axolotl.is_axolotl(raw)
    dropped = {**DROPPED, **axolotl.DROPPED, **llama_factory.DROPPED}
    refused = {**REFUSED, **axolotl.REFUSED, **llama_factory.REFUSED}
    remedies = {**_REMEDY, **axolotl.REMEDY, **llama_factory.REMEDY}

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
    for key in sorted(raw, key=lambda name: name in RENAMED or name in convert):
        value = raw[key]
        if value is None and (key in RENAMED or empty_is_absent):
            empty.append(key)
        elif key in RENAMED:
            notes.append(f"{key} -> {RENAMED[key]}")
            put(RENAMED[key], value, key)
        elif key in convert:
            changes = convert[key](value)
            if changes == {key: value}:
                put(key, value, key)
                continue
            said = ", ".join(f"{name}: {new}" for name, new in changes.items()) or "nothing to set"
            notes.append(f"{key}: {_short(value)} -> {said}")
            for name, new in changes.items():
                put(name, new, key)
        elif key in refused:
            if not _is_off(value):
                refusals[f"{key}: {value!r} is refused: {refused[key]}"] = remedies.get(
                    key, "remove it"
                )
                continue
            notes.append(f"{key}: {value} -> dropped (it is off)")
        elif key in dropped:
            notes.append(f"{key}: {_short(value)} -> dropped ({dropped[key]})")
        elif key.startswith(_TRACKERS):
            notes.append(f"{key} -> dropped (set {key.upper()} in the environment)")
        else:
            put(key, value, key)
    if refusals:  # all of them: a file is corrected once
        raise ConfigError("\n  ".join(refusals), remedy="; ".join(dict.fromkeys(refusals.values())))
    if empty:
        notes.append(f"{', '.join(empty)} -> dropped (empty)")
    _add_defaults(raw, result, notes)
    if "optim" in result:
        _check_optimizer(result, notes)
    return result, notes


def translate_data(raw: dict[str, Any], result: dict[str, Any], notes: list[str]) -> None:
    """Translate the datasets of what :func:`translate` made of ``raw``, in place.

    Apart, because names of datasets are looked up in a file.

    Raises:
        ConfigError: as :func:`translate`.
    """
    llama_factory.name_datasets(result, notes.append, pretraining=raw.get("stage") == "pt")
    for name in ("datasets", "eval_datasets"):
        if isinstance(result.get(name), list):
            result[name] = translate_entries(
                result[name], name, notes.append, axolotl=axolotl.is_axolotl(raw)
            )
    for key in ("train_on_inputs", "chat_template_kwargs"):
        if key in result:
            spread(key, result.pop(key), result, notes.append)


def override_aliases(raw: dict[str, Any], key: str) -> None:
    """Make way in ``raw`` for a key of the command line: its value wins over its other names.

    Args:
        raw: a configuration as its file has it; changed in place.
        key: may be dotted; then it goes into what another name holds.
    """
    top, _, inner = key.partition(".")
    canonical = RENAMED.get(top, top)
    names = {alias for alias, target in RENAMED.items() if target == canonical} | {canonical}
    for other in names - {top}:
        if other in raw:
            value = raw.pop(other)
            if inner and top not in raw:
                raw[top] = value


def _converters(raw: dict[str, Any]) -> dict[str, Callable[[Any], dict[str, Any]]]:
    """What each key becomes; some of axolotl's and LLaMA-Factory's look at other keys."""
    found = dict(CONVERTED)
    owners: list[dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]]] = [axolotl.ALONE]
    if axolotl.is_axolotl(raw):
        owners = [axolotl.CONVERTED]
    elif llama_factory.is_llama_factory(raw):
        owners.append(llama_factory.CONVERTED)
    for owner in owners:
        found |= {key: _bound(change, raw) for key, change in owner.items()}
    return found


def _bound(
    change: Callable[[Any, dict[str, Any]], dict[str, Any]], raw: dict[str, Any]
) -> Callable[[Any], dict[str, Any]]:
    return lambda value: change(value, raw)


def _add_defaults(raw: dict[str, Any], result: dict[str, Any], notes: list[str]) -> None:
    """Defaults of the trainer that a file was written for, where the file is silent."""
    if axolotl.is_axolotl(raw) or raw.keys() & axolotl.ALONE.keys():
        axolotl.complete(result, notes)
    if axolotl.is_axolotl(raw):
        owner, given = "axolotl", dict(axolotl.DEFAULTS)
        if not any(_is_plain_text(entry) for entry in result.get("datasets") or []):
            given["excess_length"] = "drop"
        rows = result.get("per_device_train_batch_size", given["per_device_train_batch_size"])
        given["per_device_eval_batch_size"] = rows
    elif llama_factory.is_llama_factory(raw):
        owner, given = "LLaMA-Factory", llama_factory.defaults(raw)
    else:
        return
    for key, value in given.items():
        if key == "excess_length" and result.get("packing_strategy") == "wrapped":
            continue
        if key == "packing_strategy" and not result.get("packing", given["packing"]):
            continue
        if result.get(key) is None:
            result[key] = value
            notes.append(f"{key}: {value} ({owner}'s default)")


def _is_plain_text(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("type") in ("completion", "pretrain", "text")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_optimizer(result: dict[str, Any], notes: list[str]) -> None:
    name = result["optim"]
    if name in _SMALL_ADAMW:
        notes.append(
            f"optim: {name} -> adamw (float32 moments in host memory, which those of {name} "
            "approximate or page to)"
        )
        name = result["optim"] = "adamw"
    if not isinstance(name, str) or name not in _ADAMW:
        raise ConfigError(
            f"optim: {name!r} is refused: headrace has AdamW with float32 moments",
            remedy="optim: adamw, or remove it",
        )
    if name != "adamw":
        notes.append(f"optim: {name} -> adamw (same update, on the host)")
    result["optim"] = "adamw"
