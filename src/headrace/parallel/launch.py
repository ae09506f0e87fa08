"""Which process of a run this is, by the variables that launchers set. Starts and connects nothing.

torchrun sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``. srun sets variables of its own for each task of a step; where the processes meet
then follows from the job.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_PORT, _NUM_PORTS = 20000, 20000


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process among those of a run.

    Attributes:
        rank: of this process.
        size: how many there are.
        local_rank: among the processes of this machine.
        local_size: processes of this machine.
        address: of the machine where they meet.
        port: there.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0


def place_of(environ: Mapping[str, str] = os.environ) -> Place:
    """The place of this process; alone without a launcher.

    Raises:
        ConfigError: the variables contradict each other or say too little.
    """
    address, port = environ.get("MASTER_ADDR", ""), _number(environ, "MASTER_PORT", 0)
    if environ.get("WORLD_SIZE"):
        size = _number(environ, "WORLD_SIZE")
        rank = _number(environ, "RANK", 0 if size == 1 else None)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
        local_rank = _number(environ, "LOCAL_RANK", rank % max(local_size, 1))
    elif environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        size = _number(environ, "SLURM_STEP_NUM_TASKS")
        rank = _number(environ, "SLURM_PROCID")
        nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
        local_size = _number(environ, "SLURM_NTASKS_PER_NODE", -(-size // nodes))
        local_rank = _number(environ, "SLURM_LOCALID")
        address, port = _meeting_point(environ, nodes)
    else:
        return Place()
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ConfigError(
            f"started as process {rank} of {size}, {local_rank} of {local_size} on this machine",
            remedy="start it with torchrun --nproc-per-node N, or srun",
        )
    if size > 1 and not (address and port):
        raise ConfigError(
            f"started as one of {size} processes (WORLD_SIZE), but MASTER_ADDR and MASTER_PORT do "
            "not say where they meet",
            remedy="start it with torchrun --nproc-per-node N, or once without WORLD_SIZE",
        )
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=port,
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}, which is no number",
            remedy="start it with torchrun --nproc-per-node N, or once without WORLD_SIZE",
        ) from None


def _meeting_point(environ: Mapping[str, str], nodes: int) -> tuple[str, int]:
    """Where the tasks of a Slurm step meet: as the job says, or by its number on one machine."""
    if nodes > 1 and not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"a Slurm step on {nodes} machines, and MASTER_ADDR does not say where they meet",
            remedy='export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
            'head -n 1)" before srun',
        )
    job = _number(environ, "SLURM_JOB_ID", 0)
    port = _number(environ, "MASTER_PORT", _FIRST_PORT + job % _NUM_PORTS)
    return environ.get("MASTER_ADDR", "127.0.0.1"), port
