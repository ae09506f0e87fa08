"""What LLaMA-Factory's configurations say beyond keys that have another name here.

Owns its own keys, its defaults where they differ, and ``dataset_info.json``. The invariant is that
of ``aliases.py``. Reads one small file, and only when datasets are asked for by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.data.templates import DEFAULT, TEMPLATES
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_KERNELS = "same result, other kernels"
DROPPED = {
    "flash_attn": "headrace chooses the attention backend itself",
    "attn": "headrace chooses the attention backend itself",
    "enable_liger_kernel": _KERNELS,
    "use_liger_kernel": _KERNELS,
    "use_kernels": _KERNELS,
    "kernel_name": _KERNELS,
    "use_v1_kernels": _KERNELS,
    "include_mfu": "metrics.jsonl always holds it",
    "use_unsloth_gc": _KERNELS,
    "cache_dir": "nothing is downloaded",
    "media_dir": "rows are text",
    "preprocessing_batch_size": "datasets are read in parts",
    "buffer_size": "streamed datasets are shuffled by parts",
    "ignore_pad_token_for_loss": "padding is never a target",
    "include_num_input_tokens_seen": "metrics.jsonl always holds it",
    "eval_on_each_dataset": "each dataset is reported",
    "pure_bf16": "master weights are float32, working weights bfloat16",
    "upcast_layernorm": "master weights are float32",
    "upcast_lmhead_output": "the loss is computed in float32",
    "disable_gradient_checkpointing": "engine.activations chooses",
    "do_eval": "eval_strategy chooses",
}
REFUSED = {
    "rope_scaling": "positions are the model's own",
    "shift_attn": "shifted attention is another model",
    "mixture_of_depths": "it is another model",
    "resize_vocab": "the vocabulary is the model's",
    "new_special_tokens": "the vocabulary is the model's",
    "add_tokens": "the vocabulary is the model's",
    "mask_history": "train: false in a message leaves it out",
    "interleave_probs": "weight: of each dataset is its share of the tokens",
    "tool_format": "the chat template says it",
    "default_system": "a system prompt belongs to the rows or the template",
    "use_badam": "headrace has AdamW",
    "use_galore": "headrace has AdamW",
    "use_apollo": "headrace has AdamW",
    "use_adam_mini": "headrace has AdamW",
    "use_muon": "headrace has AdamW",
    "use_llama_pro": "headrace trains the model as it is",
    "use_unsloth": "headrace has its own engine",
    "use_dft_loss": "the loss is cross-entropy",
    "use_eaft_loss": "the loss is cross-entropy",
    "freeze_original_embeddings": "the vocabulary is the model's",
    "new_special_tokens_config": "the vocabulary is the model's",
    "init_special_tokens": "the vocabulary is the model's",
    "sequence_parallel_size": "a sequence stays on one GPU; activations: recompute makes room",
    "ray_run_name": "torchrun or srun start the processes",
    "ray_num_workers": "torchrun or srun start the processes",
    "use_swanlab": "report_to: swanlab chooses trackers",
    "predict_with_generate": "evaluation reports loss and perplexity",
    "do_predict": "headrace trains and evaluates",
    "compute_accuracy": "evaluation reports loss and perplexity",
    "fp8": "headrace trains in bfloat16 or float32",
    "freeze_vision_tower": "rows are text",
}
REMEDY = {"interleave_probs": "datasets: with a weight each"}
# Its names of templates, by the nearest of ours for models that bring none.
_TEMPLATES = {
    **dict.fromkeys(("qwen", "qwen3", "qwen3_nothink", "qwen2_vl", "chatml", "yi"), "chatml"),
    **dict.fromkeys(("llama3", "llama3.1", "llama3.2"), "llama3"),
    **dict.fromkeys(("mistral", "ministral", "mistral_small", "llama2"), "mistral"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), "gemma"),
    **dict.fromkeys(("phi", "phi_small"), "phi_3"),
}
_DATA_KEYS = ("dataset", "eval_dataset", "dataset_dir", "max_samples", "streaming")


def is_llama_factory(raw: dict[str, Any]) -> bool:
    """Whether a configuration is LLaMA-Factory's."""
    return bool(raw.keys() & {"finetuning_type", "stage", "cutoff_len", "template"})


def defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """Where its defaults are not headrace's; put in only where the file is silent."""
    packed = raw.get("stage") == "pt"
    return {
        "max_length": 2048,
        "packing": packed,
        **({"packing_strategy": "wrapped"} if packed else {"excess_length": "truncate"}),
    }


