"""A checkpoint's weights in another type: float32 gives the master weights to the last bit.

Owns ``headrace export --dtype``. The invariants: one unit of the model is in memory at a time, and
the folder appears under its name only when it is complete. Adapters have no model of their own
here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from headrace.errors import ConfigError
from headrace.models.building import load_config
from headrace.models.spec import ModelSpec
from headrace.store.carried import CarriedTensors
from headrace.store.checkpoint import OWN_FILES, SHARD_BYTES, read_record
from headrace.store.conversion import pieces_by_unit
from headrace.store.folders import new_folder, refuse_taken
from headrace.store.identity import read_optimizer_index
from headrace.store.safetensors_io import SafetensorsReader, read_index
from headrace.store.shards import TensorGroup, write_shards
from headrace.store.state import UnitState
from headrace.trainer.convert import check_room
from headrace.trainer.export import ExportResult, find_checkpoint
from headrace.trainer.heap import map_large_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.store.conversion import Piece
    from headrace.store.layout import UnitLayout

Dtype = Literal["bfloat16", "float32"]


def export_as(source: str | Path, out: str | Path, *, dtype: Dtype) -> ExportResult:
    """Write the model of a checkpoint with weights of a given type.

    Args:
        source: a checkpoint, or a run folder.
        out: must not exist, or be empty.
        dtype: float32 are the master weights; bfloat16 rounds them as torch does.

    Raises:
        CheckpointError: no complete checkpoint there, or the disk filled up.
        ConfigError: ``out`` is taken, or the run trained adapters.
        CapacityError: the disk has no room.
    """
    map_large_blocks()
    checkpoint, out = find_checkpoint(Path(source)), Path(out)
    refuse_taken(out)
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"--dtype: {checkpoint} holds adapters, and no model",
            remedy="export with --merge, in the type of the run",
        )
    groups = _groups(checkpoint, getattr(torch, dtype))
    check_room(out, sum(group.num_bytes for group in groups))
    with new_folder(out) as folder:
        write_shards(folder, "model", groups, shard_bytes=SHARD_BYTES)
        for file in sorted(checkpoint.iterdir()):
            weights = ".safetensors" in file.name
            if file.is_file() and not weights and file.name not in {*OWN_FILES, "config.json"}:
                shutil.copyfile(file, folder / file.name)
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        text = json.dumps({**config, "dtype": dtype}, indent=2, ensure_ascii=False)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    files = sorted(out.iterdir())
    return ExportResult(
        checkpoint=checkpoint,
        folder=out,
        num_bytes=sum(file.stat().st_size for file in files),
        files=tuple(file.name for file in files),
    )


def _groups(checkpoint: Path, dtype: torch.dtype) -> list[TensorGroup]:
    """The weights of every unit, made when they are written, and carried tensors as they are."""
    record = read_record(checkpoint)
    spec = ModelSpec(load_config(str(checkpoint)))
    weights, optimizer = read_index(checkpoint), read_optimizer_index(checkpoint)
    carried = set(record.get("carried", ()))
    pieces, _ = spec.weight_names.plan(weights.keys() - carried)

    def make(layout: UnitLayout, sources: list[Piece]) -> Mapping[str, torch.Tensor]:
        unit = UnitState.empty(layout, record["dtype"])
        params = {param.name: param for param in layout.params}
        with SafetensorsReader() as reader:
            for piece in sources:
                made = piece.read(lambda k: reader.get(weights[k], k), spec.model, spec.config)
                for name, value in made.items():
                    unit.set_master(params[name], value)
            for name, param in params.items():
                low = f"{name}.remainder"
                if low in optimizer and unit.remainder is not None:  # a frozen one has none
                    value = reader.get(optimizer[low], low)
                    unit.remainder[param.slice].copy_(value.reshape(-1))
        return spec.weight_names.to_checkpoint(
            {name: unit.master(param).to(dtype) for name, param in params.items()}
        )

    groups = []
    for layout, sources in zip(spec.units, pieces_by_unit(pieces, spec.units), strict=True):
        described = {
            p.name: torch.empty(p.shape, dtype=dtype, device="meta") for p in layout.params
        }
        groups.append(
            TensorGroup(
                described=spec.weight_names.to_checkpoint(described),
                make=lambda layout=layout, sources=sources: make(layout, sources),  # type: ignore[misc]  # bound here
            )
        )
    return [*groups, *CarriedTensors(carried, weights).groups()]
