"""Checkpoints as plain Hugging Face model folders.

Owns ``headrace export``. A checkpoint's weights are already in Hugging Face's layout (adapters in
PEFT's), so they are copied file by file, a mebibyte at a time, and compared with the checkpoint's
digests on the way. Merging adapters reads the model they belong to. The invariant: the folder
appears under its name only when it is complete, and no optimizer state goes into it.
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import CapacityError, CheckpointError, ConfigError, DamagedCheckpointError
from headrace.store.adapter_files import CONFIG_FILE, read_adapter
from headrace.store.checkpoint import (
    OWN_FILES,
    RECORD,
    export_pretrained,
    find_problem,
    latest_checkpoint,
    read_record,
)
from headrace.store.digests import Digests, copy_checked
from headrace.store.loading import load_pretrained
from headrace.store.state import ModelState
from headrace.trainer.config import resolve
from headrace.trainer.heap import map_large_blocks
from headrace.trainer.model_checks import take_apart
from headrace.trainer.preflight import load_model_config, load_tokenizer, model_folder
from headrace.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was written.

    Attributes:
        checkpoint: where it came from.
        folder: the model folder.
        num_bytes: its size.
        files: names in it.
    """

    checkpoint: Path
    folder: Path
    num_bytes: int
    files: tuple[str, ...]


def find_checkpoint(source: Path) -> Path:
    """A complete checkpoint: ``source`` itself, or the last one of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if (source / RECORD).is_file():
        if (problem := find_problem(source)) is not None:
            raise CheckpointError(
                f"{source} is not a complete checkpoint: {problem}",
                remedy=f"export the run folder {source.parent} to get its last complete one",
            )
        return source
    latest = latest_checkpoint(source)
    if latest is None:
        raise CheckpointError(
            f"{source} is neither a checkpoint nor a run folder with a complete one",
            remedy="give checkpoint-N, or the output_dir of a run that has saved",
        )
    return latest


def export_checkpoint(source: str | Path, out: str | Path) -> ExportResult:
    """Copy the model of a checkpoint into a new folder that ``from_pretrained`` loads.

    Args:
        source: a checkpoint, or a run folder.
        out: must not exist, or be empty.

    Raises:
        CheckpointError: no complete checkpoint there.
        DamagedCheckpointError: a file is not what was saved, by its digests.
        ConfigError: ``out`` is taken, or cannot be written.
        CapacityError: the disk has no room.
    """
    checkpoint, out = find_checkpoint(Path(source)), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty", remedy="choose a new folder")
    files = sorted(
        file
        for file in checkpoint.iterdir()
        if file.is_file() and file.name not in OWN_FILES and not file.name.startswith("optimizer")
    )
    num_bytes = sum(file.stat().st_size for file in files)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
    except OSError as error:
        raise _not_writable(out, error) from error
    if num_bytes > free:
        raise CapacityError(
            f"the model needs {format_bytes(num_bytes)}, {out.parent} has {format_bytes(free)} "
            "free",
            remedy="free space, or export elsewhere",
        )
    digests = Digests.of(checkpoint)
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
    try:
        temporary.mkdir()
        for file in files:
            copy_checked(file, temporary / file.name, digests)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise CapacityError(
                f"the disk of {out.parent} filled up; {out} was not written",
                remedy="free space, or export elsewhere",
            ) from error
        if not checkpoint.is_dir():  # save_total_limit of a run that goes on
            raise CheckpointError(
                f"{checkpoint} was deleted by its run while it was copied",
                remedy="export again; the run has a later one",
            ) from error
        raise _not_writable(out, error) from error
    except DamagedCheckpointError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return ExportResult(
        checkpoint=checkpoint, folder=out, num_bytes=num_bytes, files=tuple(f.name for f in files)
    )


def export_merged(
    source: str | Path, out: str | Path, *, base: str | Path | None = None
) -> ExportResult:
    """Write the model of a run with adapters, each adapter added to its matrix.

    The result has the run's dtype; host memory holds the model's weights once.

    Args:
        source: a checkpoint, or a run folder.
        out: must not exist, or be empty.
        base: the model the adapters belong to, if it is no longer where the run had it.

    Raises:
        CheckpointError: no complete checkpoint there.
        ConfigError: it has no adapters, the model is not there, or ``out`` is taken.
        CapacityError: the disk has no room.
    """
    map_large_blocks()
    checkpoint, out = find_checkpoint(Path(source)), Path(out)
    if not (checkpoint / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{checkpoint} has no adapters to merge", remedy="leave out --merge: it is whole"
        )
    saved = read_record(checkpoint)["trainer_state"].get("config", {})
    changes = {} if base is None else {"model_name_or_path": str(base)}
    config, _ = resolve(saved | changes)
    tokenizer = load_tokenizer(config)
    spec = take_apart(config, load_model_config(config, tokenizer))
    state = ModelState(spec.units, config.dtype)
    try:
        folder = model_folder(str(config.model_name_or_path))
        load_pretrained(spec, state, folder, gguf_file=config.gguf_file)
        read_adapter(checkpoint, state)
        export_pretrained(spec, state, out, tokenizer)
    finally:
        state.close()
    files = sorted(file for file in out.iterdir() if file.is_file())
    return ExportResult(
        checkpoint=checkpoint,
        folder=out,
        num_bytes=sum(file.stat().st_size for file in files),
        files=tuple(file.name for file in files),
    )


def _not_writable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{out} cannot be written: {error.strerror or error}", remedy="choose another folder"
    )
