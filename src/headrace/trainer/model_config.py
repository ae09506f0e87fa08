"""What a model's configuration must hold before a model is built from it.

The invariant: a key that the configuration class does not know is refused (it would leave a
default in force unseen), and so is a value of the wrong type. Builds nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from headrace.errors import ConfigError
from headrace.trainer.config_file import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

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
