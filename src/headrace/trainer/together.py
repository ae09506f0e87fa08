"""A run of several ranks: what is refused before it starts, and what all of them find alike.

The invariants: what several ranks cannot do exactly is refused before data is tokenised or memory
taken, with what to do instead; whatever decides what ranks do together is the same on all of them
when the first step begins. Makes no decision within a run.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.errors import CheckpointError, ConfigError, DamagedCheckpointError
from headrace.store.checkpoint import find_problem
from headrace.trainer.record import versions
from headrace.trainer.resume import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from headrace.data.evaluation import EvalSet
    from headrace.data.protocol import Loader
    from headrace.models.spec import ModelSpec
    from headrace.parallel.ranks import Ranks
    from headrace.trainer.config import TrainConfig

T = TypeVar("T")

# Keys that a rank may have of its own: they decide nothing that ranks do together.
_OWN_KEYS = frozenset(
    {"data_cache_dir", "dataset_num_proc", "progress", "report_to", "run_name", "tune_file"}
)
_MOST_NAMED = 4
PATIENCE_SECONDS = 60.0  # file systems on a network show what others wrote within less


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


def refuse_unlike(ranks: Ranks, facts: dict[str, Any], what: str, remedy: str) -> None:
    """Refuse ranks that would not do the same: some would wait for others for ever.

    Args:
        ranks: of the run.
        facts: JSON types; what must be the same on every rank.
        what: they are, such as ``"settings"``.
        remedy: what to do where they are not.

    Raises:
        ConfigError: this rank's differ from those of the main one, naming how.
    """
    mine = json.loads(json.dumps(facts, default=str))
    if mine != (first := ranks.tell(mine)):
        found = list(differences(first, mine))
        rest = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise ConfigError(
            f"rank {ranks.rank} has other {what} than rank 0 (rank 0's -> its own): "
            f"{', '.join(found[:_MOST_NAMED])}{rest}",
            remedy=remedy,
        )


def settings_facts(config: TrainConfig, spec: ModelSpec, device: torch.device) -> dict[str, Any]:
    """What all ranks must have alike before they do anything together."""
    keys = {name: value for name, value in config.to_dict().items() if name not in _OWN_KEYS}
    for name in ("datasets", "eval_datasets"):  # their contents are compared, not where they lie
        keys[name] = [{**source, "path": None} for source in keys[name]]
    model = {k: v for k, v in spec.config.to_dict().items() if k != "_name_or_path"}
    found = versions()
    same = {name: found[name] for name in ("headrace", "torch", "transformers")}
    return {**keys, "the model's config": model, "versions": same, "device": device.type}


def data_facts(loader: Loader, eval_sets: Sequence[EvalSet]) -> dict[str, Any]:
    """What decides the rows of every rank."""
    evaluated = [
        [[month, rows.store.key, rows.subset, rows.plan.num_rows] for month, rows in found.parts]
        for found in eval_sets
    ]
    return {**loader.fingerprint(), "eval_datasets": evaluated}


def find_alike(ranks: Ranks, checkpoint: Path) -> None:
    """Wait until a rank sees the checkpoint that the main one has chosen, and found whole.

    Raises:
        CheckpointError: it does not, for longer than a shared file system may lag.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ranks.is_main and (problem := find_problem(checkpoint)) is not None:
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"rank {ranks.rank} does not find {checkpoint} whole, as rank 0 did ({problem})",
                remedy="put output_dir on a file system that all machines share",
            )
        time.sleep(min(1.0, PATIENCE_SECONDS / 10))


def read_alike(ranks: Ranks, read: Callable[[], T], checkpoint: Path | None) -> T:
    """Read on every rank what is there of a checkpoint; if one finds it damaged, all do.

    Args:
        ranks: of the run.
        read: what each does; talks to no other rank.
        checkpoint: that is read, or None: damage elsewhere is a failure as any other.

    Raises:
        DamagedCheckpointError: this or another rank found damage; on all of them.
        HeadraceError: what else reading raises.
    """
    damage = None
    try:
        found = read()
    except DamagedCheckpointError as error:
        if ranks.size == 1:
            raise
        if checkpoint is None:
            raise CheckpointError(error.message, remedy=error.remedy) from error
        damage = error
    if checkpoint is None:
        return found
    table = ranks.table([damage is not None])
    where = next((rank for rank, (bad,) in enumerate(table) if bad), None)
    if where is not None:
        raise damage or DamagedCheckpointError(
            f"rank {where} found {checkpoint} damaged, which this one could read",
            folder=checkpoint,
        )
    return found
