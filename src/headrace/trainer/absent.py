"""What a configuration names that is not on this machine: for ``headrace train --dry-run``.

Looks at names of files alone and imports no torch, so that a dry run answers at once. A run refuses
the same, with the same words (:mod:`headrace.trainer.preflight`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.data.files import resolve_files
from headrace.errors import ConfigError, DataError
from headrace.folders import check_model_folder
from headrace.models.nearby import check_there

if TYPE_CHECKING:
    from headrace.trainer.config import TrainConfig

WHERE_FROM = (
    "that of a model, or one that headrace corpus build trains on your text "
    "(tokenizer: {train: bpe, vocab_size: 8192})"
)


def tokenizer_name(config: TrainConfig) -> str | None:
    """Where the run's tokenizer is, as the configuration names it; ``None`` if none is needed.

    Raises:
        ConfigError: datasets hold text and nothing names a tokenizer.
    """
    name = config.tokenizer_name_or_path or config.model_name_or_path
    if name is None and isinstance(config.scratch_config, str):
        name = config.scratch_config
    if name is None and needs_tokenizer(config):
        raise ConfigError(
            "datasets hold text, and a model from model_config brings no tokenizer",
            remedy=f"name one with tokenizer_name_or_path: {WHERE_FROM}",
        )
    return name


def needs_tokenizer(config: TrainConfig) -> bool:
    """Whether a dataset holds anything but tokens."""
    return any(source.type != "tokens" for source in (*config.datasets, *config.eval_datasets))


def absent(config: TrainConfig) -> list[str]:
    """A line each for models and data that are not here, in the order of a file's keys.

    Raises:
        ConfigError: as :func:`tokenizer_name`.
    """
    tokenizer_name(config)
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
            there = str(Path(name).expanduser()) if name.startswith("~") else name
            check_there(there)
            if key != "tokenizer_name_or_path":
                check_model_folder(Path(there))
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
