"""What distinguishes the decoder families, as far as sizes go.

Owns the table of families and the reading of a Hugging Face ``config.json`` into one. A family says
which projections have biases, how queries and keys are normalised, how many norms a block has and
which keys name the experts; the sizes themselves come from the configuration. The table is
checked, parameter by parameter, against transformers' own modules (``tests/unit``).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import ConfigError

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Structure that a configuration does not spell out.

    Attributes:
        attention: grouped queries, or DeepSeek's latent attention (arXiv:2405.04434).
        qk_norm: over each head, over the whole projection, or absent.
        qkv_bias: whether q, k and v have biases; a string names the key that says so.
        out_bias: the same of the output projection.
        mlp_bias: the same of the dense MLP.
        gated_query: q is twice as wide, its second half gates the output (Qwen3-Next).
        sinks: one learned logit a head (gpt-oss).
        block_norms: RMSNorms of the hidden width in a block.
        norm_after: one of them reads what the MLP gives.
        expert_size: key of an expert's intermediate size; None for a dense family.
        num_experts: keys of the number of experts, the first present counts.
        expert_bias: experts and router have biases (gpt-oss).
        shared_size: key of the shared expert's intermediate size.
        num_shared: key of the number of shared experts, each of ``expert_size``.
        shared_gate: a scalar gate on the shared expert.
        fused: projections in one matrix: ``"qkv"``, ``"gate_up"``, or those of gated DeltaNet
            in two (``"delta"``).
        adapted_shared: PEFT tells the shared expert's linear layers from those of its experts.
        dense_first: key of the number of leading layers without experts.
        full_every: where ``layer_types`` is absent and a window is set, every such layer sees all
            positions and the others the window; None puts the window on all.
        defaults: what transformers assumes where ``config.json`` is silent.
    """

    attention: Literal["gqa", "mla"] = "gqa"
    qk_norm: Literal["head", "full"] | None = None
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    gated_query: bool = False
    sinks: bool = False
    block_norms: int = 2
    norm_after: bool = False
    expert_size: str | None = None
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    expert_bias: bool = False
    shared_size: str | None = None
    num_shared: str | None = None
    shared_gate: bool = False
    fused: tuple[str, ...] = ()
    adapted_shared: bool = False
    dense_first: str | None = None
    full_every: int | None = None
    defaults: Config = field(default_factory=dict)


_QWEN_MOE = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts_per_tok": 8,
    "use_sliding_window": False,
}
_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "head_dim": 256,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(defaults={"num_key_value_heads": 8}),
    "smollm3": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"tie_word_embeddings": True},
    ),
    "granite": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "phi3": Family(fused=("qkv", "gate_up")),
    "qwen2": Family(qkv_bias=True, defaults={"use_sliding_window": False}),
    "qwen3": Family(
        qk_norm="head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        defaults={"head_dim": 128, "use_sliding_window": False},
    ),
    "olmo2": Family(
        qk_norm="full", qkv_bias="attention_bias", out_bias="attention_bias", norm_after=True
    ),
    "olmo3": Family(
        qk_norm="full",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        norm_after=True,
        full_every=4,
        defaults={"sliding_window": 4096},
    ),
    "glm4": Family(
        qkv_bias="attention_bias",
        block_norms=4,
        norm_after=True,
        fused=("gate_up",),
        defaults={"attention_bias": True},
    ),
    "gemma2": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        block_norms=4,
        norm_after=True,
        full_every=2,
        defaults={"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    ),
    "gemma3_text": Family(
        qk_norm="head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        block_norms=4,
        norm_after=True,
        full_every=6,
        defaults={"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    ),
    "mixtral": Family(
        expert_size="intermediate_size",
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "olmoe": Family(
        qk_norm="full",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        expert_size="intermediate_size",
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "qwen3_moe": Family(
        qk_norm="head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        expert_size="moe_intermediate_size",
        defaults=_QWEN_MOE,
    ),
    "qwen3_next": Family(
        qk_norm="head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        gated_query=True,
        expert_size="moe_intermediate_size",
        shared_size="shared_expert_intermediate_size",
        shared_gate=True,
        fused=("delta",),
        defaults={**_QWEN_MOE, **_DELTA_NET, "num_experts_per_tok": 10},
    ),
    "qwen3_5_text": Family(
        qk_norm="head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        gated_query=True,
        defaults=_DELTA_NET,
    ),
    "qwen3_5_moe_text": Family(
        qk_norm="head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        gated_query=True,
        expert_size="moe_intermediate_size",
        shared_size="shared_expert_intermediate_size",
        shared_gate=True,
        adapted_shared=True,
        defaults={**_QWEN_MOE, **_DELTA_NET},
    ),
    "gpt_oss": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        sinks=True,
        expert_size="intermediate_size",
        expert_bias=True,
        full_every=2,
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
    ),
    "glm4_moe": Family(
        qk_norm="head",
        qkv_bias="attention_bias",
        expert_size="moe_intermediate_size",
        num_shared="n_shared_experts",
        dense_first="first_k_dense_replace",
        defaults={
            "head_dim": 128,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
    ),
    "deepseek_v3": Family(
        attention="mla",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        expert_size="moe_intermediate_size",
        num_shared="n_shared_experts",
        dense_first="first_k_dense_replace",
        defaults={"n_shared_experts": 1, "first_k_dense_replace": 3},
    ),
}

# Multimodal wrappers hold the language model's configuration under "text_config".
_TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text"}


def read_family(config: Config) -> tuple[str, Family, dict[str, Any]]:
    """The family of a ``config.json`` and its text configuration with defaults filled in.

    Args:
        config: a Hugging Face configuration as a mapping.

    Returns:
        The model type, its family, and the configuration of the language model.

    Raises:
        ConfigError: there is no ``model_type``, or the family is not in the table.
    """
    text = dict(config.get("text_config") or config)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    if not model_type:
        raise ConfigError(
            "the configuration has no model_type, so its layers are unknown",
            remedy="use the config.json of a Hugging Face causal language model",
        )
    model_type = _TEXT_OF.get(model_type, model_type)
    family = FAMILIES.get(model_type)
    if family is None:
        near = difflib.get_close_matches(model_type, FAMILIES, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise ConfigError(
            f"model_type {model_type!r} is not a family whose sizes are known{hint}",
            remedy=f"known families: {', '.join(sorted(FAMILIES))}",
        )
    tied = config.get("tie_word_embeddings")
    if tied is not None:
        text.setdefault("tie_word_embeddings", tied)
    for key, value in family.defaults.items():
        if text.get(key) is None:
            text[key] = value
    return model_type, family, text


def flag(setting: bool | str, config: Config) -> bool:
    """A family's switch: fixed, or the value of the key it names."""
    return bool(config.get(setting, False)) if isinstance(setting, str) else setting