def _template(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    if value in (None, ""):
        return {}
    near = _TEMPLATES.get(value)
    assert near is None or near in TEMPLATES
    return {"chat_template": DEFAULT if near is None else f"{DEFAULT}_fallback_{near}"}


def _neat_packing(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    return {"packing": True} if value else {}


def _thinking(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    return {} if value is None else {"chat_template_kwargs": {"enable_thinking": value}}


def _mix(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    if value not in (None, "concat"):
        raise ConfigError(
            f"mix_strategy: {value!r} is refused: mixtures are weighted by tokens",
            remedy="datasets: with a weight each",
        )
    return {}


CONVERTED: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "template": _template,
    "neat_packing": _neat_packing,
    "enable_thinking": _thinking,
    "mix_strategy": _mix,
}


def name_datasets(
    settings: dict[str, Any], note: Callable[[str], None], *, pretraining: bool
) -> None:
    """Replace ``dataset`` and ``eval_dataset`` by entries of ``datasets`` and ``eval_datasets``.

    Args:
        settings: translated keys; changed in place.
        note: told of every change.
        pretraining: ``stage: pt``, where the first column is plain text.

    Raises:
        ConfigError: ``dataset_info.json`` is missing, or describes something else than rows to
            imitate.
    """
    if not settings.keys() & set(_DATA_KEYS):
        return
    given = {key: settings.pop(key, None) for key in _DATA_KEYS}
    folder = Path(given["dataset_dir"] or "data").expanduser()
    for key, target in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        names = given[key]
        if not names:
            continue
        if target in settings:
            raise ConfigError(f"{key} and {target} are both given", remedy="keep one of them")
        listed = names.split(",") if isinstance(names, str) else names
        entries = [
            _described(str(name).strip(), folder, pretraining=pretraining) for name in listed
        ]
        for entry in entries:
            if given["max_samples"]:
                entry["max_samples"] = given["max_samples"]
            if given["streaming"] and target == "datasets":
                entry["streaming"] = True
        settings[target] = entries
        note(
            f"{key}: {names} -> {target}: "
            + "; ".join(f"{entry['path']} as {entry['type']}" for entry in entries)
        )


def _described(name: str, folder: Path, *, pretraining: bool) -> dict[str, Any]:
    file = folder / "dataset_info.json"
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"dataset {name!r} is looked up in {file}, which cannot be read: {error}",
            remedy="run from the folder that holds it, set dataset_dir, or give datasets:",
        ) from error
    if name not in known:
        raise ConfigError(
            f"dataset {name!r} is not described in {file}",
            remedy=f"it has {', '.join(sorted(known)[:8])}; add it there, or give datasets:",
        )
    info = known[name]
    if info.get("ranking") or info.get("columns", {}).keys() & {
        "chosen", "rejected", "kto_tag", "images", "videos", "audios",
    }:  # fmt: skip
        raise ConfigError(
            f"dataset {name!r} holds preferences or media; headrace trains on the next token",
            remedy="leave it out",
        )
    if info.get("num_samples"):
        raise ConfigError(
            f"dataset {name!r} is resampled (num_samples)", remedy="weight: of each dataset"
        )
    entry: dict[str, Any] = {"path": _place(name, info, folder), "name": name}
    if "split" in info and "hf_hub_url" in info:
        entry["split"] = info["split"]
    if info.get("formatting", "alpaca") == "sharegpt":
        return entry | _conversation(info)
    columns = info.get("columns") or {}
    if pretraining:
        return entry | {"type": "text", "text_field": columns.get("prompt", "text")}
    made = {"type": "instruction"}
    for column, key in (
        ("prompt", "field_instruction"), ("query", "field_input"), ("response", "field_output"),
        ("system", "field_system"), ("history", "field_history"),
    ):  # fmt: skip
        if column in columns:
            made[key] = columns[column]
    return entry | made


def _place(name: str, info: dict[str, Any], folder: Path) -> str:
    if file := info.get("file_name"):
        return str(folder / file)
    if url := info.get("hf_hub_url"):
        parts = [url, info.get("subset"), info.get("folder")]
        return "/".join(part for part in parts if part)
    raise ConfigError(
        f"dataset {name!r} has neither file_name nor hf_hub_url", remedy="give it as datasets:"
    )


def _conversation(info: dict[str, Any]) -> dict[str, Any]:
    columns, tags = info.get("columns") or {}, info.get("tags") or {}
    made: dict[str, Any] = {
        "type": "messages",
        "field_messages": columns.get("messages", "conversations"),
        "message_property_mappings": {
            "role": tags.get("role_tag", "from"),
            "content": tags.get("content_tag", "value"),
        },
    }
    roles = {
        role: [tags[tag]]
        for role, tag in (
            ("user", "user_tag"), ("assistant", "assistant_tag"), ("tool", "observation_tag"),
            ("function_call", "function_tag"), ("system", "system_tag"),
        )
        if tag in tags
    }  # fmt: skip
    if roles:
        made["roles"] = roles
    for column, key in (("system", "field_system"), ("tools", "field_tools")):
        if column in columns:
            made[key] = columns[column]
    return made
