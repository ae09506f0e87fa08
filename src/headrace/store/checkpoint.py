"""Checkpoints: folders that are complete or do not exist under their name.

``checkpoint-{step}/`` holds ``model*.safetensors`` (readable by ``from_pretrained``),
``optimizer*.safetensors`` (remainder plane and moments by parameter name), ``headrace.json`` (step,
sizes of all files, the trainer's state) and the config and tokenizer. It is written under a
temporary name, flushed, and renamed. Never pickle. Invariants: saving needs no memory of the
model's size; a kill at any moment leaves the previous checkpoint; resume is bitwise.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import CheckpointError, ConfigError
from headrace.store.carried import CarriedTensors
from headrace.store.identity import check_same_model, check_tensor, read_optimizer_index
from headrace.store.safetensors_io import (
    SafetensorsReader,
    read_index,
    sync_directory,
)
from headrace.store.shards import (
    optimizer_groups,
    optimizer_tensors,
    weight_groups,
    write_json,
    write_shards,
)
from headrace.units import GIB

if TYPE_CHECKING:
    from headrace.models.spec import ModelSpec
    from headrace.store.state import ModelState

FORMAT_VERSION = 1
RECORD = "headrace.json"
_RECORD_KINDS = {"step": int, "optimizer_step": int, "dtype": str, "trainer_state": dict}
SHARD_BYTES = 4 * GIB
_NAME = re.compile(r"checkpoint-(\d+)")
_logger = logging.getLogger(__name__)


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
    output_dir = Path(output_dir)
    final = output_dir / f"checkpoint-{step}"
    temporary = output_dir / f".checkpoint-{step}.writing"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(output_dir)
        temporary.mkdir()
        _write_weights(temporary, spec, state)
        write_shards(temporary, "optimizer", optimizer_groups(state), shard_bytes=SHARD_BYTES)
        _write_config(temporary, spec, state, tokenizer)
        record = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "optimizer_step": state.optimizer_step,
            "dtype": state.dtype,
            "carried": list(spec.carried.names),
            "files": _sizes(temporary),
            "trainer_state": trainer_state,
        }
        write_json(temporary / RECORD, record)
        _flush(temporary)
        if final.exists():
            retired = output_dir / f".checkpoint-{step}.retired"
            final.rename(retired)
        temporary.rename(final)
        sync_directory(output_dir)
        _remove_leftovers(output_dir)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"could not write {final}: {error.strerror or error}",
            remedy="free space or choose another output_dir; earlier checkpoints are untouched",
        ) from error
    except CheckpointError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


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
                    raise _damaged(f"{key} in {path} has NaN or infinite values")
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


def read_record(path: Path) -> dict[str, Any]:
    """The JSON record of a checkpoint."""
    record = json.loads((path / RECORD).read_text())
    if record.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {record.get('format_version')}, "
            f"this headrace reads {FORMAT_VERSION}"
        )
    for key, kind in _RECORD_KINDS.items():
        if not isinstance(record.get(key), kind):
            raise _damaged(f"{path / RECORD} is damaged: {key} is {record.get(key)!r}")
    return dict(record)


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(what, remedy="resume from an earlier checkpoint, or copy it again")


def find_problem(path: Path) -> str | None:
    """Why a folder is not a complete checkpoint, or None if it is one."""
    try:
        record = json.loads((path / RECORD).read_text())
        files = dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{RECORD}: {error}"
    for name, size in files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes of {size}"
    return None


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Folders named ``checkpoint-{step}``, by step, complete or not."""
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in output_dir.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The complete checkpoint of the highest step; partial ones are passed over with a warning."""
    output_dir = Path(output_dir)
    if output_dir.is_dir():
        _restore_retired(output_dir)
    for path in reversed(list_checkpoints(output_dir)):
        if (problem := find_problem(path)) is None:
            return path
        _logger.warning("passing over %s: %s", path, problem)
    return None


def prune_checkpoints(output_dir: str | Path, keep: int) -> list[Path]:
    """Delete the oldest checkpoints until ``keep`` complete ones are left; returns the deleted."""
    complete = [path for path in list_checkpoints(output_dir) if find_problem(path) is None]
    removed = complete[: max(0, len(complete) - keep)]
    for path in removed:
        # Renamed first: a kill in the middle must not leave a folder that looks complete.
        doomed = path.with_name(f".{path.name}.deleting")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return removed


def export_pretrained(
    spec: ModelSpec, state: ModelState, out_dir: str | Path, tokenizer: Any = None
) -> Path:
    """Write a Hugging Face model folder; it appears under its name only when complete.

    Raises:
        ConfigError: ``out_dir`` exists and is not empty.
        CheckpointError: the disk is full or not writable.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(
            f"{out_dir} exists and is not empty", remedy="choose a new folder for the export"
        )
    temporary = out_dir.with_name(f".{out_dir.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write_weights(temporary, spec, state)
        _write_config(temporary, spec, state, tokenizer)
        _flush(temporary)
        if out_dir.exists():
            out_dir.rmdir()
        temporary.rename(out_dir)
        sync_directory(out_dir.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"could not write {out_dir}: {error.strerror or error}") from error
    except CheckpointError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return out_dir


# -- writing -------------------------------------------------------------------------------


def _write_weights(folder: Path, spec: ModelSpec, state: ModelState) -> None:
    groups = [*weight_groups(spec.weight_names, state), *spec.carried.groups()]
    write_shards(folder, "model", groups, shard_bytes=SHARD_BYTES)


def _write_config(folder: Path, spec: ModelSpec, state: ModelState, tokenizer: Any) -> None:
    # Weights under the names of a model of several modalities go with its configuration.
    whole = spec.weight_names.is_composite
    config = copy.deepcopy(spec.source_config if whole else spec.config)
    config.dtype = getattr(torch, state.dtype)
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


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _flush(folder: Path) -> None:
    """Make every file below a folder, and their names, durable."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(folder)


def _remove_leftovers(output_dir: Path) -> None:
    _restore_retired(output_dir)
    for path in output_dir.glob(".checkpoint-*"):
        if path.suffix in {".writing", ".deleting", ".retired"}:
            shutil.rmtree(path, ignore_errors=True)


def _restore_retired(output_dir: Path) -> None:
    """A kill between the two renames of a replacement left the old one under its spare name."""
    for path in output_dir.glob(".checkpoint-*.retired"):
        final = output_dir / path.stem.removeprefix(".")
        if not final.exists():
            path.rename(final)


__all__ = [
    "checkpoint_bytes",
    "export_pretrained",
    "find_problem",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "prune_checkpoints",
    "read_record",
    "save_checkpoint",
]
