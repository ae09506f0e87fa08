"""Checkpoints: folders that are complete or do not exist under their name.

``checkpoint-{step}/`` holds ``model*.safetensors`` (readable by ``from_pretrained``),
``optimizer*.safetensors`` (remainder plane and moments by parameter name), ``headrace.json`` (step,
sizes of all files, the trainer's state), ``digests.json`` and the config and tokenizer. It is
written under a temporary name, flushed, and renamed. Never pickle. Invariants: saving needs no
memory of the model's size; a kill at any moment leaves the previous checkpoint; resume is bitwise,
from what was saved to the bit.
"""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import CheckpointError, DamagedCheckpointError
from headrace.folders import list_checkpoints
from headrace.store.adapter_files import read_adapter
from headrace.store.carried import CarriedTensors
from headrace.store.digests import DIGESTS
from headrace.store.finite import all_finite
from headrace.store.folders import (
    FORMAT_VERSION,
    RECORD,
    find_problem,
    latest_checkpoint,
    new_checkpoint,
    new_folder,
    prune_checkpoints,
    read_record,
    write_record,
)
from headrace.store.identity import check_same_model, check_tensor, read_optimizer_index
from headrace.store.pulse import Pulse
from headrace.store.safetensors_io import SafetensorsReader, read_index
from headrace.store.shards import (
    ShardWriter,
    adapter_groups,
    described_optimizer,
    described_weights,
    optimizer_groups,
    weight_groups,
    write_shards,
)
from headrace.store.snapshot import Snapshot
from headrace.units import GIB, MIB

if TYPE_CHECKING:
    from headrace.models.spec import ModelSpec
    from headrace.store.shards import TensorGroup
    from headrace.store.snapshot import StateSource
    from headrace.store.state import ModelState, StateDtype

SHARD_BYTES = 4 * GIB
OWN_FILES = (RECORD, DIGESTS)  # what no model folder has
_LEAST_COMPANIONS = MIB  # config.json, headrace.json
_NAMED_BYTES = 160  # of a tensor, beside its name: a header's, an index's and a digest's line
_logger = logging.getLogger(__name__)


def checkpoint_bytes(spec: ModelSpec, state: ModelState, tokenizer: Any = None) -> int:
    """Bytes of everything that a checkpoint writes.

    Weights, optimizer state and carried tensors (known once the weights were loaded) exactly;
    configuration, index and record by a bound.
    """
    # A fast tokenizer is one JSON file; a slow one's vocabulary is about as long.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = len(backend.to_str().encode()) if backend is not None else 0
    names = [p.name for unit in state.units for p in unit.layout.params if p.trainable] * 3
    if spec.adapters is None:
        names += [n for unit in state.units for n in described_weights(spec.weight_names, unit)]
    companions = _LEAST_COMPANIONS + words + sum(len(name) + _NAMED_BYTES for name in names)
    if spec.adapters is None:
        return state.state_bytes + spec.carried.num_bytes + companions
    # A float32 copy, two moments, and the remainder of a split master.
    size = 14 if state.dtype == "bfloat16" else 12
    return size * spec.num_trainable_parameters + companions


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
    pulse: Pulse | None = None,
) -> Path:
    """:func:`save_checkpoint` of any state that can be read unit by unit.

    Each unit is read once, in order, and told to be done before the next one. ``pulse`` is told of
    every piece that is written.
    """
    output_dir, pulse = Path(output_dir), pulse or Pulse()
    with new_checkpoint(output_dir, step) as folder:
        stem, groups, limit = "model", _whole_model(spec, source), SHARD_BYTES
        if spec.adapters is not None:
            spec.adapters.peft_config.save_pretrained(folder)
            # PEFT reads one file.
            stem, groups, limit = "adapter_model", adapter_groups(source), sys.maxsize
        with (
            ShardWriter(folder, stem, groups, shard_bytes=limit, pulse=pulse) as weights,
            ShardWriter(
                folder, "optimizer", optimizer_groups(source), shard_bytes=SHARD_BYTES, pulse=pulse
            ) as optimizer,
        ):
            num_units = len(source.described)
            for index in range(num_units):
                weights.write_next()
                optimizer.write_next()
                source.done(index)
            for _ in groups[num_units:]:
                weights.write_next()
        pulse.at(folder)
        if spec.adapters is None:
            _write_config(folder, spec, source.dtype)
        _write_tokenizer(folder, tokenizer)
        record = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "optimizer_step": source.optimizer_step,
            "dtype": source.dtype,
            "carried": list(spec.carried.names),
            "trainer_state": trainer_state,
        }
        write_record(folder, record, {**weights.digests, **optimizer.digests})
    return output_dir / f"checkpoint-{step}"


