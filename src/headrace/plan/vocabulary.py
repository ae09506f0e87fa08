"""The size of a vocabulary, where a training YAML leaves it to its tokenizer.

A ``tokenizer.json`` is read as JSON; no tokenizer is loaded and nothing is downloaded. Where the
tokenizer is not there yet (the corpus that makes it is still to be built) a common size is assumed,
and said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

ASSUMED = 32_768


def with_vocabulary(
    config: dict[str, Any], tokenizer: str | None
) -> tuple[dict[str, Any], str | None]:
    """A model configuration with its ``vocab_size``, and what to say about where it is from.

    Args:
        config: ``model_config`` of a training YAML.
        tokenizer: its ``tokenizer_name_or_path``.

    Raises:
        ConfigError: the tokenizer's file is damaged, or nothing says how large the vocabulary is.
    """
    if "vocab_size" in config:
        return config, None
    if tokenizer is None:
        raise ConfigError(
            "model_config has no vocab_size, and no tokenizer is named that would say it",
            remedy="name one with tokenizer_name_or_path, which may be still to be built, or give "
            "model_config.vocab_size",
        )
    path = Path(tokenizer).expanduser()
    file = path if path.suffix == ".json" else path / "tokenizer.json"
    if not file.is_file():
        return {**config, "vocab_size": ASSUMED}, (
            f"{file} is not there yet: vocab_size is taken to be {ASSUMED:,}"
        )
    return {**config, "vocab_size": count_tokens(file)}, None


def count_tokens(file: Path) -> int:
    """Tokens of a ``tokenizer.json``, added ones included: what ``len(tokenizer)`` is.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = found["model"]["vocab"]
        # Unigram keeps [piece, score] pairs, the others a mapping.
        words = {entry[0] if isinstance(entry, list) else entry for entry in vocabulary}
        words |= {token["content"] for token in found.get("added_tokens") or ()}
    except (
        OSError,
        UnicodeDecodeError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{file} is not a tokenizer of the tokenizers library: {type(error).__name__}: {error}",
            remedy="name another with tokenizer_name_or_path, or give model_config.vocab_size",
        ) from error
    return len(words)
