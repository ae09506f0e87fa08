"""The streamed training step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.engine.config import AdamWConfig, EngineConfig, ParamGroup

if TYPE_CHECKING:
    from headrace.engine.results import EvalResult, StepResult
    from headrace.engine.step import Engine

__all__ = ["AdamWConfig", "Engine", "EngineConfig", "EvalResult", "ParamGroup", "StepResult"]

_HOMES = {
    "Engine": "headrace.engine.step",
    "EvalResult": "headrace.engine.results",
    "StepResult": "headrace.engine.results",
}


def __getattr__(name: str) -> Any:
    # A configuration is read without torch, which the step imports.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
