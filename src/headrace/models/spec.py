"""A Hugging Face causal LM taken apart: embedding, decoder layers, head.

The model lives on the meta device: its modules are templates whose parameters are bound at call
time to views of streamed buffers. Invariant: every parameter of the model belongs to exactly one
unit, a tied head to the embedding's. This module reads structure; it computes nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.errors import ConfigError, ModelRefusedError
from headrace.models import attention
from headrace.store.layout import UnitLayout, plan_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Verified against plain autograd, parameter by parameter, in tests/parity.
VERIFIED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Parts:
    """The modules of a causal LM by role, and their paths in its state dict."""

    base: nn.Module
    base_path: str
    embed_path: str
    layers: nn.ModuleList
    layers_path: str
    norm: nn.Module
    norm_path: str
    head: nn.Linear
    head_path: str


class ModelSpec:
    """Structure of one model: units, templates, names.

    Attributes:
        config: the Hugging Face configuration.
        model: the causal LM on the meta device.
        parts: its modules by role.
        units: layouts in order of use: embedding, layers, head.
        tied: the head's matrix is the embedding's.
    """

    def __init__(self, config: Any, *, trainable: Callable[[str], bool] | None = None) -> None:
        """Build the templates of ``config``.

        Args:
            config: a transformers ``PretrainedConfig`` of a decoder-only causal LM.
            trainable: says of a parameter name whether it is trained; all are by default.

        Raises:
            ModelRefusedError: the family or a switch is not one the streamed step is exact for.
        """
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow; only when needed

        self.config = copy.deepcopy(config)
        _refuse_switches(self.config)
        attention.register()
        with torch.device("meta"):
            # A copy of its own: building another model from ``self.config`` would change the
            # attention of this one.
            self.model: nn.Module = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config),
                dtype=torch.float32,
                attn_implementation=attention.IMPLEMENTATION,
                trust_remote_code=False,
            )
        self.model.train()
        self.parts = find_parts(self.model)
        self.tied = self.parts.head.weight is self.model.get_input_embeddings().weight
        self.units = self._plan_units(trainable or (lambda _: True))

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, trust_remote_code: bool = False) -> ModelSpec:
        """Read the configuration of a model folder (or a cached hub name) and build its spec."""
        return cls(load_config(name_or_path, trust_remote_code=trust_remote_code))

    @classmethod
    def from_config(cls, config: Any) -> ModelSpec:
        """Build the spec of a configuration object."""
        return cls(config)

    def _plan_units(self, trainable: Callable[[str], bool]) -> tuple[UnitLayout, ...]:
        parts = self.parts
        seen: set[int] = set()

        def entries(module: nn.Module, path: str) -> list[tuple[str, str, tuple[int, ...], bool]]:
            found = []
            for local, parameter in module.named_parameters():
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                name = f"{path}.{local}"
                found.append((name, local, tuple(parameter.shape), trainable(name)))
            return found

        embed = parts.base.get_submodule(parts.embed_path)
        units = [plan_unit("embed", entries(embed, f"{parts.base_path}.{parts.embed_path}"))]
        for i, layer in enumerate(parts.layers):
            units.append(plan_unit(f"layers.{i}", entries(layer, f"{parts.layers_path}.{i}")))
        norm = [
            (n, f"norm.{local}", s, t) for n, local, s, t in entries(parts.norm, parts.norm_path)
        ]
        head = [
            (n, f"head.{local}", s, t) for n, local, s, t in entries(parts.head, parts.head_path)
        ]
        units.append(plan_unit("head", norm + head))
        rest = [name for name, p in self.model.named_parameters() if id(p) not in seen]
        if rest:
            raise ModelRefusedError(
                f"{type(self.model).__name__} has parameters outside embedding, layers, final norm "
                f"and head: {', '.join(rest[:3])}"
            )
        return tuple(units)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.parts.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters, a tied head counted once."""
        return sum(unit.num_parameters for unit in self.units)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the head's matrix."""
        return int(self.parts.head.weight.shape[0])

    def layer(self, index: int) -> nn.Module:
        """The template of a decoder layer."""
        return self.parts.layers[index]

    def parameter_names(self) -> Iterator[str]:
        """Names of all parameters, in order of units and offsets."""
        for unit in self.units:
            for param in unit.params:
                yield param.name


def load_config(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model folder, a ``config.json``, or a name in the local hub cache.

    Nothing is downloaded unless the user's environment allows it (``HF_HUB_OFFLINE``).

    Raises:
        ConfigError: there is no such configuration.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - slow; only when needed

    path = Path(name_or_path)
    if path.suffix == ".json" and path.is_file():
        path = path.parent
    source = str(path) if path.exists() else name_or_path
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(
            f"no model configuration at {name_or_path!r}: {first}",
            remedy="give a folder with config.json, or download the model first",
        ) from error


def find_parts(model: nn.Module) -> Parts:
    """Find embedding, layers, final norm and head of a causal LM.

    Raises:
        ModelRefusedError: one of them is missing or of an unknown kind.
    """
    base_path = getattr(model, "base_model_prefix", "")
    base = getattr(model, base_path, None) if base_path else None
    kind = type(model).__name__
    if base is None:
        raise ModelRefusedError(f"{kind} has no base model under {base_path!r}")
    names = {id(module): name for name, module in base.named_modules()}
    embed = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = getattr(base, "layers", None)
    norm = getattr(base, "norm", None)
    if not isinstance(layers, nn.ModuleList) or norm is None or id(embed) not in names:
        raise ModelRefusedError(
            f"{kind} is not laid out as embedding, 'layers' and a final 'norm'; found "
            f"{', '.join(name for name, _ in base.named_children())}"
        )
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ModelRefusedError(f"{kind} has a head that is not a linear layer without bias")
    head_path = next(name for name, module in model.named_modules() if module is head)
    return Parts(
        base=base,
        base_path=base_path,
        embed_path=names[id(embed)],
        layers=layers,
        layers_path=f"{base_path}.layers",
        norm=norm,
        norm_path=f"{base_path}.norm",
        head=head,
        head_path=head_path,
    )


def _refuse_switches(config: Any) -> None:
    family = getattr(config, "model_type", "?")
    if family not in VERIFIED_FAMILIES:
        raise ModelRefusedError(
            f"model type {family!r} has not been verified; the streamed step is verified for "
            f"{', '.join(VERIFIED_FAMILIES)}",
            remedy="train one of these families",
        )
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        value = getattr(config, name, 0.0) or 0.0
        if value:
            raise ModelRefusedError(
                f"{name} is {value}: dropout would differ between forward and recompute",
                remedy=f"set {name} to 0 in config.json",
            )
    if getattr(config, "quantization_config", None):
        raise ModelRefusedError(
            "the weights are quantized, and full-parameter training needs plain ones",
            remedy="give the unquantized model",
        )
