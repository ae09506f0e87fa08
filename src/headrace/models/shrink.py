"""A tiny configuration of the same class with the same switches.

Sizes shrink, structure stays: whichever kinds of layers a model has are all in its tiny twin, in
their order, and whatever is switched on (windows, soft caps, multipliers, biases, tied weights,
grouped heads, rotary scaling) stays on, at a size where it matters to a dozen tokens. Pure: a
configuration in, a configuration out.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

HIDDEN = 32
VOCAB = 96
POSITIONS = 64
WINDOW = 5
NUM_EXPERTS = 8
MAX_LAYERS = 48

# The first pattern that matches a whole key decides its size. A relation between two sizes that a
# model class asserts (heads times head size, groups that divide experts) is kept by the numbers.
_SIZES: tuple[tuple[str, int], ...] = (
    ("hidden_size|n_embd|d_model|dim_model|emb_dim|attention_hidden_size|lru_width", HIDDEN),
    ("moe_intermediate_size|expert_ffn_hidden_size|block_ffn_dim", 24),
    (r"(moe_)?shared_(expert_)?(expert|experts)?_?intermediate_size|shared_intermediate_size", 24),
    (r"\w*intermediate_size(_mlp)?|ffn_dim|dff|dim_ff|ffn_hidden_size|n_inner|d_inner", 40),
    (r"feed_forward_size|decoder_ffn_dim|encoder_ffn_dim|block_dim", 40),
    (r"(unpadded_|decoder_)?vocab_size(_per_layer_input)?", VOCAB),
    ("hidden_size_per_layer_input|ple_embed_dim", 8),
    ("max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length", POSITIONS),
    ("context_length|model_max_length|max_target_positions", POSITIONS),
    ("sliding_window|window_size|sliding_window_size|attention_window_size", WINDOW),
    ("attention_chunk_size|local_attention", WINDOW + 1),
    ("q_lora_rank", 24),
    ("kv_lora_rank|qk_nope_head_dim", 16),
    ("qk_rope_head_dim", 8),
    ("v_head_dim", 12),
    ("head_dim|attention_head_dim|kv_channels|attention_head_size|dim_head", 16),
    ("swa_head_dim|swa_v_head_dim", 16),
    ("linear_(key|value)_head_dim|linear_head_dim", 8),
    ("mamba_d_state|ssm_state_size|mamba_d_head|mamba_head_dim|mamba_headdim", 8),
    ("mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    ("mamba_d_ssm", 64),
    ("mamba_n_groups|mamba_ngroups|n_groups", 2),
    ("mamba_chunk_size|chunk_size", 8),
    ("mamba_dt_rank|time_step_rank", 4),
    (r"\w*_lora_rank|laurel_rank|gated_norm_rank|adapter_rank", 8),
    ("rotary_dim", 8),
    ("index_head_dim", 16),
    ("index_n_heads", 2),
    ("index_topk|index_block_size", 4),
    ("num_experts|num_local_experts|n_routed_experts|moe_num_experts", NUM_EXPERTS),
)
# These stay equal to the hidden size, or unlike it: a model then projects between the two.
_EMBEDDING = "word_embed_proj_dim|embedding_size|input_embedding_size|output_embedding_size"
_HIDDEN = _SIZES[0][0]
_HEADS = "num_attention_heads|n_head|n_heads|num_heads|attention_heads|decoder_attention_heads"
_KEY_VALUE_HEADS = "num_key_value_heads|num_kv_heads|n_head_kv|num_query_groups"
_TOP_K = "num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts"
_TOKEN_IDS = re.compile(r"\w*_token_(id|index)|\w*_token_id")


def shrink(config: Any, num_layers: int) -> Any:
    """A tiny configuration with the first ``num_layers`` layers of ``config``.

    Args:
        config: a transformers configuration of a decoder (its text part, if it has several).
        num_layers: as many as needed to have a layer of every kind.
    """
    values = copy.deepcopy(config.to_dict())
    depth = depth_of(config)
    values.pop("transformers_version", None)
    values.pop("model_type", None)
    values.pop("quantization_config", None)
    values["dtype"] = "float32"
    original = copy.deepcopy(values)  # relations are those of the model, not of a half-shrunk one
    for key, value in original.items():
        values[key] = _shrunk(key, value, original, depth, num_layers)
    _keep_head_size(values, original)
    _keep_latent_sizes(values, original)
    _shrink_rotary(values, config)
    for key in _depth_keys(config):
        values[key] = num_layers
    tiny = type(config)(**values)
    tiny.architectures = None
    return tiny


def depth_of(config: Any) -> int:
    """Decoder layers of a configuration; 0 when it has no such number."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"):
        value = getattr(config, key, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def _depth_keys(config: Any) -> list[str]:
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    # A class may store one of the names under another.
    stored = {getattr(config, "attribute_map", {}).get(name, name) for name in names}
    return [name for name in stored if name in config.to_dict()]


def _shrunk(key: str, value: Any, values: dict[str, Any], depth: int, num_layers: int) -> Any:
    if key == "per_layer_config" and isinstance(value, dict):
        return {
            layer: {
                k: _shrunk(k, v, values | changes, depth, num_layers) for k, v in changes.items()
            }
            for layer, changes in value.items()
            if int(layer) < num_layers
        }
    if isinstance(value, dict) and key not in {"id2label", "label2id"}:
        # Options of a part (a feed-forward, an attention) under names of their own.
        return {k: _shrunk(k, v, value, depth, num_layers) for k, v in value.items()}
    if isinstance(value, list):
        if depth and len(value) == depth:
            return [_shrunk(key, item, values, depth, num_layers) for item in value[:num_layers]]
        if value and all(isinstance(item, int) and item < depth for item in value):
            return [item for item in value if item < num_layers]  # indices of layers
        if _TOKEN_IDS.fullmatch(key) and value:
            return 2
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _TOKEN_IDS.fullmatch(key):
        return None if value < 0 else value % (VOCAB - 1)
    if re.fullmatch(_HEADS, key):
        return 2 if value == _key_value_heads(values) else 4
    if re.fullmatch(_KEY_VALUE_HEADS, key):
        return 1 if value == 1 else 2
    if key.startswith("swa_num_"):
        return 4 if "attention_heads" in key else 2
    if re.fullmatch("linear_num_(key|value)_heads|linear_num_heads", key):
        ratio = values.get("linear_num_value_heads", 1) / values.get("linear_num_key_heads", 1)
        return 2 if "value" not in key else max(2, round(2 * ratio))
    if re.fullmatch(_TOP_K, key):
        return min(value, 2)
    if re.fullmatch(_EMBEDDING, key):
        hidden = [v for k, v in values.items() if re.fullmatch(_HIDDEN, k)]
        return HIDDEN if value in hidden else 24
    if key in {"n_group", "num_expert_group", "topk_group"}:
        return min(value, 2 if key != "topk_group" else max(1, min(value, 2) - 1))
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, key):
            return size if value > 0 else value
    return value


