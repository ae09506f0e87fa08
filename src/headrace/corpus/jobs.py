"""What worker processes run: passes over units, tokens of units, shards.

Prepared once a process; the passes keep their zones, calendars, tables and tokenizers.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.corpus.config import CorpusConfig
from headrace.corpus.shards import ShardJob, TokenPass, write_shard
from headrace.corpus.tokenizer import single_threaded
from headrace.corpus.unit_pass import UnitPass

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.corpus.sources.units import Unit

_COLLECT_AFTER = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitJob:
    """Pass over one unit into ``place``."""

    unit: Unit
    place: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenJob:
    """Tokenise the documents of a unit whose mask is not zero."""

    unit: Path
    masks: Path
    place: Path
    tokenizer_file: Path
    eos_token_id: int


class _State:
    """What a worker process keeps between jobs."""

    config: CorpusConfig | None = None
    unit_passes: dict[str, UnitPass]
    token_pass: tuple[Path, TokenPass] | None = None


_STATE = _State()


def prepare(values: dict[str, Any]) -> None:
    """Called once in every worker, and in this process when there is only one.

    Args:
        values: the configuration.
    """
    single_threaded()
    _STATE.config = CorpusConfig.model_validate(values)
    _STATE.unit_passes = {}
    _STATE.token_pass = None


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Thousands of records live in a batch and none is part of a cycle: look less often."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_seldom_collected()
def run_unit(job: UnitJob) -> None:
    """One pass over one unit."""
    assert _STATE.config is not None
    name = job.unit.source
    if name not in _STATE.unit_passes:
        source = next(source for source in _STATE.config.sources if source.name == name)
        _STATE.unit_passes[name] = UnitPass(_STATE.config, source)
    _STATE.unit_passes[name].run(job.unit, job.place)


@_seldom_collected()
def run_tokens(job: TokenJob) -> None:
    """Tokens of one unit."""
    if _STATE.token_pass is None or _STATE.token_pass[0] != job.tokenizer_file:
        _STATE.token_pass = (job.tokenizer_file, TokenPass(job.tokenizer_file, job.eos_token_id))
    wanted = np.fromfile(job.masks, dtype=np.uint64) != 0
    _STATE.token_pass[1].run(job.unit, wanted, job.place)


def run_shard(job: ShardJob) -> None:
    """One shard."""
    write_shard(job)
