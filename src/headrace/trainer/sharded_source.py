"""What another trainer left: where its sharded weights and moments lie, and under which names.

Knows the layouts of torch's distributed checkpoints (FSDP2) and of axolotl's and accelerate's
``SHARDED_STATE_DICT`` (``pytorch_model_fsdp_0``, ``optimizer_0``). The invariant: every tensor is
either a weight or an optimizer's, told by its place in the state dict that was saved. Reads no
tensor but the optimizer's step counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.errors import CheckpointError
from headrace.store.sharded import ShardedCheckpoint, find_folders

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_CHECKPOINT = re.compile(r"(?:checkpoint|step)-(\d+)")
# Modules that trainers wrap around a model's own.
_WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_OPTIMIZER = re.compile(r"(?:^|\.)(?:optim\w*\.)(?:state|param_groups)\.|^(?:state|param_groups)\.")
_STATE = re.compile(r"(?:^|\.)state\.(?P<name>.+)\.(?P<kind>\w+)$")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor in one of the folders."""

    checkpoint: ShardedCheckpoint
    name: str

    def read(self) -> torch.Tensor:
        """The tensor.

        Raises:
            CheckpointError: its pieces are damaged.
        """
        return self.checkpoint.read(self.name)

    def same(self, other: Place) -> bool:
        """Bitwise equal to another tensor of the same folder.

        Raises:
            CheckpointError: pieces are damaged.
        """
        return self.checkpoint.same(self.name, other.name)

    @property
    def described(self) -> torch.Tensor:
        """Type and shape, on the meta device."""
        tensor = self.checkpoint.tensors[self.name]
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@dataclass(frozen=True, kw_only=True)
class ShardedSource:
    """A checkpoint of another trainer.

    Attributes:
        folder: where it lies.
        step: in the folder's name, or None.
        weights: by parameter name.
        state: the optimizer's tensors, by kind and parameter name.
    """

    folder: Path
    step: int | None
    weights: dict[str, Place]
    state: dict[str, dict[str, Place]]

    def optimizer_step(self) -> int:
        """How many updates the moments have seen.

        Raises:
            CheckpointError: parameters disagree, or it was not saved.
        """
        steps = {int(place.read().item()) for place in self.state.get("step", {}).values()}
        if len(steps) != 1:
            raise CheckpointError(
                f"the optimizer of {self.folder} "
                + (f"has step counts from {min(steps)} to {max(steps)}" if steps else "has no step")
                + ", and one count is needed for the bias correction",
                remedy="--to model leaves the optimizer behind",
            )
        return steps.pop()


def open_source(source: Path) -> ShardedSource:
    """Find the shards below ``source``: themselves, a checkpoint, or a run's last whole one.

    Raises:
        CheckpointError: there are none, or they are not whole.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder", remedy="give a checkpoint's folder")
    candidates = [source]
    if not any(True for _ in find_folders(source)):
        numbered = [
            (int(match[1]), path)
            for path in source.iterdir()
            if (match := _CHECKPOINT.fullmatch(path.name)) and path.is_dir()
        ]
        candidates = [path for _, path in sorted(numbered, reverse=True)]
    problem: CheckpointError | None = None
    for candidate in candidates:
        folders = list(find_folders(candidate))
        if not folders:
            continue
        try:
            return _sorted_out(candidate, [ShardedCheckpoint(folder) for folder in folders])
        except CheckpointError as error:
            if candidate == candidates[-1]:
                raise
            problem = problem or error  # the run's last save was not finished
    pickled = sorted(path.name for path in source.glob("*_rank*.bin"))
    raise problem or CheckpointError(
        f"no sharded checkpoint in {source}"
        + (f"; found {pickled[0]}, which is pickle and is never read" if pickled else ""),
        remedy="give a folder with .metadata and .distcp files, or one that holds such folders "
        "(pytorch_model_fsdp_0)",
    )


def _sorted_out(folder: Path, checkpoints: Iterable[ShardedCheckpoint]) -> ShardedSource:
    weights: dict[str, Place] = {}
    state: dict[str, dict[str, Place]] = {}
    for checkpoint in checkpoints:
        for flat, tensor in checkpoint.tensors.items():
            place = Place(checkpoint=checkpoint, name=flat)
            joined = _clean(".".join(tensor.path))
            if not _OPTIMIZER.search(joined):
                name = _clean(tensor.path[-1])
                if name in weights:
                    raise CheckpointError(
                        f"{folder} holds {name} more than once",
                        remedy="give the folder of one model, such as pytorch_model_fsdp_0",
                    )
                weights[name] = place
            elif (match := _STATE.search(joined)) is not None:
                state.setdefault(match["kind"], {})[_clean(match["name"])] = place
    if not weights:
        raise CheckpointError(
            f"{folder} holds no weights" + (", only an optimizer's state" if state else ""),
            remedy="give the folder above, which holds the model's shards too",
        )
    match = _CHECKPOINT.fullmatch(folder.resolve().name)
    return ShardedSource(
        folder=folder, step=int(match[1]) if match else None, weights=weights, state=state
    )


def _clean(name: str) -> str:
    return _WRAPPERS.sub("", name).removeprefix("module.")
