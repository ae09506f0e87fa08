"""What a model's configuration must hold before a model is built from it.

The invariant: a key that the configuration class does not know is refused (it would leave a
default in force unseen), and so are sizes from which no model can be built. Builds nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from headrace.errors import ConfigError
from headrace.models.building import value_of
from headrace.models.flops import expert_counts
from headrace.trainer.config_file import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

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
# Of config.json files in general, and older names that transformers still takes.
_COMMON = (
    "_name_or_path", "architectures", "auto_map", "dtype", "model_type", "rope_scaling",
    "rope_theta", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
_OPTIONAL = re.compile(r"""getattr\((?:self\.)?config, "(\w+)\"""")
# What a configuration class raises for a value it did not expect.
_UNUSABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError)


@contextlib.contextmanager
def usable(where: str) -> Iterator[None]:
    """Turn what transformers raises for a value it cannot use into a :class:`ConfigError`."""
    try:
        yield
    except (*_UNUSABLE, StrictDataclassError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(
            f"{where} is not usable: {' '.join(lines) or repr(error)}",
            remedy="use the keys and types of the model's config.json",
        ) from error


def refuse_unknown_keys(values: dict[str, Any], kind: Any) -> None:
    """Refuse keys of ``model_config:`` that configuration class ``kind`` does not know.

    Raises:
        ConfigError: naming each with the nearest that it knows.
    """
    known = {field.name for field in dataclasses.fields(kind)} | set(kind().to_dict())
    known |= set(getattr(kind, "attribute_map", {})) | set(_COMMON) | _optional_keys(kind)
    refuse_unknown(values, sorted(known), "model_config.")


def _optional_keys(kind: Any) -> set[str]:
    """Keys that the model's code reads if they are there, such as Qwen3-MoE's ``head_dim``."""
    found: set[str] = set()
    for path in Path(inspect.getfile(kind)).parent.glob("modeling_*.py"):
        found |= set(_OPTIONAL.findall(path.read_text(encoding="utf-8")))
    return found


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
