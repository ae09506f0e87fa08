"""A model's tensors as safetensors files: shards that hold whole units, an index when needed.

Sizes and names are known before any data is touched, from tensors on the meta device; then one
unit at a time is brought into the form of the files and written. Invariant: memory never grows by
more than one unit, and index, headers and files agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from headrace.store.adapter_files import adapter_tensors, described_adapter, merged
from headrace.store.safetensors_io import StreamWriter, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from headrace.models.spec import ModelSpec
    from headrace.store.conversion import WeightNames
    from headrace.store.layout import ParamSpec
    from headrace.store.pulse import Pulse
    from headrace.store.snapshot import StateSource
    from headrace.store.state import UnitState


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


def weight_groups(spec: ModelSpec, source: StateSource) -> list[TensorGroup]:
    """The weights of every unit in the form of the model's checkpoints, adapters merged."""
    return [_weights_of(spec, source, index) for index in range(len(source.described))]


def _weights_of(spec: ModelSpec, source: StateSource, index: int) -> TensorGroup:
    def make() -> Mapping[str, torch.Tensor]:
        unit = source.unit(index)
        plain = [param for param in unit.layout.params if not param.adapter]
        return spec.weight_names.to_checkpoint({p.name: merged(spec, unit, p) for p in plain})

    described = described_weights(spec.weight_names, source.described[index])
    return TensorGroup(described=described, make=make)


def described_weights(names: WeightNames, unit: UnitState) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a unit's weights, on the meta device."""
    plain = [param for param in unit.layout.params if not param.adapter]
    return names.to_checkpoint({p.name: unit.stored(p, described=True) for p in plain})


def adapter_groups(source: StateSource) -> list[TensorGroup]:
    """The trained parameters of every unit as PEFT's files hold them."""
    return [
        TensorGroup(
            described=described_adapter(unit),
            make=lambda index=index: adapter_tensors(source.unit(index)),  # type: ignore[misc]  # bound here
        )
        for index, unit in enumerate(source.described)
    ]


def optimizer_groups(source: StateSource) -> list[TensorGroup]:
    """The optimizer's planes of every unit, by parameter name."""
    return [
        TensorGroup(
            described={n: tensor for n, (tensor, _, _) in described_optimizer(unit).items()},
            make=lambda index=index: optimizer_tensors(source.unit(index)),  # type: ignore[misc]  # bound here
        )
        for index, unit in enumerate(source.described)
    ]


def optimizer_tensors(unit: UnitState) -> dict[str, torch.Tensor]:
    """Views of a whole unit's planes by parameter name and kind."""
    assert unit.shard.is_whole, "a shard has no whole parameters"
    return {
        f"{p.name}.{kind}": plane[p.slice].view(p.shape)
        for p in unit.layout.params
        if p.trainable
        for kind, plane in unit.planes.items()
    }


def described_optimizer(unit: UnitState) -> dict[str, tuple[torch.Tensor, ParamSpec, str]]:
    """The same on the meta device, each with its parameter and kind; also of a shard."""
    return {
        f"{p.name}.{kind}": (torch.empty(p.shape, dtype=plane.dtype, device="meta"), p, kind)
        for p in unit.layout.params
        if p.trainable
        for kind, plane in unit.planes.items()
    }


def write_shards(
    folder: Path, stem: str, groups: Sequence[TensorGroup], *, shard_bytes: int
) -> None:
    """Write groups as ``{stem}.safetensors``, or as several files and their index.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    with ShardWriter(folder, stem, groups, shard_bytes=shard_bytes) as writer:
        for _ in groups:
            writer.write_next()


class ShardWriter:
    """Writes groups in order, one at each call; the index, if one is needed, at the end.

    Attributes:
        weight_map: the file of each tensor.
        digests: of each file that is complete, as ``digests.json`` holds them.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        groups: Sequence[TensorGroup],
        *,
        shard_bytes: int,
        pulse: Pulse | None = None,
    ) -> None:
        """Plan the files of ``groups``; nothing is written yet. ``pulse`` hears of every piece."""
        self._folder = folder
        self._pulse = pulse
        self._stem = stem
        self._groups = groups
        self._next = 0
        self._open: StreamWriter | None = None
        shards = list(_filled(groups, shard_bytes))
        self._files: dict[int, tuple[str, list[TensorGroup]]] = {}  # by its first group's id
        self.weight_map: dict[str, str] = {}
        self.digests: dict[str, dict[str, Any]] = {}
        for number, shard in enumerate(shards, 1):
            name = f"{stem}.safetensors"
            if len(shards) > 1:
                name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            self._files[id(shard[0])] = (name, shard)
            self.weight_map |= {n: name for group in shard for n in group.described}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._open is not None:
                self._open.close()

    def write_next(self) -> None:
        """Make and write the next group.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        group = self._groups[self._next]
        self._next += 1
        if id(group) in self._files:
            if self._open is not None:
                self._close_file(self._open)
            name, shard = self._files[id(group)]
            described = {n: tensor for part in shard for n, tensor in part.described.items()}
            self._open = StreamWriter(
                self._folder / name, described, {"format": "pt"}, pulse=self._pulse
            )
        if not group.described:
            return
        assert self._open is not None
        tensors = group.make()
        for name in group.described:
            self._open.write(tensors[name])

    def _finish(self) -> None:
        assert self._next == len(self._groups), "groups are missing"
        if self._open is not None:
            self._close_file(self._open)
        if len(self._files) > 1:
            total = sum(group.num_bytes for group in self._groups)
            index = {"metadata": {"total_size": total}, "weight_map": self.weight_map}
            write_json(self._folder / f"{self._stem}.safetensors.index.json", index)

    def _close_file(self, file: StreamWriter) -> None:
        file.finish()
        self.digests[file.name] = file.digests


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