def load_checkpoint(path: str | Path, spec: ModelSpec, state: ModelState) -> dict[str, Any]:
    """Fill ``state`` from a checkpoint, bitwise as it was saved; returns the trainer's state.

    Of a run with adapters it holds them alone: the model must have been loaded before.

    Raises:
        CheckpointError: it is incomplete, of another model or of another dtype.
        DamagedCheckpointError: a tensor is not what was saved, by its digest.
    """
    path = Path(path)
    if (problem := find_problem(path)) is not None:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {problem}", remedy="take an earlier one"
        )
    record = read_record(path)
    if record["dtype"] != state.dtype:
        raise CheckpointError(
            f"{path} was saved with dtype {record['dtype']}, this run has {state.dtype}",
            remedy=f"set dtype: {record['dtype']}",
        )
    if "digests" not in record:
        _logger.warning(
            "%s was saved without digests, by an earlier headrace: damage to its values would not "
            "be noticed",
            path,
        )
    if spec.adapters is None:
        _read_weights(path, set(record.get("carried", ())), spec, state)
    else:
        check_same_model(path, spec, state)
        read_adapter(path, state)
    optimizer = read_optimizer_index(path)
    with SafetensorsReader() as reader:
        names = [name for unit in state.units for name in described_optimizer(unit)]
        reader.read_ahead((optimizer[name], name) for name in names if name in optimizer)
        for unit in state.units:
            for name, (described, param, kind) in described_optimizer(unit).items():
                value = reader.get(optimizer[name], name)
                check_tensor(value, described, name, path)
                unit.set_plane(param, kind, value)
    state.optimizer_step = record["optimizer_step"]
    return dict(record["trainer_state"])


def _read_weights(path: Path, carried: set[str], spec: ModelSpec, state: ModelState) -> None:
    weights = read_index(path)
    pieces, _ = spec.weight_names.plan(weights.keys() - carried)
    check_same_model(path, spec, state)
    places = {p.name: (unit, p) for unit in state.units for p in unit.layout.params}
    with SafetensorsReader() as reader:
        reader.read_ahead((weights[key], key) for piece in pieces for key in piece.keys)
        for piece in pieces:

            def get(key: str) -> torch.Tensor:
                value = reader.get(weights[key], key)
                if not all_finite(value):
                    raise DamagedCheckpointError(
                        f"{key} in {path} has NaN or infinite values", folder=path
                    )
                return value

            for name, value in piece.read(get, spec.model, spec.config).items():
                unit, param = places[name]
                check_tensor(value, unit.stored(param, described=True), name, path)
                unit.set_master(param, value)
        for key in carried:
            reader.get(weights[key], key)  # is written to the next checkpoints: compared now
    spec.carried = CarriedTensors(carried, weights)


def export_pretrained(
    spec: ModelSpec, state: ModelState, out_dir: str | Path, tokenizer: Any = None
) -> Path:
    """Write a Hugging Face model folder; it appears under its name only when complete.

    Adapters are merged into what is written; the state stays as it is.

    Raises:
        ConfigError: ``out_dir`` exists and is not empty.
        CheckpointError: the disk is full or not writable.
    """
    out_dir = Path(out_dir)
    snapshot = Snapshot(state)
    try:
        with new_folder(out_dir) as folder:
            write_shards(folder, "model", _whole_model(spec, snapshot), shard_bytes=SHARD_BYTES)
            _write_config(folder, spec, state.dtype)
            _write_tokenizer(folder, tokenizer)
    finally:
        snapshot.close()
    return out_dir


def _whole_model(spec: ModelSpec, source: StateSource) -> list[TensorGroup]:
    return [*weight_groups(spec, source), *spec.carried.groups()]


def _write_config(folder: Path, spec: ModelSpec, dtype: StateDtype) -> None:
    # Weights under the names of a model of several modalities go with its configuration.
    whole = spec.weight_names.is_composite
    config = copy.deepcopy(spec.source_config if whole else spec.config)
    config.dtype = getattr(torch, dtype)
    if not whole:
        config.architectures = [type(spec.model).__name__]
    config.save_pretrained(folder)


def _write_tokenizer(folder: Path, tokenizer: Any) -> None:
    if tokenizer is None:
        return
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error  # what tokenizers raises when the disk is full


__all__ = [
    "OWN_FILES",
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
