"""Folders that are complete or do not exist under their name: checkpoints and exports.

Owns names, wholeness and replacement: a folder is written under a temporary name, flushed and
renamed. Invariants: a kill at any moment leaves what was there before, or the new folder whole; a
checkpoint that is not complete is never chosen. Knows nothing of what the files hold, but for the
sizes and digests in a checkpoint's record.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import CheckpointError, ConfigError, DamagedCheckpointError
from headrace.folders import list_checkpoints
from headrace.store.digests import DIGESTS, Digests, digest, json_digest, write_digests
from headrace.store.safetensors_io import sync_directory, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FORMAT_VERSION = 1
RECORD = "headrace.json"
_RECORD_KINDS = {"step": int, "optimizer_step": int, "dtype": str, "trainer_state": dict}
_logger = logging.getLogger(__name__)


def read_record(path: Path) -> dict[str, Any]:
    """The JSON record of a checkpoint."""
    record = _parsed_record(path)
    if record.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {record.get('format_version')}, "
            f"this headrace reads {FORMAT_VERSION}",
            remedy="use the version of headrace that wrote it: run.json beside it names that",
        )
    for key, kind in _RECORD_KINDS.items():
        if not isinstance(record.get(key), kind):
            raise DamagedCheckpointError(
                f"{path / RECORD} is damaged: {key} is {record.get(key)!r}", folder=path
            )
    return record


def _parsed_record(path: Path) -> dict[str, Any]:
    """The record, compared with its own digest if it has one."""
    record = dict(json.loads((path / RECORD).read_text()))
    saved = record.pop("digest", None)
    known = record.get("format_version") == FORMAT_VERSION
    if known and saved is not None and saved != json_digest(record):
        raise DamagedCheckpointError(
            f"{path / RECORD} has changed since it was saved: its digest is another one",
            folder=path,
        )
    return record


def write_record(folder: Path, record: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Write digests and the record of a folder that has all its other files.

    Args:
        folder: of the checkpoint.
        record: what the checkpoint says of itself; sizes and digests are added.
        weights: digests of its safetensors files, see :func:`write_digests`.
    """
    whole = {**record, "digests": write_digests(folder, weights), "files": file_sizes(folder)}
    write_json(folder / RECORD, {**whole, "digest": json_digest(whole)})


def find_problem(path: Path) -> str | None:
    """Why a folder is not a complete checkpoint, or None if it is one.

    Looks at everything but the tensors' data, whose digests are compared when they are read.
    """
    try:
        record = _parsed_record(path)
        files = dict(record["files"])
    except DamagedCheckpointError as error:
        return error.message
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{RECORD}: {error}"
    for name, size in files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes of {size}"
    try:
        digests = Digests.of(path)
        if digests is None:
            return None  # of a version that made none
        if digest((path / DIGESTS).read_bytes()) != record.get("digests"):
            return f"{DIGESTS} has changed since it was saved"
    except DamagedCheckpointError as error:
        return error.message
    return digests.find_problem()


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


@contextlib.contextmanager
def new_checkpoint(output_dir: Path, step: int) -> Iterator[Path]:
    """An empty folder that becomes ``output_dir/checkpoint-{step}`` when the block ends well.

    The files in it are flushed first; an existing checkpoint of that step is replaced.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = output_dir / f"checkpoint-{step}"
    temporary = output_dir / f".checkpoint-{step}.writing"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(output_dir)
        temporary.mkdir()
        yield temporary
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


@contextlib.contextmanager
def new_folder(out_dir: Path) -> Iterator[Path]:
    """An empty folder that becomes ``out_dir`` when the block ends well; its files are flushed.

    Raises:
        ConfigError: ``out_dir`` exists and is not empty.
        CheckpointError: the disk is full or not writable.
    """
    refuse_taken(out_dir)
    temporary = out_dir.with_name(f".{out_dir.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _flush(temporary)
        if out_dir.exists():
            out_dir.rmdir()
        temporary.rename(out_dir)
        sync_directory(out_dir.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"could not write {out_dir}: {error.strerror or error}",
            remedy="free space, or choose another folder",
        ) from error
    except CheckpointError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_taken(out_dir: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        ConfigError: naming it.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir} exists and is not empty", remedy="choose a new folder")


def file_sizes(folder: Path) -> dict[str, int]:
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
