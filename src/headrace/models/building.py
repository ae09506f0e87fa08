"""From a configuration to a Hugging Face causal LM with headrace's attention and experts.

Invariant: a model is built from a copy of its configuration, so that building another changes
nothing here. Reads no weights; what transformers cannot build is refused with its reason.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import ConfigError, ModelRefusedError
from headrace.folders import check_model_folder
from headrace.models import attention, experts, families
from headrace.models.nearby import check_there

if TYPE_CHECKING:
    from torch import nn

# What transformers raises for a configuration that is missing or that it cannot use.
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


def load_config(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model folder, a ``config.json``, or a name in the local hub cache.

    Nothing is downloaded, and a name that means nothing is answered before transformers is loaded.

    Raises:
        ConfigError: there is no such configuration.
    """
    check_there(name_or_path)
    check_model_folder(Path(name_or_path))
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415 - as below
    from transformers import AutoConfig  # noqa: PLC0415 - slow; only when needed

    path = Path(name_or_path)
    if path.suffix == ".json" and path.is_file():
        path = path.parent
    source = str(path) if path.exists() else name_or_path
    try:
        return AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (*_UNUSABLE, StrictDataclassError) as error:
        lines = " ".join(line.strip() for line in str(error).splitlines()[:3]) or repr(error)
        raise ConfigError(
            f"no model configuration at {name_or_path!r}: {lines}",
            remedy="give a folder with config.json, or download the model first",
        ) from error


def text_config(config: Any) -> Any:
    """A copy of the part of a configuration that the causal LM is built from.

    Raises:
        ModelRefusedError: it is not that of a decoder-only model.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefusedError(
            f"{config.model_type} is an encoder-decoder; headrace trains decoder-only models"
        )
    text = config.get_text_config(decoder=True)
    # A copy of its own: building another model from it would change the attention of this one.
    return copy.deepcopy(text)


def value_of(config: Any, name: str) -> Any:
    """A value of a configuration, or ``None`` where it has none or one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to give one of several
        return None


def build_model(
    config: Any,
    *,
    device: str,
    attention_name: str = attention.IMPLEMENTATION,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The causal LM of a configuration with headrace's attention and experts.

    Raises:
        ModelRefusedError: transformers has no causal LM for it, or cannot build this one.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow; only when needed

    attention.register()
    experts.register()
    try:
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=dtype,
                attn_implementation=attention_name,
                experts_implementation=experts.IMPLEMENTATION,
                trust_remote_code=False,
            )
    except KeyError as error:
        if error.args == (attention_name,):
            raise ModelRefusedError(
                f"{type(config).__name__.removesuffix('Config')} does not take its attention from "
                "transformers' attention interface, so headrace cannot give it one"
            ) from error
        raise ModelRefusedError(_cannot_build(config, error)) from error
    except MemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises
        raise ModelRefusedError(_cannot_build(config, error)) from error
    families.adapt(model)
    return model.train()


def _cannot_build(config: Any, error: BaseException) -> str:
    return (
        f"transformers cannot build a causal LM from a {getattr(config, 'model_type', '?')!r} "
        f"configuration: {type(error).__name__}: {first_line(error)}"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, its kind where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)
