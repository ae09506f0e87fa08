"""What a self-test found, and the file in which it is remembered.

A verdict holds for a class with its switches, under these versions of torch, transformers and
headrace: anything else has another key. A cache that cannot be read or written is no error, the
test then runs again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA = 3  # counted up when verdicts hold more, or are made of more checks


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one self-test.

    Attributes:
        verdict: ``ok``, or ``refused`` with a ``reason``.
        reason: what breaks, naming the first tensor that differs; None when ok.
        model_type: transformers' name of the family.
        architecture: the class, or None when it could not be built.
        gradient_error: worst relative error of a parameter's gradient over all modes.
        worst_parameter: whose it is.
        packing_leak: relative change of a document's gradients when its neighbour changes.
        reload_error: largest difference of logits after export and reload.
        num_layers: layers of the tiny twin.
        seconds: time the test took.
        versions: of torch, transformers and headrace.
        cached: read from an earlier test.
    """

    verdict: Literal["ok", "refused"]
    reason: str | None = None
    model_type: str = ""
    architecture: str | None = None
    gradient_error: float | None = None
    worst_parameter: str | None = None
    packing_leak: float | None = None
    reload_error: float | None = None
    num_layers: int | None = None
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    cached: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"schema": SCHEMA, **asdict(self)}


def current_versions() -> dict[str, str]:
    """What a verdict depends on besides the model."""
    import torch  # noqa: PLC0415 - this module is light, for the command line
    import transformers  # noqa: PLC0415 - as above

    from headrace import __version__  # noqa: PLC0415 - as above

    return {
        "headrace": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cache_key(architecture: str, switches: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """A digest of class, switches and versions; switches are those of the tiny twin."""
    text = json.dumps([SCHEMA, architecture, switches, versions], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """``$HEADRACE_CACHE_DIR``, or ``headrace`` in the user's cache folder."""
    given = os.environ.get("HEADRACE_CACHE_DIR")
    if given:
        return Path(given) / "selftest"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / "selftest"


def read_cached(key: str) -> Verdict | None:
    """The remembered verdict, if there is one."""
    try:
        values = json.loads((cache_folder() / f"{key}.json").read_text(encoding="utf-8"))
        if values.pop("schema") != SCHEMA or values.keys() != {f.name for f in fields(Verdict)}:
            return None
        return Verdict(**values | {"cached": True})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_cached(key: str, verdict: Verdict) -> None:
    """Remember a verdict; a folder that cannot be written to is passed over."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            json.dump(verdict.to_dict(), file, indent=1)
        Path(file.name).replace(folder / f"{key}.json")
    except OSError:
        return
