"""What a folder is by its names: a run with its checkpoints, adapters, or perhaps a model.

Looks at the names of files and reads one small JSON at most; imports neither torch nor
transformers. Refuses nothing that might be a model: where a folder is not known to be something
else, whoever reads it says what it lacks.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from headrace.errors import ConfigError

_NAME = re.compile(r"checkpoint-(\d+)")


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that is known to be something else than a model.

    Args:
        folder: may be a file, or absent; then nothing is looked at.

    Raises:
        ConfigError: it is the folder of a run or of adapters, with what to name instead.
    """
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        base = _base_of(folder / "adapter_config.json")
        raise ConfigError(
            f"{folder} holds adapters, not a model" + (f"; theirs is {base}" if base else ""),
            remedy="name the model; lora_model_dir goes on training adapters, and headrace export "
            "--merge writes a run's model with its adapters added",
        )
    checkpoints = list_checkpoints(folder) if os.access(folder, os.R_OK) else []
    if checkpoints:
        raise ConfigError(
            f"{folder} is the folder of a run, not a model",
            remedy=f"name its checkpoint, such as {checkpoints[-1]}, or what headrace export "
            f"{folder} OUT writes",
        )


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Folders named ``checkpoint-{step}``, by step, complete or not."""
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in output_dir.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def _base_of(file: Path) -> str | None:
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return base if isinstance(base, str) and base else None
