"""A Hugging Face causal LM taken apart: embedding, decoder layers, head.

The model lives on the meta device: its modules are templates whose parameters are bound at call
time to views of streamed buffers. Invariant: every parameter of the model belongs to exactly one
unit, a tied head to the embedding's. This module reads structure; it computes nothing.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.errors import ConfigError, HeadraceError, ModelRefusedError
from headrace.models import attention
from headrace.models.adapters import attach
from headrace.models.anatomy import (
    Anatomy,
    beside,
    constructed_values,
    examine,
    find_base,
    find_layers,
    float32_names,
)
from headrace.models.building import build_model, first_line, load_config, text_config
from headrace.models.head import HeadProbe, LogitRule, find_rules
from headrace.models.routing import find_auxiliary_loss
from headrace.models.shrink import MAX_LAYERS, shrink
from headrace.models.sizes import check_sizes
from headrace.models.slices import StackedExperts, find_experts
from headrace.models.structure import covering_prefix
from headrace.models.units import path_of, plan_units, trained_with_adapters
from headrace.store.carried import CarriedTensors
from headrace.store.conversion import WeightNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.models.adapters import Adapters
    from headrace.models.lora import LoraSettings

MAX_TINY = 50_000_000  # parameters of a tiny twin

_anatomies: dict[str, Anatomy] = {}


@dataclass(frozen=True)
class Parts:
    """The modules of a causal LM by role, and their paths in its state dict.

    Attributes:
        base: everything but the head.
        embed_paths: modules of the base that run before the layers and have parameters.
        layers: the decoder layers.
        tail: modules between the last layer and the head, in order (the final norm).
        head: the matrix that gives logits.
    """

    base: nn.Module
    base_path: str
    embed_paths: tuple[str, ...]
    layers: nn.ModuleList
    layers_path: str
    tail: tuple[nn.Module, ...]
    tail_paths: tuple[str, ...]
    head: nn.Linear
    head_path: str


class ModelSpec:
    """Structure of one model: units, templates, names.

    Attributes:
        config: the Hugging Face configuration (of the text part, if the model has others).
        model: the causal LM on the meta device.
        parts: its modules by role.
        units: layouts in order of use: embedding, layers, head.
        tied: the head's matrix is the embedding's.
        before_head: what happens to the final hidden state before the head's matrix, or None.
        logit_rule: what happens to logits after it.
        auxiliary_loss: how its routers are balanced, or None.
        source_config: the whole configuration as it was given.
        weight_names: how its tensors are named and joined in the checkpoint that was loaded.
        carried: what that checkpoint holds besides.
        adapters: the low-rank adapters in its layers, or None.
    """

    def __init__(
        self,
        config: Any,
        *,
        trainable: Callable[[str], bool] | None = None,
        lora: LoraSettings | None = None,
    ) -> None:
        """Build the templates of ``config``.

        Args:
            config: a transformers ``PretrainedConfig`` of a decoder-only causal LM.
            trainable: says of a parameter name whether it is trained; all are by default.
            lora: adapters, which are trained in place of the model's own parameters.

        Raises:
            ModelRefusedError: the streamed step would not be exact for this class or a switch.
            ConfigError: a size is impossible, or adapters were asked for where there is no layer.
        """
        self.source_config = copy.deepcopy(config)
        self.config = text_config(config)
        check_sizes(self.config)
        _refuse_switches(self.config)
        self.model: nn.Module = build_model(self.config, device="meta")
        self.parts, self._anatomy = _find_parts(self.model, self.config)
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        self.tied = self.parts.head.weight is embedding.weight
        self._embedding = embedding
        self.before_head, self.logit_rule = self._find_head_rules()
        self.weight_names = WeightNames(self.model)
        self.carried = CarriedTensors()
        self.auxiliary_loss = find_auxiliary_loss(self.model, self.config)
        self._plain_layers = self.parts.layers
        self.adapters: Adapters | None = None
        if lora is not None:
            assert trainable is None, "adapters say what is trained"
            trainable = self._attach_adapters(lora)
        self.units = plan_units(
            self.model, self.parts, self._anatomy, trainable or (lambda _: True)
        )

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, trust_remote_code: bool = False) -> ModelSpec:
        """Read the configuration of a model folder (or a cached hub name) and build its spec."""
        return cls(load_config(name_or_path, trust_remote_code=trust_remote_code))

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> ModelSpec:
        """Build the spec of a configuration object; options as the class takes them.

        Raises:
            HeadraceError: as the class says, and where its code breaks in any other way.
        """
        try:
            return cls(config, **options)
        except HeadraceError:
            raise
        except Exception as error:
            raise ModelRefusedError(
                f"a {getattr(config, 'model_type', '?')!r} model could not be taken apart: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error

    def _attach_adapters(self, lora: LoraSettings) -> Callable[[str], bool]:
        """Replace the layers' templates; says which of the model's own parameters are trained."""
        path = f"{self.parts.base_path}.{self.parts.layers_path}"
        tied = (path_of(self.model, self._embedding), self.parts.head_path) if self.tied else ()
        trained = trained_with_adapters(self.model, lora, tied)
        self.adapters = attach(
            self.model, path, lora, lambda: build_model(self.config, device="meta")
        )
        self.parts = replace(self.parts, layers=self.adapters.layers)
        return trained

    def _find_head_rules(
        self,
    ) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, LogitRule]:
        probe = HeadProbe(self.model, self.parts.base_path, self.parts.head_path)
        try:
            return find_rules(
                probe, self.config, hidden_size=self.hidden_size, vocab_size=self.vocab_size
            )
        except (RuntimeError, TypeError, AttributeError) as error:
            raise ModelRefusedError(
                f"{type(self.model).__name__} computes with weights or arguments of its own "
                f"between its base model and its logits: {first_line(error)}"
            ) from error

    @property
    def is_balanced(self) -> bool:
        """A loss over the tokens of each micro-batch balances its experts."""
        return self.auxiliary_loss is not None and self.auxiliary_loss.coefficient != 0

    @functools.cached_property
    def experts(self) -> dict[int, StackedExperts]:
        """By layer, experts that can be sent in slices."""
        found = {}
        for index, layer in enumerate(self.parts.layers):
            experts = find_experts(layer)
            float32 = {param.local_name for param in self.units[1 + index].float32_params}
            if experts is not None and not float32.intersection(experts.local_names):
                found[index] = experts
        return found

    @property
    def drops(self) -> bool:
        """Training drops elements of what its adapters read."""
        return self.adapters is not None and self.adapters.settings.dropout > 0

    @property
    def embedding_name(self) -> str:
        """Local name of the token embedding's matrix in the embedding unit."""
        path = path_of(self.model, self._embedding)
        return f"{path.removeprefix(f'{self.parts.base_path}.')}.weight"

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
        """Width of the head's input."""
        return int(self.parts.head.weight.shape[1])

    @property
    def vocab_size(self) -> int:
        """Rows of the head's matrix."""
        return int(self.parts.head.weight.shape[0])

    def layer(self, index: int) -> nn.Module:
        """The template of a decoder layer."""
        return self.parts.layers[index]

    def unit_modules(self, number: int) -> list[tuple[str, nn.Module]]:
        """The plain modules whose parameters make up a unit, each with the prefix of local names.

        Adapters are not in them, nor parameters that a base model holds itself, outside any module.
        """
        if 0 < number <= self.num_layers:
            return [("", self._plain_layers[number - 1])]
        if number == 0:
            base = self.parts.base
            return [(f"{path}.", base.get_submodule(path)) for path in self.parts.embed_paths]
        tail = [(f"tail.{i}.", module) for i, module in enumerate(self.parts.tail)]
        has_own = not self.tied or self.parts.head.bias is not None
        return [*tail, ("head.", self.parts.head)] if has_own else tail

    def constant(self, name: str) -> float | None:
        """The fresh value of a parameter that the class's initialisation rule does not set.

        Raises:
            ConfigError: it is not one number, so that it comes from a checkpoint or not at all.
        """
        key = self._anatomy.without_number(name)
        if key not in self._anatomy.constants:
            return None
        value = self._anatomy.constants[key]
        if value is None:
            raise ConfigError(
                f"{type(self.model).__name__} draws {name} where it makes its modules, which "
                "headrace cannot repeat for one layer at a time",
                remedy="start from a checkpoint that transformers has saved",
            )
        return value

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters that have gradients and optimizer state, adapters included."""
        return sum(unit.num_trainable_parameters for unit in self.units)

    @property
    def first_trained_layer(self) -> int:
        """The first layer that backward passes through: below it nothing is trained."""
        trained = [bool(unit.num_trainable) for unit in self.units[:-1]]
        return max(0, trained.index(True) - 1) if any(trained) else self.num_layers

    def parameter_names(self) -> Iterator[str]:
        """Names of all parameters, in order of units and offsets."""
        for unit in self.units:
            for param in unit.params:
                yield param.name


def _find_parts(model: nn.Module, config: Any) -> tuple[Parts, Anatomy]:
    """Find embedding, layers, final norm and head of a causal LM, and check their contract.

    Raises:
        ModelRefusedError: one of them is missing, or the layers cannot be streamed.
    """
    base_path = find_base(model)
    base = model.get_submodule(base_path)
    layers = base.get_submodule(find_layers(base))
    assert isinstance(layers, nn.ModuleList)
    found = _anatomy(config, covering_prefix(list(layers), MAX_LAYERS))
    head = model.get_submodule(found.head_path)
    assert isinstance(head, nn.Linear)
    embed_paths = tuple(
        path
        for path, module in beside(base, found.layers_path)
        if path not in found.tail_paths and any(True for _ in module.parameters())
    )
    parts = Parts(
        base=base,
        base_path=base_path,
        embed_paths=embed_paths,
        layers=layers,
        layers_path=found.layers_path,
        tail=tuple(base.get_submodule(path) for path in found.tail_paths),
        tail_paths=found.tail_paths,
        head=head,
        head_path=found.head_path,
    )
    return parts, found


def _anatomy(config: Any, num_layers: int) -> Anatomy:
    """Examine a tiny twin, once for each configuration in a process."""
    try:
        tiny = shrink(config, num_layers)
        key = f"{type(config).__qualname__} {json.dumps(tiny.to_dict(), default=str)}"
        if key not in _anatomies:
            _refuse_large(tiny)
            with torch.random.fork_rng(devices=[]):
                twin = build_model(tiny, device="cpu", attention_name=attention.EXAMINING)
                found = examine(twin)
                half = build_model(tiny, device="meta", dtype=torch.bfloat16)
                _anatomies[key] = replace(
                    found,
                    float32=float32_names(half, found),
                    constants=constructed_values(twin, found),
                )
    except HeadraceError:
        raise
    except Exception as error:
        if "'Pattern'" in str(error):
            raise ModelRefusedError(
                f"{type(config).__name__.removesuffix('Config')} reads its attention mask outside "
                "the attention function, and headrace builds no masks"
            ) from error
        raise ModelRefusedError(
            f"a tiny model of type {getattr(config, 'model_type', '?')!r} could not be run to "
            f"examine it: {type(error).__name__}: {first_line(error)}"
        ) from error
    return _anatomies[key]


def _refuse_large(tiny: Any) -> None:
    size = sum(p.numel() for p in build_model(tiny, device="meta").parameters())
    if size > MAX_TINY:
        raise ModelRefusedError(
            f"the tiny twin of a {tiny.model_type!r} model still has {size:,} parameters: "
            "headrace does not know the names of its sizes"
        )


def _refuse_switches(config: Any) -> None:
    for name, value in config.to_dict().items():
        noisy = name.endswith(("dropout", "_pdrop", "dropout_prob", "jitter_noise", "layerdrop"))
        # Of heads that classify: GPT-NeoX's has a value by default, and a causal LM has none.
        elsewhere = name.startswith(("classifier", "summary"))
        if noisy and not elsewhere and isinstance(value, (int, float)) and value:
            raise ModelRefusedError(
                f"{name} is {value}: randomness would differ between forward and recompute",
                remedy=f"set {name} to 0 in config.json",
            )
    if getattr(config, "quantization_config", None):
        raise ModelRefusedError(
            "the weights are quantized, and full-parameter training needs plain ones",
            remedy="give the unquantized model",
        )
