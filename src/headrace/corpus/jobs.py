"""What worker processes run: passes over units, tokens of units, shards.

Prepared once a process; the passes keep their zones, calendars, tables and tokenizers.
"""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.corpus.config import CorpusConfig
from headrace.corpus.shards import ShardJob, TokenPass, write_shard
from headrace.corpus.tokenizer import single_threaded
from headrace.corpus.unit_pass import UnitPass

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.corpus.sources.units import Unit

_PR_SET_PDEATHSIG = 1


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


def prepare(values: dict[str, Any], parent: int | None = None) -> None:
    """Called once in every worker, and in this process when there is only one.

    Args:
        values: the configuration.
        parent: the process that this one must not outlive, if it is a worker of a pool.
    """
    single_threaded()
    if parent is not None and os.getpid() != parent:
        # A worker that outlives a killed parent would write beside the next run.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    _STATE.config = CorpusConfig.model_validate(values)
    _STATE.unit_passes = {}
    _STATE.token_pass = None


def run_unit(job: UnitJob) -> None:
    """One pass over one unit."""
    assert _STATE.config is not None
    name = job.unit.source
    if name not in _STATE.unit_passes:
        source = next(source for source in _STATE.config.sources if source.name == name)
        _STATE.unit_passes[name] = UnitPass(_STATE.config, source)
    _STATE.unit_passes[name].run(job.unit, job.place)


def run_tokens(job: TokenJob) -> None:
    """Tokens of one unit."""
    if _STATE.token_pass is None or _STATE.token_pass[0] != job.tokenizer_file:
        _STATE.token_pass = (job.tokenizer_file, TokenPass(job.tokenizer_file, job.eos_token_id))
    wanted = np.fromfile(job.masks, dtype=np.uint64) != 0
    _STATE.token_pass[1].run(job.unit, wanted, job.place)


def run_shard(job: ShardJob) -> None:
    """One shard."""
    write_shard(job)
