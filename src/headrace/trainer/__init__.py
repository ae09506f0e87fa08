"""Configuration, the training loop, metrics, resume.

``train(config)`` is the whole of it; ``resolve`` checks a configuration without running it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.trainer.config import TrainConfig, resolve
    from headrace.trainer.run import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "resolve", "train"]

_HOMES = {
    "TrainConfig": "headrace.trainer.config",
    "resolve": "headrace.trainer.config",
    "TrainResult": "headrace.trainer.run",
    "train": "headrace.trainer.run",
}


def __getattr__(name: str) -> Any:
    # Checking a configuration must not pay for transformers' trainer, which callbacks import.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