def _keep_head_size(values: dict[str, Any], original: dict[str, Any]) -> None:
    """Heads that make up the hidden size still do: some classes take it for granted."""
    heads, head, hidden = (
        next((k for k in original if re.fullmatch(pattern, k) and isinstance(original[k], int)), "")
        for pattern in (_HEADS, "head_dim", _HIDDEN)
    )
    if heads and head and hidden and original[heads] * original[head] == original[hidden]:
        values[head] = values[hidden] // values[heads]


def _keep_latent_sizes(values: dict[str, Any], original: dict[str, Any]) -> None:
    """Sizes of latent attention that a class derives from others."""
    rope, nope = values.get("qk_rope_head_dim"), values.get("qk_nope_head_dim")
    if rope is None or nope is None:
        return
    for key in ("head_dim", "qk_head_dim"):
        before = original.get(key)
        if before == original["qk_rope_head_dim"]:
            values[key] = rope
        elif before == original["qk_rope_head_dim"] + original["qk_nope_head_dim"]:
            values[key] = rope + nope


def _key_value_heads(values: dict[str, Any]) -> int | None:
    for key in _KEY_VALUE_HEADS.split("|"):
        if isinstance(values.get(key), int):
            return int(values[key])
    return None


def _shrink_rotary(values: dict[str, Any], config: Any) -> None:
    """Rotary tables: fewer original positions, and lists of factors as long as the tiny heads."""
    before = getattr(config, "max_position_embeddings", None) or POSITIONS
    scale = before / POSITIONS
    if isinstance(values.get("original_max_position_embeddings"), int):
        values["original_max_position_embeddings"] = max(
            8, int(values["original_max_position_embeddings"] / scale)
        )
    _keep_rotary_even(values, values)
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if not isinstance(rope, dict):
            continue
        nested = [part for part in rope.values() if isinstance(part, dict)] or [rope]
        for part in nested:
            _keep_rotary_even(part, values)
            original = part.get("original_max_position_embeddings")
            if isinstance(original, (int, float)):
                part["original_max_position_embeddings"] = max(8, int(original / scale))
            size = _rotary_size(values, part)
            for name in ("long_factor", "short_factor"):
                if isinstance(part.get(name), list) and size:
                    part[name] = _resampled(part[name], size // 2)
            section = part.get("mrope_section")
            if isinstance(section, list) and size:
                part["mrope_section"] = _resized(section, size // 2)


def _keep_rotary_even(part: dict[str, Any], values: dict[str, Any]) -> None:
    """Rotary tables turn pairs: the turned share of a tiny head is rounded to whole ones."""
    for name in ("partial_rotary_factor", "rotary_pct", "rope_pct"):
        if isinstance(part.get(name), float):
            head = _head_size(values)
            part[name] = min(1.0, 2 * max(1, round(head * part[name] / 2)) / head)


def _head_size(values: dict[str, Any]) -> int:
    heads = next((values[k] for k in _HEADS.split("|") if isinstance(values.get(k), int)), 1)
    return int(values.get("qk_rope_head_dim") or values.get("head_dim") or HIDDEN // heads)


def _rotary_size(values: dict[str, Any], part: dict[str, Any]) -> int:
    share = part.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    return int(_head_size(values) * share)


def _resampled(factors: list[float], length: int) -> list[float]:
    return [factors[math.floor(i * len(factors) / length)] for i in range(length)]


def _resized(section: list[int], total: int) -> list[int]:
    whole = sum(section)
    parts = [max(1, total * part // whole) for part in section]
    parts[0] += total - sum(parts)
    return parts
