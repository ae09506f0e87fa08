"""Checkpoints: folders that are complete or do not exist under their name.

``checkpoint-{step}/`` holds ``model*.safetensors`` (readable by ``from_pretrained``),
``optimizer*.safetensors`` (remainder plane and moments by parameter name), ``headrace.json`` (step,
sizes of all files, the trainer's state) and the config and tokenizer. It is written under a
temporary name, flushed, and renamed. Never pickle. Invariants: saving needs no memory of the
model's size; a kill at any moment leaves the previous checkpoint; resume is bitwise.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import CheckpointError
from headrace.store.carried import CarriedTensors
from headrace.store.folders import (
    FORMAT_VERSION,
    RECORD,
    damaged,
    file_sizes,
    find_problem,
    latest_checkpoint,
    list_checkpoints,
    new_checkpoint,
    new_folder,
    prune_checkpoints,
    read_record,
)
from headrace.store.identity import check_same_model, check_tensor, read_optimizer_index
from headrace.store.safetensors_io import SafetensorsReader, read_index
from headrace.store.shards import (
    ShardWriter,
    optimizer_groups,
    optimizer_tensors,
    weight_groups,
    write_json,
    write_shards,
)
from headrace.store.snapshot import Snapshot
from headrace.units import GIB

if TYPE_CHECKING:
    from headrace.models.spec import ModelSpec
    from headrace.store.snapshot import StateSource
    from headrace.store.state import ModelState, StateDtype

SHARD_BYTES = 4 * GIB


def checkpoint_bytes(state: ModelState) -> int:
    """Bytes of weights and optimizer state that a checkpoint writes."""
    return state.state_bytes


def save_checkpoint(
    output_dir: str | Path,
    spec: ModelSpec,
    state: ModelState,
    *,
    step: int,
    trainer_state: dict[str, Any],
    tokenizer: Any = None,
) -> Path:
    """Write ``output_dir/checkpoint-{step}``; an existing one of that step is replaced.

    Args:
        output_dir: the run's folder.
        spec: the model's structure.
        state: must be complete (``Engine.synchronize``).
        step: the trainer's step, part of the name.
        trainer_state: JSON-serialisable; returned by :func:`load_checkpoint`.
        tokenizer: saved beside the weights when given.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    snapshot = Snapshot(state)
    try:
        return write_checkpoint(
            output_dir,
            spec,
            snapshot,
            step=step,
            trainer_state=trainer_state,
            tokenizer=tokenizer,
        )
    finally:
        snapshot.close()


def write_checkpoint(
    output_dir: str | Path,
    spec: ModelSpec,
    source: StateSource,
    *,
    step: int,
    trainer_state: dict[str, Any],
    tokenizer: Any = None,
) -> Path:
    """:func:`save_checkpoint` of any state that can be read unit by unit.

    Each unit is read once, in order, and told to be done before the next one.
    """
    output_dir = Path(output_dir)
    with new_checkpoint(output_dir, step) as folder:
        groups = [*weight_groups(spec.weight_names, source), *spec.carried.groups()]
        with (
            ShardWriter(folder, "model", groups, shard_bytes=SHARD_BYTES) as weights,
            ShardWriter(
                folder, "optimizer", optimizer_groups(source), shard_bytes=SHARD_BYTES
            ) as optimizer,
        ):
            num_units = len(source.described)
            for index in range(num_units):
                weights.write_next()
                optimizer.write_next()
                source.done(index)
            for _ in groups[num_units:]:
                weights.write_next()
        _write_config(folder, spec, source.dtype, tokenizer)
        record = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "optimizer_step": source.optimizer_step,
            "dtype": source.dtype,
            "carried": list(spec.carried.names),
            "files": file_sizes(folder),
            "trainer_state": trainer_state,
        }
        write_json(folder / RECORD, record)
    return output_dir / f"checkpoint-{step}"


def load_checkpoint(path: str | Path, spec: ModelSpec, state: ModelState) -> dict[str, Any]:
    """Fill ``state`` from a checkpoint, bitwise as it was saved; returns the trainer's state.

    Raises:
        CheckpointError: it is incomplete, of another model or of another dtype.
    """
    path = Path(path)
    if (problem := find_problem(path)) is not None:
        raise CheckpointError(f"{path} is not a complete checkpoint: {problem}")
    record = read_record(path)
    if record["dtype"] != state.dtype:
        raise CheckpointError(
            f"{path} was saved with dtype {record['dtype']}, this run has {state.dtype}",
            remedy=f"set dtype: {record['dtype']}",
        )
    weights = read_index(path)
    optimizer = read_optimizer_index(path)
    carried = set(record.get("carried", ()))
    pieces, _ = spec.weight_names.plan(weights.keys() - carried)
    check_same_model(path, spec, state)
    places = {p.name: (unit, p) for unit in state.units for p in unit.layout.params}
    with SafetensorsReader() as reader:
        for piece in pieces:

            def get(key: str) -> torch.Tensor:
                value = reader.get(weights[key], key)
                if not bool(torch.isfinite(value).all()):
                    raise damaged(f"{key} in {path} has NaN or infinite values")
                return value

            for name, value in piece.read(get, spec.model, spec.config).items():
                unit, param = places[name]
                check_tensor(value, unit.stored(param, described=True), name, path)
                unit.set_master(param, value)
        for unit in state.units:
            for name, target in optimizer_tensors(unit).items():
                value = reader.get(optimizer[name], name)
                check_tensor(value, target, name, path)
                target.copy_(value)
    spec.carried = CarriedTensors(carried, weights)
    state.optimizer_step = record["optimizer_step"]
    return dict(record["trainer_state"])


def export_pretrained(
    spec: ModelSpec, state: ModelState, out_dir: str | Path, tokenizer: Any = None
) -> Path:
    """Write a Hugging Face model folder; it appears under its name only when complete.

    Raises:
        ConfigError: ``out_dir`` exists and is not empty.
        CheckpointError: the disk is full or not writable.
    """
    out_dir = Path(out_dir)
    snapshot = Snapshot(state)
    try:
        with new_folder(out_dir) as folder:
            groups = [*weight_groups(spec.weight_names, snapshot), *spec.carried.groups()]
            write_shards(folder, "model", groups, shard_bytes=SHARD_BYTES)
            _write_config(folder, spec, state.dtype, tokenizer)
    finally:
        snapshot.close()
    return out_dir


def _write_config(folder: Path, spec: ModelSpec, dtype: StateDtype, tokenizer: Any) -> None:
    # Weights under the names of a model of several modalities go with its configuration.
    whole = spec.weight_names.is_composite
    config = copy.deepcopy(spec.source_config if whole else spec.config)
    config.dtype = getattr(torch, dtype)
    if not whole:
        config.architectures = [type(spec.model).__name__]
    config.save_pretrained(folder)
    if tokenizer is None:
        return
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error  # what tokenizers raises when the disk is full


__all__ = [
    "RECORD",
    "checkpoint_bytes",
    "export_pretrained",
    "find_problem",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "prune_checkpoints",
    "read_record",
    "save_checkpoint",
    "write_checkpoint",
]
