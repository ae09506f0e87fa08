"""What a build tells about where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """``done`` of ``total`` (in ``unit``) of one stage.

    Stages in order: ``documents``, ``duplicates``, ``tokens`` (with a tokenizer), ``shards``.
    """

    stage: str
    done: int
    total: int
    unit: str


ProgressCallback = Callable[[Progress], None]
