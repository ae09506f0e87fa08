"""What a configuration names that is not on this machine: for ``headrace train --dry-run``.

Looks at names of files alone and imports no torch, so that a dry run answers at once. A run refuses
the same, with the same words (:mod:`headrace.trainer.preflight`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.data.files import resolve_files
from headrace.errors import ConfigError, DataError
from headrace.models.nearby import check_there

if TYPE_CHECKING:
    from headrace.trainer.config import TrainConfig


def absent(config: TrainConfig) -> list[str]:
    """A line each for models and data that are not here, in the order of a file's keys."""
    found = []
    names = {
        "model_name_or_path": config.model_name_or_path,
        "model_config": config.scratch_config,
        "tokenizer_name_or_path": config.tokenizer_name_or_path,
    }
    for key, name in names.items():
        if not isinstance(name, str):
            continue
        try:
            check_there(str(Path(name).expanduser()) if name.startswith("~") else name)
        except (ConfigError, RuntimeError) as error:  # nobody's home
            found.append(_line(key, error))
    for kind, sources in (("datasets", config.datasets), ("eval_datasets", config.eval_datasets)):
        for number, source in enumerate(sources):
            try:
                resolve_files(source.path, source.split)
            except DataError as error:
                found.append(_line(f"{kind}.{number}", error))
    return found


def _line(key: str, error: Exception) -> str:
    """Reason and remedy in one line: it may follow a comment's sign."""
    return f"{key}: {'; '.join(part.strip() for part in str(error).splitlines())}"
