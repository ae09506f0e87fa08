"""Where a model's configuration comes from: a folder, a shipped record, or a training YAML.

Never the network: a name that is not shipped and not on disk is an error that says where to put
its ``config.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.folders import check_model_folder
from headrace.plan.records import find_record, nearest_names


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A configuration and what is known beside it.

    Attributes:
        name: as the user wrote it.
        origin: path of the file, or which shipped record.
        config: a Hugging Face configuration.
        sources: of each shipped fact.
        runs: published runs of this model.
    """

    name: str
    origin: str
    config: dict[str, Any]
    sources: dict[str, str]
    runs: tuple[dict[str, Any], ...]


_A_FOLDER = "name a Hugging Face model folder, its config.json, or a model of --list-models"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", remedy=_A_FOLDER) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", remedy=_A_FOLDER) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} holds a {type(value).__name__}, not a configuration object", remedy=_A_FOLDER
        )
    return value


def find_model(name: str) -> ModelSource:
    """The configuration of a folder, a ``config.json`` or a shipped model.

    Raises:
        ConfigError: there is no such folder, file or record.
    """
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # too long, nobody's home
        raise ConfigError(
            f"the model {name!r} cannot be looked for: {error}", remedy=_A_FOLDER
        ) from error
    if is_folder:
        check_model_folder(path)
        path /= "config.json"
        if not path.is_file():
            raise ConfigError(
                f"the folder {name} has no config.json",
                remedy="name a Hugging Face model folder",
            )
    if is_folder or is_file:
        return ModelSource(
            name=name, origin=str(path), config=_read_json(path), sources={}, runs=()
        )
    record = find_record(name)
    if record is None:
        near = nearest_names(name)
        hint = f" (nearest shipped: {', '.join(near)})" if near else ""
        raise ConfigError(
            f"{name!r} is neither a model folder nor a shipped configuration{hint}",
            remedy="save the model's config.json in a folder and name the folder; "
            "'headrace plan --list-models' shows what is shipped",
        )
    return ModelSource(
        name=name,
        origin=f"shipped record of {record.name}",
        config=record.config,
        sources=record.sources,
        runs=record.runs,
    )


def inline_model(name: str, config: dict[str, Any]) -> ModelSource:
    """A configuration that stands in a training YAML itself, under ``model_config``."""
    return ModelSource(
        name=name, origin=f"model_config in {name}", config=config, sources={}, runs=()
    )
