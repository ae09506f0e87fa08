"""What axolotl's configurations say beyond keys that have another name here.

Owns axolotl's own keys, its defaults where they differ, and its dataset entries. The invariant is
that of ``aliases.py``: nothing changes in silence, and what cannot be honoured is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.data.templates import DEFAULT, TEMPLATES
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

# Where its defaults are not headrace's; put in only where the file is silent.
DEFAULTS: dict[str, Any] = {
    "max_length": 512,
    "packing": False,
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
}

_ATTENTION = "headrace chooses the attention backend itself"
_KERNELS = "same result, other kernels"
_ONE_PROCESS = "it is about several processes or their memory"
_PACKED = "rows are packed best fit decreasing"

DROPPED = {
    "attention": _ATTENTION,
    "flex_attention": _ATTENTION,
    "flex_attn_compile_kwargs": _ATTENTION,
    "eager_attention": _ATTENTION,
    "flash_attn_cross_entropy": _KERNELS,
    "flash_attn_rms_norm": _KERNELS,
    "flash_attn_fuse_qkv": _KERNELS,
    "flash_attn_fuse_mlp": _KERNELS,
    "flash_optimum": _KERNELS,
    "eot_tokens": "the end-of-turn token is found in the chat template's rendering",
    "chunked_cross_entropy": _KERNELS,
    "cls_model_config": "the model's config.json says its class",
    "base_model_ignore_patterns": "only safetensors are read",
    "activation_offloading": "engine.activations: offload does it",
    "liger_rope": _KERNELS,
    "liger_rms_norm": _KERNELS,
    "liger_glu_activation": _KERNELS,
    "liger_layer_norm": _KERNELS,
    "liger_swiglu": _KERNELS,
    "liger_cross_entropy": _KERNELS,
    "liger_fused_linear_cross_entropy": _KERNELS,
    "cut_cross_entropy": _KERNELS,
    "unsloth_cross_entropy_loss": _KERNELS,
    "unsloth_rms_norm": _KERNELS,
    "unsloth_rope": _KERNELS,
    "torch_compile": "engine.compile chooses; layers are compiled on CUDA",
    "torch_compile_backend": "engine.compile_backend chooses",
    "torch_compile_mode": "engine.compile chooses",
    "gradient_checkpointing_kwargs": "the engine recomputes layers itself",
    "sample_packing_group_size": _PACKED,
    "sample_packing_bin_size": _PACKED,
    "multipack_real_batches": _PACKED,
    "pretrain_multipack_buffer_size": _PACKED,
    "pretrain_multipack_attn": "documents never see each other",
    "dataset_keep_in_memory": "tokens are memory-mapped",
    "dataset_shard_num": "tokens are memory-mapped",
    "save_safetensors": "checkpoints are always safetensors",
    "save_only_model": "checkpoints always hold what a resume needs",
    "local_rank": _ONE_PROCESS,
    "world_size": _ONE_PROCESS,
    "device_map": _ONE_PROCESS,
    "max_memory": _ONE_PROCESS,
    "low_cpu_mem_usage": _ONE_PROCESS,
    "ddp": _ONE_PROCESS,
    "ddp_bucket_cap_mb": _ONE_PROCESS,
    "ddp_broadcast_buffers": _ONE_PROCESS,
    "ddp_find_unused_parameters": _ONE_PROCESS,
    "gc_steps": "there is nothing to collect between steps",
    "debug": "it only prints",
    "include_tokens_per_second": "metrics.jsonl always holds it",
    "hf_use_auth_token": "nothing is downloaded",
    "is_falcon_derived_model": "the model's own class is used",
    "is_mistral_derived_model": "the model's own class is used",
    "is_qwen_derived_model": "the model's own class is used",
    "tokenizer_use_fast": "fast tokenizers are the default",
    "tokenizer_legacy": "the tokenizer's own class is used",
    "eval_table_size": "no table of generations is made",
    "eval_table_max_new_tokens": "no table of generations is made",
    "eval_max_new_tokens": "no table of generations is made",
    "eval_causal_lm_metrics": "evaluation reports loss and perplexity",
}

REFUSED = {
    "tensor_parallel_size": "layers are streamed whole",
    "sequence_parallel_degree": "a sequence stays on one GPU",
    "context_parallel_size": "a sequence stays on one GPU",
    "dp_shard_size": "headrace decides where state lies",
    "fsdp_version": "headrace replaces FSDP: state lives in host memory without its settings",
    "fsdp_final_state_dict_type": "headrace replaces FSDP; checkpoints are whole",
    "s2_attention": "shifted attention is another model",
    "tokens": "the vocabulary is the model's",
    "added_tokens_overrides": "the vocabulary is the model's",
    "overrides_of_model_config": "the model's own configuration is used",
    "resize_token_embeddings_to_32x": "the vocabulary is the model's",
    "dataset_exact_deduplication": "headrace corpus build removes duplicates and says which",
    "min_sample_len": "short documents are packed with others",
    "sample_packing_sequentially": "shuffle: false keeps the order of the files",
    "batch_size": "the global batch follows from two other keys",
    "auto_find_batch_size": "headrace plan says what fits",
    "batch_flattening": "packing: true does that",
    "use_pose": "positions are the tokens' own",
    "cosine_constant_lr_ratio": "it is not a schedule of transformers",
    "lr_quadratic_warmup": "warm-up is linear",
    "use_dynamic_finetuning": "the loss is cross-entropy",
    "use_eaft": "the loss is cross-entropy",
    "quantize_moe_experts": "headrace trains in bfloat16 or float32",
    "float16": "float16 gradients overflow; dtype: bfloat16",
    "save_first_step": "save_steps says when; the first save of a run is checked like every other",
    "profiler_steps": "headrace train --trace FILE records what each lane does",
    "dataset_shard_idx": "max_samples and split: train[:10%] choose a part of a dataset",
    "default_system_message": "a system prompt belongs to the rows or the template",
    "process_reward_model": "headrace trains on the next token",
    "reward_model": "headrace trains on the next token",
    "qat": "full-precision training only",
    "fp8": "headrace trains in bfloat16 or float32",
    "llmcompressor": "full-precision training only",
    "do_bench_eval": "lm_eval_tasks runs benchmarks",
    "do_causal_lm_eval": "evaluation reports loss and perplexity",
    "gptq": "full-precision training only",
    "processor_type": "models are trained as language models, without images, sound and video",
    "skip_prepare_dataset": "datasets are always tokenised before training",
}
REMEDY = {
    "batch_size": "set micro_batch_size and gradient_accumulation_steps",
    "sample_packing_sequentially": "shuffle: false",
    "batch_flattening": "packing: true",
    "dataset_exact_deduplication": "remove it, or build the corpus with headrace corpus build",
}
# Plugins that change how a step is computed, not what it computes.
_KERNEL_PLUGINS = ("liger.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin")
_OWN_TEMPLATES = {
    **dict.fromkeys(("qwen_25", "qwen3", "qwen2_vl", "qwen3_5"), "chatml"),
    **dict.fromkeys(
        ("mistral_v1", "mistral_v2v3", "mistral_v3_tekken", "mistral_v7_tekken"), "mistral"
    ),
    **dict.fromkeys(("gemma3", "gemma3n", "gemma3_text"), "gemma"),
    **dict.fromkeys(("llama3_2_vision",), "llama3"),
    **dict.fromkeys(("phi_35",), "phi_3"),
    "inst": "mistral",
}


def is_axolotl(raw: dict[str, Any]) -> bool:
    """Whether a configuration is axolotl's: it alone names the model ``base_model``."""
    return "base_model" in raw


