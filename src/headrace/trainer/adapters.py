"""Adapters of a run: which ones its keys mean, where their values come from.

Owns the meaning of the ``lora_`` and ``peft_`` keys. The invariant: an adapter that training goes
on with has the rank, scale and targets of its own configuration. Knows no file format.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError
from headrace.store.adapter_files import initialise_adapters, read_adapter, read_settings
from headrace.store.checkpoint import load_checkpoint

if TYPE_CHECKING:
    from headrace.models.lora import LoraSettings
    from headrace.models.spec import ModelSpec
    from headrace.store.state import ModelState
    from headrace.trainer.config import TrainConfig

_SAME = {"lora_r": "rank", "lora_alpha": "alpha"}
_FROM_FOLDER = (
    "lora_target_modules",
    "lora_target_linear",
    "lora_target_parameters",
    "lora_modules_to_save",
    "peft_layers_to_transform",
    "peft_use_rslora",
    "peft_init_lora_weights",
)


def adapter_settings(config: TrainConfig) -> LoraSettings | None:
    """Which adapters a run trains, or None when there are none.

    Raises:
        ConfigError: keys contradict the adapter in ``lora_model_dir``.
        DataError: that adapter uses something that headrace does not have.
    """
    if config.adapter is None or config.lora_model_dir is None:
        return config.lora_settings()
    settings = read_settings(Path(config.lora_model_dir).expanduser())
    for key, name in _SAME.items():
        given, found = getattr(config, key), getattr(settings, name)
        if given is not None and given != found:
            raise ConfigError(
                f"{key} is {given:g}, and the adapter in lora_model_dir has {found:g}",
                remedy=f"{key}: {found:g}, or remove it",
            )
    for key in _FROM_FOLDER:
        if getattr(config, key):
            raise ConfigError(
                f"{key} has no effect beside lora_model_dir, whose adapter says it",
                remedy="remove one of them",
            )
    if config.lora_dropout is not None:  # a choice of the run: the values fit any
        settings = replace(settings, dropout=config.lora_dropout)
    return settings


def check_listed(config: TrainConfig, spec: ModelSpec) -> None:
    """Names given beside ``lora_target_linear`` are among what it means.

    Raises:
        ConfigError: one is not.
    """
    names = config.lora_target_modules
    if not config.lora_target_linear or not names or spec.adapters is None:
        return
    for name in names if isinstance(names, list) else [names]:
        if not any(f".{path}".endswith(f".{name}") for path in spec.adapters.targets):
            raise ConfigError(
                f"lora_target_modules: {name!r} is no linear layer that lora_target_linear means",
                remedy="remove it, or remove lora_target_linear and list what gets adapters",
            )


def describe(spec: ModelSpec) -> str:
    """One line on the adapters of a model."""
    assert spec.adapters is not None
    adapters, settings = spec.adapters, spec.adapters.settings
    dropout = f", dropout {settings.dropout:g}" if settings.dropout else ""
    places = [
        f"{len(paths)} {what} ({', '.join(inside)})"
        for paths, what, inside in (
            (adapters.targets, "matrices", adapters.relative_targets),
            (adapters.parameters, "stacks of experts", adapters.relative_parameters),
        )
        if paths
    ]
    other = "".join(
        f", {what} {value:g} of {pattern}"
        for what, patterns in (("rank", settings.rank_pattern), ("alpha", settings.alpha_pattern))
        for pattern, value in patterns
    )
    text = (
        f"rank {settings.rank}, alpha {settings.alpha:g}{other}{dropout} "
        f"on {' and '.join(places)}, "
        f"{spec.num_trainable_parameters:,} parameters to train; the model stays as it is"
    )
    if settings.modules_to_save:
        text += f", but for {', '.join(settings.modules_to_save)}, trained whole"
    if adapters.skipped:
        text += f"; {adapters.skipped[0]} and its like have none: PEFT means experts by that name"
    return text


def load_adapters(
    config: TrainConfig, spec: ModelSpec, state: ModelState, checkpoint: Path | None
) -> None:
    """Values of the adapters: of a checkpoint, of ``lora_model_dir``, or fresh.

    Args:
        config: the run.
        spec: the model's structure.
        state: holds the model's own weights already.
        checkpoint: what the run goes on from.
    """
    if checkpoint is not None:
        load_checkpoint(checkpoint, spec, state)
    elif config.lora_model_dir is not None:
        read_adapter(Path(config.lora_model_dir).expanduser(), state)
    else:
        initialise_adapters(spec, state, seed=config.seed)
