"""Which model a name that means nothing may have meant: what lies in the hub cache, what is known.

Looks at names alone: no network, no file is read, and neither torch nor transformers is needed, so
that a mistyped name is answered at once.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from headrace.errors import ConfigError
from headrace.plan.records import record_names


def check_there(name: str, *, needed: str = "") -> None:
    """Refuse a model that is neither a folder (or file) nor in the local hub cache.

    Args:
        name: as it was given.
        needed: files of it that are enough; all by default.

    Raises:
        ConfigError: with the nearest names.
    """
    try:
        there = Path(name).exists()
    except (OSError, ValueError):  # too long, a null byte
        there = False
    if not (there or is_cached(name)):
        raise missing_model(name, needed=needed)


def missing_model(name: str, key: str = "", *, needed: str = "") -> ConfigError:
    """The error for a model that is neither a folder nor in the local hub cache.

    Args:
        name: as it was given.
        key: where, for the message.
        needed: as :func:`check_there` takes it.
    """
    near = nearest_models(name)
    hint = f"; or did you mean {' or '.join(near)}?" if near else ""
    return ConfigError(
        f"{key and f'{key}: '}{name!r} is neither a folder nor in the local hub cache",
        remedy=f"correct it, or fetch it first: hf download {f'{name} {needed}'.strip()}" + hint,
    )


def nearest_models(name: str) -> list[str]:
    """Up to two names like ``name``: in the hub cache, of known models, of folders beside it.

    None for a known model: it is what was meant, and has to be fetched.
    """
    known = [*cached_models(), *record_names(), *_neighbours(name)]
    if name in known:
        return []
    folded = {full.lower(): full for full in reversed(known)}
    folded |= {full.rpartition("/")[2].lower(): full for full in reversed(known)}
    near = difflib.get_close_matches(name.lower(), folded, n=4, cutoff=0.7)
    return list(dict.fromkeys(folded[found] for found in near))[:2]


def cached_models() -> list[str]:
    """Names of the models in the local hub cache."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - read when it is needed

    try:
        folders = sorted(Path(HF_HUB_CACHE).glob("models--*"))
    except OSError:
        return []
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]


def is_cached(name: str) -> bool:
    """Whether the local hub cache has the configuration of a model of this name."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - as above
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - as above

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def _neighbours(name: str) -> list[str]:
    """Folders beside the one that is not there, as they would be written."""
    try:
        parent = Path(name).parent
        return [str(path) for path in parent.iterdir() if (path / "config.json").is_file()]
    except (OSError, ValueError):
        return []
