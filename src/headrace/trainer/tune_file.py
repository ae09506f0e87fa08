"""What ``headrace tune`` chose, kept in a file, and whether it still holds.

The invariant: a choice counts only for the machine, model, settings and versions it was made with;
for anything else the file is passed over with the difference named. Reads and writes YAML; chooses
nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import yaml

import headrace
from headrace.engine.config import EngineConfig
from headrace.errors import ConfigError
from headrace.policy.steptime import Rates
from headrace.trainer.record import hardware
from headrace.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.models.spec import ModelSpec
    from headrace.trainer.config import TrainConfig

CHOSEN = (
    "device_units",
    "expert_slices",
    "update_order",
    "rows_per_micro_batch",
    "micro_batches_per_wave",
    "recompute_layers",
    "offload_layers",
)
"""Keys of ``engine:`` that a choice fills in."""
_FORMAT = 2
_OBSERVING = ("trace", "lane_timeout_seconds", "lane_jitter_seconds", "poison_slots")
_HEAD = "# Written by headrace tune. headrace train uses it while the fingerprint holds.\n"


@dataclass(frozen=True, kw_only=True)
class TuneRecord:
    """A choice with what it was made of.

    Attributes:
        fingerprint: what it holds for; see :func:`fingerprint`.
        engine: values of the keys in :data:`CHOSEN`.
        rates: of the machine, measured.
        figures: what was measured besides, by name.
        candidates: predictions and measurements, the chosen one first.
    """

    fingerprint: dict[str, Any]
    engine: dict[str, int | str | None]
    rates: Rates
    figures: dict[str, float]
    candidates: list[dict[str, Any]]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        text = _HEAD + yaml.safe_dump(
            {"format_version": _FORMAT, **asdict(self)}, sort_keys=False, width=100
        )
        temporary = path.with_name(f".{path.name}.writing")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    def apply(self, engine: EngineConfig) -> EngineConfig:
        """``engine`` with what it leaves open filled in."""
        chosen: dict[str, Any] = {
            k: v for k, v in self.engine.items() if getattr(engine, k) is None
        }
        return replace(engine, **chosen)


def beside(config_file: Path) -> Path:
    """Where the choice for a configuration file is kept: ``run.yaml`` has ``run.tune.yaml``."""
    return config_file.with_suffix(".tune.yaml")


def fingerprint(config: TrainConfig, spec: ModelSpec, device: torch.device) -> dict[str, Any]:
    """What a choice depends on: machine, model, workload, the user's settings, versions."""
    machine = hardware(device)
    gpu_bytes = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    )
    shapes = [
        (unit.name, [(p.local_name, tuple(p.shape), p.trainable) for p in unit.params])
        for unit in spec.units
    ]
    given = {
        field.name: getattr(config.engine, field.name)
        for field in fields(EngineConfig)
        if field.name not in _OBSERVING and getattr(config.engine, field.name) != field.default
    }
    return {
        "machine": {
            "cpu": machine["cpu"],
            "num_cores": machine["num_cores"],
            "memory_gib": round(machine["memory_bytes"] / GIB),
            "gpu": machine["gpu"],
            "gpu_memory_gib": round(gpu_bytes / GIB),
        },
        "model": {
            "class": type(spec.model).__name__,
            "num_parameters": spec.num_parameters,
            "shapes": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
            "dtype": config.dtype,
        },
        "workload": {
            "per_device_train_batch_size": config.per_device_train_batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "max_length": config.max_length,
            "packing": config.packing,
        },
        "engine": given,
        "versions": {
            "headrace": headrace.__version__,
            "torch": importlib.metadata.version("torch"),
        },
    }


def read(path: Path) -> TuneRecord:
    """The record in a file.

    Raises:
        ConfigError: it cannot be read or is none.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        if found["format_version"] != _FORMAT:
            raise ConfigError(f"its format_version is {found['format_version']}, not {_FORMAT}")
        engine = {name: found["engine"][name] for name in CHOSEN}
        counts = [value for name, value in engine.items() if name != "update_order"]
        if any(not (value is None or type(value) is int) for value in counts):
            raise ConfigError("a key of engine is no whole number")
        EngineConfig(**engine)  # refuses another order
        rates = Rates(**{name: float(value) for name, value in found["rates"].items()})
        if not all(0 < value < float("inf") for value in asdict(rates).values()):
            raise ConfigError("a rate is not above 0")
        return TuneRecord(
            fingerprint=dict(found["fingerprint"]),
            engine=engine,
            rates=rates,
            figures=dict(found.get("figures") or {}),
            candidates=list(found.get("candidates") or []),
        )
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"it is not what headrace tune writes: {error!r}") from error


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of a fingerprint changed, one line a value."""
    found = []
    for part in sorted({*then, *now}):
        old, new = (side.get(part) if isinstance(side, dict) else None for side in (then, now))
        old, new = (side if isinstance(side, dict) else {} for side in (old, new))
        found += [
            f"{part}.{key} was {old.get(key)!r} and is {new.get(key)!r}"
            for key in sorted({*old, *new}, key=str)
            if old.get(key) != new.get(key)
        ]
    return found
