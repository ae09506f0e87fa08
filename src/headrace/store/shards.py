"""A model's tensors as safetensors files: shards that hold whole units, an index when needed.

Sizes and names are known before any data is touched, from tensors on the meta device; then one
unit at a time is brought into the form of the files and written. Invariant: memory never grows by
more than one unit, and index, headers and files agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.store.safetensors_io import write_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from headrace.store.conversion import WeightNames
    from headrace.store.state import ModelState, UnitState


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Tensors that are made at once.

    Attributes:
        described: their types and shapes by name, on the meta device, in order.
        make: the tensors themselves, under the same names.
    """

    described: dict[str, torch.Tensor]
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        """Of the data."""
        return sum(tensor.nbytes for tensor in self.described.values())


def weight_groups(names: WeightNames, state: ModelState) -> list[TensorGroup]:
    """The weights of every unit in the form of the model's checkpoints."""
    return [_weights_of(names, unit) for unit in state.units]


def _weights_of(names: WeightNames, unit: UnitState) -> TensorGroup:
    def make() -> Mapping[str, torch.Tensor]:
        return names.to_checkpoint({p.name: unit.stored(p) for p in unit.layout.params})

    described = names.to_checkpoint(
        {p.name: unit.stored(p, described=True) for p in unit.layout.params}
    )
    return TensorGroup(described=described, make=make)


def optimizer_groups(state: ModelState) -> list[TensorGroup]:
    """The optimizer's planes of every unit, by parameter name."""
    groups = []
    for unit in state.units:
        tensors = optimizer_tensors(unit)
        groups.append(
            TensorGroup(
                described={name: tensor.to("meta") for name, tensor in tensors.items()},
                make=lambda tensors=tensors: tensors,  # type: ignore[misc]  # bound here
            )
        )
    return groups


def optimizer_tensors(unit: UnitState) -> dict[str, torch.Tensor]:
    """Views of a unit's planes by parameter name and kind."""
    planes = {"exp_avg": unit.exp_avg, "exp_avg_sq": unit.exp_avg_sq}
    if unit.remainder is not None:
        planes["remainder"] = unit.remainder
    return {
        f"{p.name}.{kind}": plane[p.slice].view(p.shape)
        for p in unit.layout.params
        if p.trainable
        for kind, plane in planes.items()
    }


def write_shards(
    folder: Path, stem: str, groups: Sequence[TensorGroup], *, shard_bytes: int
) -> None:
    """Write groups as ``{stem}.safetensors``, or as several files and their index.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    shards = list(_filled(groups, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}.safetensors"
        if len(shards) > 1:
            name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        described = {n: tensor for group in shard for n, tensor in group.described.items()}
        write_stream(folder / name, described, _made(shard), {"format": "pt"})
        weight_map |= dict.fromkeys(described, name)
    if len(shards) > 1:
        total = sum(group.num_bytes for group in groups)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{stem}.safetensors.index.json", index)


def _filled(groups: Sequence[TensorGroup], shard_bytes: int) -> Iterator[list[TensorGroup]]:
    """Whole groups, joined until a shard is full."""
    shard: list[TensorGroup] = []
    for group in groups:
        if not group.described and (shard or len(groups) > 1):
            continue
        if shard and sum(g.num_bytes for g in shard) + group.num_bytes > shard_bytes:
            yield shard
            shard = []
        shard.append(group)
    yield shard


def _made(shard: Sequence[TensorGroup]) -> Iterator[torch.Tensor]:
    for group in shard:
        tensors = group.make()
        for name in group.described:
            yield tensors[name]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, keys sorted."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    path.write_text(text + "\n")
