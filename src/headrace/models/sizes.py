"""Which sizes of a configuration no model can have.

The invariant: what passes can be built and run as it is, not only its tiny twin, whose sizes are
others. Builds nothing.
"""

from __future__ import annotations

import math
from typing import Any

from headrace.errors import ConfigError
from headrace.models.building import value_of
from headrace.models.flops import expert_counts

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# The most of each, and why.
_LIMITS = {
    "num_hidden_layers": (10_000, "above any model's"),
    "vocab_size": (2**31, "what the int32 that tokens are stored in can number"),
}


def check_sizes(config: Any) -> None:
    """Refuse sizes from which no model can be built, and values that are no number.

    Raises:
        ConfigError: naming the size.
    """
    for name in _SIZES:
        size = value_of(config, name)
        if isinstance(size, int) and size < 1:
            raise ConfigError(
                f"the model's {name} is {size}; it must be at least 1",
                remedy=f"correct {name} in its configuration",
            )
    for name, (most, why) in _LIMITS.items():
        size = value_of(config, name)
        if isinstance(size, int) and size > most:
            raise ConfigError(
                f"the model's {name} is {size:,}; the limit is {most:,}, {why}",
                remedy=f"correct {name} in its configuration",
            )
    heads = value_of(config, "num_attention_heads")
    groups = value_of(config, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ConfigError(
            f"the model's num_attention_heads is {heads}, which {groups} num_key_value_heads do "
            "not divide",
            remedy="a number of key-value heads that divides the number of heads",
        )
    num_experts, chosen = expert_counts(config)
    if num_experts and chosen is not None and not 1 <= chosen <= num_experts:  # 0: a dense one
        raise ConfigError(
            f"the model sends each token to {chosen} of {num_experts} experts; it must be at "
            "least 1, and no more than there are",
            remedy="correct the numbers of experts in its configuration",
        )
    _refuse_nan(config.to_dict(), "")


def _refuse_nan(value: Any, name: str) -> None:
    """Every result would be NaN; infinity is the limit of some values by default."""
    if isinstance(value, dict):
        for key, part in value.items():
            _refuse_nan(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            _refuse_nan(part, name)
    elif isinstance(value, float) and math.isnan(value):
        raise ConfigError(
            f"the model's {name} is no number (NaN)",
            remedy=f"correct {name} in its configuration",
        )
