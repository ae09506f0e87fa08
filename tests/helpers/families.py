"""Configurations of released models, by family: full size, so that shrinking is tested too.

Each names the switches that set its family apart. Nothing is downloaded: these are the values of
the models' own config.json files, as far as they say something about structure.
"""

from __future__ import annotations

from transformers import AutoConfig

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + 0.5 * i for i in range(48)],
    "short_factor": [1.0 + 0.01 * i for i in range(48)],
}

# Family, as docs/models.md names it: model_type and what differs from the class's defaults.
DENSE = {
    "Llama 2": ("llama", {"num_key_value_heads": 32, "max_position_embeddings": 4096}),
    "Llama 3.1": (
        "llama",
        {
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "Llama 3.2 1B": (
        "llama",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "Mistral": ("mistral", {"sliding_window": 4096, "num_key_value_heads": 8}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "Qwen2.5": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 131072, "max_window_layers": 3},
    ),
    "Qwen3": ("qwen3", {"head_dim": 128, "num_key_value_heads": 8, "num_attention_heads": 32}),
    "Phi-3": (
        "phi3",
        {
            "num_key_value_heads": 32,
            "sliding_window": 2047,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": _LONG_ROPE,
        },
    ),
    "Phi-4": ("phi3", {"num_attention_heads": 40, "num_key_value_heads": 10, "hidden_size": 5120}),
    "Phi-4-mini": (
        "phi3",
        {
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "hidden_size": 3072,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
    ),
    "OLMo": ("olmo", {"clip_qkv": 8.0}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {"sliding_window": 4096}),
    "SmolLM3": ("smollm3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "Granite": (
        "granite",
        {
            "num_key_value_heads": 8,
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "residual_multiplier": 0.22,
            "tie_word_embeddings": True,
        },
    ),
    "GLM-4 (9B)": ("glm", {"attention_bias": True}),
    "GLM-4-0414": ("glm4", {"attention_bias": True}),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3": ("gemma3_text", {"num_hidden_layers": 26}),
    "Gemma 3 (vision)": ("gemma3", {}),
}
MOE = {
    "Mixtral": ("mixtral", {}),
    "Qwen3-MoE": ("qwen3_moe", {"norm_topk_prob": True, "num_experts": 128, "head_dim": 128}),
    "OLMoE": ("olmoe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "GLM-4.5": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "MiniMax-M2": ("minimax_m2", {"rotary_dim": 64}),
    "DeepSeek-V3": ("deepseek_v3", {"rope_parameters": _YARN, "max_position_embeddings": 163840}),
}
HYBRID = {
    "Qwen3-Next": ("qwen3_next", {}),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Qwen3.5 MoE (35B-A3B)": ("qwen3_5_moe", {}),
}
FAMILIES = DENSE | MOE | HYBRID


def family_config(family):
    """The configuration of a released model."""
    model_type, values = FAMILIES[family]
    return AutoConfig.for_model(model_type, **values)