def _per_epoch(kind: str) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    """``evals_per_epoch`` and ``saves_per_epoch``: shares of the run, as axolotl makes them."""

    def convert(value: Any, raw: dict[str, Any]) -> dict[str, Any]:
        if not value:
            return {f"{kind}_strategy": "no"} if value == 0 else {}
        if not isinstance(value, int):
            raise ConfigError(
                f"{kind}s_per_epoch is {value!r}", remedy=f"a whole number, or {kind}_steps"
            )
        epochs = float(raw.get("num_epochs") or raw.get("num_train_epochs") or 1.0)
        if value == 1:
            return {f"{kind}_strategy": "epoch"}
        return {f"{kind}_strategy": "steps", f"{kind}_steps": 1.0 / (value * epochs)}

    return convert


def _special_tokens(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    tokens = {name: token for name, token in (value or {}).items() if token is not None}
    # Padding is never a target and never counted, so its token does not matter.
    tokens.pop("pad_token", None)
    eos = tokens.pop("eos_token", None)
    return ({"eos_token": eos} if eos else {}) | ({"special_tokens": tokens} if tokens else {})


def _template(value: Any, raw: dict[str, Any]) -> dict[str, Any]:
    if value in (None, ""):
        return {}
    return {"chat_template": template_name(value, raw.get("chat_template_jinja"))}


def template_name(value: Any, jinja: Any) -> str:
    """Translate the name of one of axolotl's chat templates."""
    name = str(value)
    if name == "jinja":
        if not jinja:
            raise ConfigError(
                "chat_template: jinja needs chat_template_jinja", remedy="give the template"
            )
        return str(jinja)
    if name in TEMPLATES or name.startswith(DEFAULT) or "{" in name or "/" in name:
        return name
    if name in _OWN_TEMPLATES:
        return f"{DEFAULT}_fallback_{_OWN_TEMPLATES[name]}"
    return DEFAULT


def _jinja(value: Any, raw: dict[str, Any]) -> dict[str, Any]:
    return {} if not value or raw.get("chat_template") else {"chat_template": str(value)}


def _plugins(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    other = [name for name in value or [] if not str(name).endswith(_KERNEL_PLUGINS)]
    if other:
        raise ConfigError(
            f"plugins: {', '.join(map(str, other))} is refused: axolotl's plugins change its "
            "trainer",
            remedy="remove it",
        )
    return {}


def _shuffle(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    return {"shuffle": False} if value is False else {}


def _curriculum(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    return {"shuffle": False} if value else {}


def _tensorboard(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    return {"report_to": ["tensorboard"]} if value else {}


def _min_lr(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    return {"lr_scheduler_kwargs": {"min_lr_rate": value}} if value else {}


def _streamed(value: Any, _: dict[str, Any]) -> dict[str, Any]:
    if not value:
        return {}
    entries = value if isinstance(value, list) else [{"path": value}]
    made = []
    for given in entries:
        entry = dict(given) if isinstance(given, dict) else {"path": given}
        if "text_column" in entry:
            entry["text_field"] = entry.pop("text_column")
        made.append({"type": "text", "streaming": True, **entry})
    return {"datasets": made}


def _dtype(name: str) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    return lambda value, _: {"dtype": name} if value else {}


CONVERTED: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "evals_per_epoch": _per_epoch("eval"),
    "saves_per_epoch": _per_epoch("save"),
    "special_tokens": _special_tokens,
    "chat_template": _template,
    "chat_template_jinja": _jinja,
    "plugins": _plugins,
    "shuffle_merged_datasets": _shuffle,
    "curriculum_sampling": _curriculum,
    "use_tensorboard": _tensorboard,
    "cosine_min_lr_ratio": _min_lr,
    "pretraining_dataset": _streamed,
    "bfloat16": _dtype("bfloat16"),
    "float32": _dtype("float32"),
}
# Those that headrace does not have: a file that starts from random weights, or has some of
# headrace's names, lacks base_model and may hold them all the same.
ALONE = {
    key: change
    for key, change in CONVERTED.items()
    if key not in {"special_tokens", "chat_template"}
}


def complete(result: dict[str, Any], notes: list[str]) -> None:
    """What follows from several translated keys together; changes ``result`` in place."""
    if "min_lr_rate" in (result.get("lr_scheduler_kwargs") or {}):
        kind = result.get("lr_scheduler_type") or "cosine"
        if kind == "cosine":
            result["lr_scheduler_type"] = "cosine_with_min_lr"
            notes.append("lr_scheduler_type: cosine -> cosine_with_min_lr (it has a minimum)")
    if any(isinstance(e, dict) and e.get("streaming") for e in result.get("datasets") or []):
        for key in ("eval_strategy", "save_strategy"):
            if result.get(key) == "epoch":
                result[key] = "no"
                notes.append(f"{key}: epoch -> no (a stream has no epochs; the end is saved)")
    if not result.get("val_set_size") and not result.get("eval_datasets"):
        for key in ("eval_strategy", "eval_steps"):
            if result.get(key) not in (None, "no"):
                value = result.pop(key)
                notes.append(f"{key}: {value} -> dropped (there is nothing to evaluate on)")
