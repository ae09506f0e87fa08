"""Low-rank adapters on the disk, in PEFT's format, and their values in a state.

``adapter_config.json`` and ``adapter_model.safetensors`` are what ``PeftModel.from_pretrained``
reads. Weights are written as float32 masters, from which both halves of a split master come back
bit by bit. Merging adds ``scaling * B A`` to a copy of a unit while it is written; the state is
never changed.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.errors import CheckpointError, ConfigError, DataError
from headrace.models.adapters import ADAPTER, KEY_PREFIX
from headrace.models.lora import LoraSettings
from headrace.store.safetensors_io import SafetensorsReader, tensor_names, write_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace.models.spec import ModelSpec
    from headrace.store.layout import ParamSpec
    from headrace.store.state import ModelState, UnitState

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

# What of PEFT's configuration has its counterpart here, or says nothing about the computation.
_KNOWN = {
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters",
    "use_rslora", "modules_to_save", "layers_to_transform", "init_lora_weights", "lora_dropout",
    "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_type",
    "peft_version", "auto_mapping", "fan_in_fan_out", "ensure_weight_tying", "megatron_core",
    "runtime_config",
}  # fmt: skip


def adapter_tensors(unit: UnitState) -> dict[str, torch.Tensor]:
    """What the file holds of a unit, by PEFT's names: adapters, and what is trained whole."""
    return {KEY_PREFIX + p.name: unit.master(p) for p in unit.layout.params if p.trainable}


def described_adapter(unit: UnitState) -> dict[str, torch.Tensor]:
    """The same on the meta device."""
    return {
        KEY_PREFIX + p.name: torch.empty(p.shape, dtype=torch.float32, device="meta")
        for p in unit.layout.params
        if p.trainable
    }


def write_adapter(folder: Path, spec: ModelSpec, state: ModelState) -> None:
    """Write both files.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    assert spec.adapters is not None
    spec.adapters.peft_config.save_pretrained(folder)
    tensors = {name: t for unit in state.units for name, t in adapter_tensors(unit).items()}
    write_file(folder / WEIGHTS_FILE, tensors, {"format": "pt"})


def read_adapter(folder: Path, state: ModelState) -> None:
    """Fill what :func:`write_adapter` wrote, or PEFT.

    Raises:
        CheckpointError: the files belong to other adapters.
        DataError: a tensor has another shape or is not finite.
    """
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise CheckpointError(f"no {WEIGHTS_FILE} in {folder}", remedy="name an adapter's folder")
    places = {
        KEY_PREFIX + param.name: (unit, param)
        for unit in state.units
        for param in unit.layout.params
        if param.trainable
    }
    differing = places.keys() ^ set(tensor_names(path))
    if differing:
        raise CheckpointError(
            f"{path} belongs to other adapters: {len(differing)} tensors are only in one of the "
            f"file and this run, such as {min(differing)}",
            remedy="use the same rank, targets and modules to save",
        )
    with SafetensorsReader() as reader:
        for name, (unit, param) in places.items():
            unit.set_master(param, reader.get(path, name))


def read_settings(folder: Path) -> LoraSettings:
    """The settings of an adapter that PEFT, or headrace, has saved.

    Raises:
        ConfigError: there is none.
        DataError: it uses something that headrace does not have.
    """
    try:
        values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        assert isinstance(values, dict)
    except (OSError, ValueError, AssertionError, RecursionError) as error:
        raise ConfigError(
            f"no adapter in {folder}: {CONFIG_FILE}: {error}", remedy="name an adapter's folder"
        ) from error
    _refuse_foreign(folder, values)
    try:
        return _settings(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{folder / CONFIG_FILE} is not as PEFT writes it: {type(error).__name__}: {error}",
            remedy="take the file as PEFT or headrace saved it",
        ) from error


def _settings(values: Mapping[str, Any]) -> LoraSettings:
    targets = values.get("target_modules")
    layers = values.get("layers_to_transform")
    return LoraSettings(
        rank=int(values["r"]),
        alpha=float(values["lora_alpha"]),
        dropout=float(values.get("lora_dropout") or 0.0),
        target_modules=targets if isinstance(targets, str) else tuple(sorted(targets or ())),
        target_parameters=tuple(sorted(values.get("target_parameters") or ())),
        layers=None if layers is None else tuple([layers] if isinstance(layers, int) else layers),
        layers_of_parameters=False,
        use_rslora=bool(values.get("use_rslora")),
        modules_to_save=tuple(values.get("modules_to_save") or ()),
        rank_pattern=tuple((k, int(v)) for k, v in (values.get("rank_pattern") or {}).items()),
        alpha_pattern=tuple((k, float(v)) for k, v in (values.get("alpha_pattern") or {}).items()),
    )


def _refuse_foreign(folder: Path, values: Mapping[str, Any]) -> None:
    from peft import LoraConfig  # noqa: PLC0415 - optional, slow

    if values.get("peft_type") != "LORA":
        raise DataError(
            f"{folder} holds a {values.get('peft_type')} adapter; headrace has LoRA",
            remedy="merge it into its model with PEFT, and train that",
        )
    plain = LoraConfig()
    defaults = {field.name: getattr(plain, field.name) for field in fields(plain)}
    for name, value in values.items():
        if name in _KNOWN or not value or value == defaults.get(name):
            continue
        raise DataError(
            f"the adapter in {folder} uses {name}: {value!r}, which headrace does not have",
            remedy="merge it into its model with PEFT and train a new adapter",
        )


def initialise_adapters(spec: ModelSpec, state: ModelState, *, seed: int) -> None:
    """PEFT's initialisation, each unit from its own stream of ``seed``; B is zero."""
    assert spec.adapters is not None
    settings = spec.adapters.settings
    for number, unit in enumerate(state.units):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((seed + 1) * 1_000_003 + number)
            for param in unit.layout.params:
                if not param.adapter:
                    continue
                value = torch.zeros(param.shape)
                if ".lora_A." in param.name and settings.initialisation == "gaussian":
                    rank = spec.adapters.rank(param.name, param.shape[0])
                    nn.init.normal_(value, std=1 / rank)
                elif ".lora_A." in param.name:
                    nn.init.kaiming_uniform_(value, a=5**0.5)
                unit.set_master(param, value)


def merged(spec: ModelSpec, unit: UnitState, param: ParamSpec) -> torch.Tensor:
    """A plain parameter as it is written: with its adapter, if it has one, in a copy."""
    stored, adapters = unit.stored(param), spec.adapters
    if adapters is None:
        return stored
    if param.name in adapters.parameters:
        module, layer = adapters.on_parameter(param.name)
        a, b = _factors(unit, module)
        a_XRI, b_XOR = layer.low_rank(a, b).factors()
        delta = b_XOR @ a_XRI * layer.scaling
        if layer.is_transposed:
            delta = delta.transpose(1, 2)
    else:
        module, _, kind = param.name.rpartition(".")
        if kind != "weight" or module not in adapters.targets:
            return stored
        a, b = _factors(unit, module)
        linear = adapters.module(module)
        delta = (b @ a) * linear.scaling[ADAPTER]
        if linear.fan_in_fan_out:
            delta = delta.T
    value: torch.Tensor = (unit.master(param) + delta).to(stored.dtype)
    return value


def _factors(unit: UnitState, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a module's adapter."""
    by_name = {p.name: p for p in unit.layout.params if p.adapter}
    a, b = (unit.master(by_name[f"{module}.lora_{x}.weight"]) for x in "AB")
    return a, b
