"""The streamed training step."""

from headrace.engine.config import AdamWConfig, EngineConfig, ParamGroup
from headrace.engine.results import EvalResult, StepResult
from headrace.engine.step import Engine

__all__ = ["AdamWConfig", "Engine", "EngineConfig", "EvalResult", "ParamGroup", "StepResult"]
