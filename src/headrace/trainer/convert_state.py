"""Sharded checkpoints of other trainers, optimizer included, as headrace checkpoints.

Owns ``headrace convert --to checkpoint``: master weights are split and moments taken over a unit at
a time, so that training goes on with the bias correction and the moments it had. The invariant:
every trained parameter has both moments and the one step count, or nothing is written. Where the
data stood is not in such checkpoints; the trainer that goes on works it out from the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.data.hf_tokenizer import read_tokenizer
from headrace.errors import CheckpointError, ConfigError
from headrace.models.building import load_config
from headrace.models.spec import ModelSpec
from headrace.store.checkpoint import write_checkpoint
from headrace.store.conversion import pieces_by_unit
from headrace.store.state import UnitState
from headrace.trainer.convert import ConvertResult, check_room, find_config, place_weights
from headrace.trainer.heap import map_large_blocks
from headrace.trainer.resume import converted_state
from headrace.trainer.sharded_source import MOMENTS, open_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.store.conversion import Piece
    from headrace.store.state import StateDtype
    from headrace.trainer.sharded_source import Place, ShardedSource


def convert_to_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    dtype: StateDtype | None = None,
) -> ConvertResult:
    """Write ``out/checkpoint-N`` with the weights and the optimizer's state of ``source``.

    Args:
        source: a folder of shards, a trainer's checkpoint, or a run folder.
        out: the ``output_dir`` of the run that goes on.
        model: folder with config.json (and the tokenizer); else looked for around the source.
        dtype: of the working weights; bfloat16 by default. Master weights are float32.

    Raises:
        CheckpointError: the source is not whole, not of this model, or has no AdamW state.
        ConfigError: no configuration of the model.
        CapacityError: the disk has no room.
    """
    map_large_blocks()
    found = open_source(Path(source))
    config_folder = find_config(found.folder, model)
    spec = ModelSpec(load_config(str(config_folder)))
    _, unused = place_weights(found, spec.model)
    state = _ShardedState(found, spec, dtype or "bfloat16")
    num_bytes = sum(unit.num_bytes for unit in state.described)
    check_room(Path(out), num_bytes)
    step = found.step or state.optimizer_step
    folder = write_checkpoint(
        out,
        spec,
        state,
        step=step,
        trainer_state=converted_state(step),
        tokenizer=_tokenizer(config_folder),
    )
    return ConvertResult(
        source=found.folder,
        folder=folder,
        num_tensors=sum(len(layout.params) for layout in spec.units),
        num_bytes=sum(file.stat().st_size for file in folder.iterdir()),
        dtype=state.dtype,
        step=state.optimizer_step,
        notes=tuple(_notes(found, unused)),
    )


def _notes(found: ShardedSource, unused: list[str]) -> list[str]:
    notes = []
    if unused:
        notes.append(f"{len(unused)} tensors have no place in the model, such as {unused[0]}")
    if others := sorted(found.state.keys() - {*MOMENTS, "step"}):
        notes.append(f"left behind of the optimizer: {', '.join(others)}")
    kinds = {place.described.dtype for place in found.weights.values()}
    if torch.float32 not in kinds:
        notes.append("the source holds no float32 master weights; they begin as its weights are")
    return notes


class _ShardedState:
    """A state read from shards, one unit at a time."""

    def __init__(self, found: ShardedSource, spec: ModelSpec, dtype: StateDtype) -> None:
        """Sort the pieces by unit and check that the optimizer's state is complete."""
        self.dtype: StateDtype = dtype
        self._spec = spec
        self._places = {"": found.weights, **_moments(found, spec)}
        self.optimizer_step = found.optimizer_step()
        pieces, _ = spec.weight_names.plan(found.weights)
        if not spec.weight_names.is_converted:
            spec.weight_names = spec.weight_names.in_default_form()
        self._pieces = pieces_by_unit(pieces, spec.units)
        self.described = [UnitState.empty(layout, dtype, "meta") for layout in spec.units]
        self._current: tuple[int, UnitState] | None = None

    def unit(self, index: int) -> UnitState:
        """Read a unit's shards; the one before is given up."""
        if self._current is None or self._current[0] != index:
            self._current = None
            self._current = (index, self._read(index))
        return self._current[1]

    def done(self, index: int) -> None:
        """A unit was written."""
        assert self._current is None or self._current[0] == index
        self._current = None

    def _read(self, index: int) -> UnitState:
        unit = UnitState.empty(self._spec.units[index], self.dtype)
        params = {param.name: param for param in unit.layout.params}
        planes = {"exp_avg": unit.exp_avg, "exp_avg_sq": unit.exp_avg_sq}
        for piece in self._pieces[index]:
            for name, value in self._made(piece, "").items():
                unit.set_master(params[name], value)
            if not params[piece.name].trainable:
                continue
            for kind, plane in planes.items():
                for name, value in self._made(piece, kind).items():
                    plane[params[name].slice].copy_(value.reshape(-1))
        return unit

    def _made(self, piece: Piece, kind: str) -> dict[str, torch.Tensor]:
        places = self._places[kind]
        return piece.read(lambda key: places[key].read(), self._spec.model, self._spec.config)


def _moments(found: ShardedSource, spec: ModelSpec) -> dict[str, Mapping[str, Place]]:
    """Both moments of every weight, by kind.

    Raises:
        CheckpointError: the optimizer was no AdamW, or did not train every parameter.
    """
    if lacking := [kind for kind in MOMENTS if kind not in found.state]:
        held = ", ".join(sorted(found.state)) or "nothing"
        raise CheckpointError(
            f"the optimizer of {found.folder} holds {held}, and AdamW's {lacking[0]} is needed",
            remedy="--to model takes the weights alone; train from them with model_name_or_path",
        )
    trained = {p.name for layout in spec.units for p in layout.params if p.trainable}
    buffers = spec.model.state_dict().keys() - {n for n, _ in spec.model.named_parameters()}
    moments: dict[str, Mapping[str, Place]] = {}
    for kind in MOMENTS:
        places = found.state[kind]
        without = sorted(
            name
            for name in found.weights
            if name not in places and spec.weight_names.placed(name) not in buffers
        )
        if without:
            raise CheckpointError(
                f"the optimizer of {found.folder} has no {kind} for {len(without)} of "
                f"{len(trained)} parameters, such as {without[0]}: they were frozen there, and "
                "would be trained here",
                remedy="--to model takes the weights alone",
            )
        moments[kind] = places
    return moments


def _tokenizer(folder: Path) -> Any:
    try:
        return read_tokenizer(folder, remedy="")
    except ConfigError:
        return None  # a folder with the model's configuration alone
