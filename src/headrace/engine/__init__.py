"""The streamed training step."""

from headrace.engine.config import AdamWConfig, EngineConfig, ParamGroup
from headrace.engine.step import Engine, EvalResult, StepResult

__all__ = ["AdamWConfig", "Engine", "EngineConfig", "EvalResult", "ParamGroup", "StepResult"]
