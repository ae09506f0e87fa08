"""A run of several ranks: what is refused before it starts, and how it ends on all of them.

The invariant: what several ranks cannot do exactly is refused before data is tokenised or memory
taken, with what to do instead. Makes no decision within a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ConfigError, DamagedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.parallel.ranks import Ranks
    from headrace.trainer.config import TrainConfig


def refuse_for_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Refuse keys that several ranks cannot honour.

    Raises:
        ConfigError: naming the key.
    """
    if ranks.size == 1:
        return
    if config.lm_eval_tasks:
        raise ConfigError(
            f"lm_eval_tasks on {ranks.size} ranks: the harness scores in one process",
            remedy="leave it out, and score the exported checkpoint",
        )
    if config.engine.trace is not None:
        raise ConfigError(
            f"engine.trace (--trace) on {ranks.size} ranks would write one file from all of them",
            remedy="trace a run of one rank",
        )


def load_alike(ranks: Ranks, load: Callable[[], None], checkpoint: Path | None) -> None:
    """Load weights on every rank; if one finds a checkpoint damaged, all do.

    Raises:
        DamagedCheckpointError: this or another rank found damage.
        HeadraceError: what else loading raises.
    """
    damage = None
    try:
        load()
    except DamagedCheckpointError as error:
        if ranks.size == 1:
            raise
        damage = error
    table = ranks.table([damage is not None])
    found = next((rank for rank, (bad,) in enumerate(table) if bad), None)
    if found is not None:
        assert checkpoint is not None, "nothing else is found damaged"
        raise damage or DamagedCheckpointError(
            f"rank {found} found {checkpoint} damaged, which this one could read",
            folder=checkpoint,
        )
