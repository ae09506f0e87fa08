"""The structure of the model to train, and whether the run's keys fit it.

Owns what can be said of a model without its weights: which parameters are trained, whether every
pattern and group means one, whether rows have positions. The invariant: a key that would do
nothing to this model is refused. Reads no weights.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.models.spec import ModelSpec
from headrace.trainer.adapters import adapter_settings, check_listed

if TYPE_CHECKING:
    from headrace.trainer.config import TrainConfig


def take_apart(config: TrainConfig, model_config: Any) -> ModelSpec:
    """The structure of the model to train, and which of its parameters are.

    Raises:
        ModelRefusedError: it cannot be trained exactly.
        ConfigError: a pattern or a target means no parameter, or nothing is left to train.
    """
    settings = adapter_settings(config)
    if settings is not None:
        spec = ModelSpec.from_config(model_config, lora=settings)
        check_listed(config, spec)
        _name_base(config, spec)
    else:
        spec = _with_frozen(config, model_config)
    coefficient = config.router_aux_loss_coef
    if coefficient is None:
        return spec
    if spec.auxiliary_loss is not None:
        spec.auxiliary_loss = replace(spec.auxiliary_loss, coefficient=coefficient)
    elif coefficient:
        raise ConfigError(
            f"router_aux_loss_coef is {coefficient:g}, and transformers defines no balancing loss "
            f"for {type(spec.model).__name__}",
            remedy="remove it; metrics.jsonl shows the load of the experts in any case",
        )
    return spec


def _name_base(config: TrainConfig, spec: ModelSpec) -> None:
    """Write into the adapters' configuration whose they are, as PEFT does.

    A folder by its whole path, so that the adapters find it from any other folder.
    """
    assert spec.adapters is not None
    assert config.model_name_or_path is not None, "adapters have a model they belong to"
    folder = Path(config.model_name_or_path).expanduser()
    named = str(folder.resolve()) if folder.is_dir() else config.model_name_or_path
    spec.adapters.peft_config.base_model_name_or_path = named


def _with_frozen(config: TrainConfig, model_config: Any) -> ModelSpec:
    names: list[str] = []

    def trained(name: str) -> bool:
        names.append(name)
        return config.is_trained(name)

    spec = ModelSpec.from_config(model_config, trainable=trained)
    _check_patterns(config, names)
    if not spec.num_trainable_parameters:
        raise ConfigError(
            "every parameter is frozen, so there is nothing to train",
            remedy="correct unfrozen_parameters and frozen_parameters",
        )
    return spec


def _check_patterns(config: TrainConfig, names: list[str]) -> None:
    for key in ("unfrozen_parameters", "frozen_parameters"):
        for pattern in getattr(config, key):
            if names and not any(re.match(pattern, name) for name in names):
                raise ConfigError(
                    f"{key}: {pattern!r} matches no parameter from the start of its name",
                    remedy=f"names are such as {names[-1]}; remove it, or correct it",
                )


def check_param_groups(config: TrainConfig, spec: ModelSpec) -> None:
    """Every parameter group is the first to match some parameter.

    Raises:
        ConfigError: a group that would do nothing.
    """
    patterns = [re.compile(group.pattern) for group in config.param_groups]
    names = [param.name for unit in spec.units for param in unit.params]
    used = {
        next((n for n, pattern in enumerate(patterns) if pattern.search(name)), None)
        for name in names
    }
    for number, group in enumerate(config.param_groups):
        if number not in used:
            raise ConfigError(
                f"param_groups.{number} ({group.pattern!r}) matches no parameter that an earlier "
                "group leaves",
                remedy=f"patterns are searched in names such as {names[-1]}; remove it, or "
                "correct it",
            )


def check_lengths(config: TrainConfig, spec: ModelSpec, tokenizer: Any) -> None:
    """The model has a position for every token of a row and a row for every token id.

    Raises:
        ConfigError: with both figures.
    """
    positions = getattr(spec.config, "max_position_embeddings", None)
    if positions is not None and config.max_length > positions:
        raise ConfigError(
            f"max_length is {config.max_length}, the model has {positions} positions "
            "(max_position_embeddings)",
            remedy=f"max_length: {positions}, or extend the model's positions in its config.json",
        )
    _check_rotary(config, spec)
    if tokenizer is not None and len(tokenizer) > spec.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {spec.vocab_size}",
            remedy="use the model's own tokenizer, or set vocab_size in model_config",
        )


def _check_rotary(config: TrainConfig, spec: ModelSpec) -> None:
    """Frequencies that change with the longest document at hand would tie documents together.

    transformers switches longrope and dynamic frequencies for a whole micro-batch once any of its
    positions passes the original length.
    """
    if not config.packing and config.per_device_train_batch_size == 1:
        return  # one document at a time: what transformers does with it alone
    rope = getattr(spec.config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if part.get("rope_type") not in ("longrope", "dynamic"):
            continue
        original = part.get("original_max_position_embeddings") or getattr(
            spec.config, "original_max_position_embeddings", None
        )
        if original is not None and config.max_length > original:
            raise ConfigError(
                f"max_length is {config.max_length}, and beyond {original} positions the "
                f"{part['rope_type']} frequencies of the model change with the longest document of "
                "a micro-batch, so that documents would depend on each other",
                remedy=f"max_length: {original}, or packing: false with "
                "per_device_train_batch_size: 1",
            )
