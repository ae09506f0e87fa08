"""Where a run goes on: the choice of a checkpoint and what must be as it was.

The invariant: a run goes on only from a complete checkpoint, with the same data in the same
order; anything else that changed is said. What a checkpoint holds of the trainer is JSON. Does
not read weights.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from headrace.data.sampler import LoaderState
from headrace.errors import CapacityError, CheckpointError, ConfigError
from headrace.store.checkpoint import (
    RECORD,
    find_problem,
    latest_checkpoint,
    list_checkpoints,
    read_record,
)
from headrace.trainer.metrics import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from headrace.errors import DamagedCheckpointError
    from headrace.trainer.config import TrainConfig

_FORMAT = 1

# Keys that say where a run is kept or shown, not what it computes.
_INCIDENTAL = frozenset(
    {
        "output_dir", "overwrite_output_dir", "run_name", "resume_from_checkpoint", "requeue",
        "report_to", "progress", "logging_steps", "save_steps", "save_strategy",
        "save_total_limit", "data_cache_dir", "eval_steps", "eval_strategy", "eval_datasets",
        "per_device_eval_batch_size", "async_save", "async_save_memory",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The trainer's part of a checkpoint.

    Attributes:
        step: optimizer steps done.
        loader: where the data stands.
        meter: sums of :class:`~headrace.trainer.metrics.Meter`.
        data: what the loader's ``fingerprint`` said of the data.
        config: the resolved configuration.
        callbacks: state that callbacks exported.
        best_metric: lowest evaluation loss so far.
        evaluation_due: an evaluation of this step was left to the session that goes on.
        converted: it comes from another trainer, and only ``step`` is known.
    """

    step: int
    loader: LoaderState
    meter: dict[str, Any]
    data: dict[str, Any]
    config: dict[str, Any]
    callbacks: dict[str, Any] = field(default_factory=dict)
    best_metric: float | None = None
    evaluation_due: bool = False
    converted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, saved: dict[str, Any], path: Path) -> Progress:
        """Restore what :meth:`to_dict` gave.

        Raises:
            CheckpointError: it was written by another version of the trainer, or by none.
        """
        values = dict(saved)
        found = values.pop("format", None)
        if found != _FORMAT:
            raise CheckpointError(
                f"{path} holds a trainer state of format {found}, this version reads {_FORMAT}",
                remedy="start from its weights: model_name_or_path, without resume_from_checkpoint",
            )
        try:
            if values.get("converted"):
                return cls(
                    step=int(values["step"]),
                    loader=LoaderState(seed=0),
                    meter=Meter().to_dict(),
                    data={},
                    config={},
                    converted=True,
                )
            values["loader"] = LoaderState(**values["loader"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the trainer state of {path} is damaged ({error})",
                remedy="start from its weights: model_name_or_path, without resume_from_checkpoint",
            ) from error


def converted_state(step: int) -> dict[str, Any]:
    """The trainer's part of a checkpoint that another trainer began."""
    return {"format": _FORMAT, "converted": True, "step": step}


def choose_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint a run starts from, or ``None`` for a new run.

    Raises:
        CheckpointError: the path given is no complete checkpoint, or none that is there is one.
        ConfigError: a new run would mix with the checkpoints of an earlier one.
    """
    wanted = config.resume_from_checkpoint
    if wanted == "auto":
        found = latest_checkpoint(config.output_dir)
        if found is None:
            _refuse_forgetting(list_checkpoints(config.output_dir), config)
        return found
    if isinstance(wanted, str):
        path = Path(wanted).expanduser()
        if (problem := find_problem(path)) is not None:
            weights = sorted(path.glob("model*.safetensors")) and not (path / RECORD).is_file()
            raise CheckpointError(
                f"resume_from_checkpoint: {path} is not a complete checkpoint ({problem})",
                remedy="to start from its weights alone, give it as model_name_or_path"
                if weights
                else "resume_from_checkpoint: auto takes the last complete one of output_dir",
            )
        _refuse_mixing(foreign_checkpoints(config.output_dir, path), config)
        return path
    _refuse_mixing(foreign_checkpoints(config.output_dir, None), config)
    return None


def set_aside(config: TrainConfig, error: DamagedCheckpointError) -> str:
    """Rename a damaged checkpoint that ``auto`` has chosen; the next choice is the one before it.

    Returns:
        What was done, for people.

    Raises:
        DamagedCheckpointError: ``error``, when another folder was damaged or no other checkpoint is
            whole; nothing was renamed.
    """
    damaged = error.folder
    others = [path for path in list_checkpoints(config.output_dir) if path != damaged]
    if (
        config.resume_from_checkpoint != "auto"
        or damaged.parent.resolve() != config.output_dir.resolve()
        or all(find_problem(path) is not None for path in others)
    ):
        raise error
    name = f"{damaged.name}.damaged"
    taken = len(list(damaged.parent.glob(f"{name}*")))
    kept = damaged.with_name(f"{name}-{taken + 1}" if taken else name)
    with writable(config.output_dir):
        damaged.rename(kept)
    return (
        f"checkpoint: {error.message}; {damaged.name} is now {kept.name}, and the run goes on from "
        "the checkpoint before it"
    )


def _refuse_mixing(others: list[Path], config: TrainConfig) -> None:
    """Refuse to put this run's checkpoints beside ``others``: a later resume would mix them."""
    if others and not config.overwrite_output_dir:
        raise ConfigError(
            f"{config.output_dir} holds {others[-1].name} of an earlier run",
            remedy="resume_from_checkpoint=auto goes on with it, overwrite_output_dir=true deletes "
            "it, another output_dir keeps both",
        )


def _refuse_forgetting(others: list[Path], config: TrainConfig) -> None:
    """Refuse to begin anew where every checkpoint of an earlier run is damaged."""
    if others and not config.overwrite_output_dir:
        raise CheckpointError(
            f"resume_from_checkpoint: auto finds no whole checkpoint in {config.output_dir}; "
            f"{others[-1].name}: {find_problem(others[-1])}",
            remedy="restore it from a copy; overwrite_output_dir=true deletes it and begins anew",
        )


def read_step(checkpoint: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(checkpoint.name.rpartition("-")[2])


def foreign_checkpoints(output_dir: Path, checkpoint: Path | None) -> list[Path]:
    """Checkpoints of ``output_dir`` that a run going on from ``checkpoint`` must not leave there.

    They are those of later steps, and all of them when the run begins anew or elsewhere.
    """
    others = list_checkpoints(output_dir)
    if checkpoint is None or checkpoint.resolve().parent != output_dir.resolve():
        return others
    return [other for other in others if read_step(other) > read_step(checkpoint)]


def read_progress(path: Path, *, dtype: str) -> Progress:
    """The trainer's part of a complete checkpoint.

    Raises:
        CheckpointError: another format, or weights of another ``dtype``.
    """
    record = read_record(path)
    if record["dtype"] != dtype:
        raise CheckpointError(
            f"{path} was saved with dtype {record['dtype']}, this run has {dtype}",
            remedy=f"dtype: {record['dtype']}",
        )
    return Progress.from_dict(record["trainer_state"], path)


def check_data(progress: Progress, data: dict[str, Any], path: Path) -> None:
    """Refuse to go on with other data than the checkpoint's.

    Raises:
        ConfigError: naming what differs.
    """
    if progress.data == data:
        return
    saved, now = progress.data, data
    differing = [key for key in ("seed", "shuffle") if saved[key] != now[key]]
    for number, (a, b) in enumerate(zip(saved["datasets"], now["datasets"], strict=False)):
        differing += [
            {
                "key": f"contents of datasets.{number}",
                "rows": "max_length or packing",
                "subset": "val_set_size",
            }.get(name, f"{name} of datasets.{number}")
            for name in a
            if a[name] != b.get(name)
        ]
    if len(saved["datasets"]) != len(now["datasets"]):
        differing.append("number of datasets")
    raise ConfigError(
        f"{path} was trained on other data; what differs: {', '.join(differing)}",
        remedy="restore the data and its settings, or start a new run from these weights: "
        f"model_name_or_path={path} and another output_dir",
    )


def changed_settings(progress: Progress, config: TrainConfig) -> list[str]:
    """Settings that differ from the checkpoint's and change what is computed, for people."""
    before = {key: value for key, value in progress.config.items() if key not in _INCIDENTAL}
    now = {key: value for key, value in config.to_dict().items() if key not in _INCIDENTAL}
    return list(differences(before, now))


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """``key: old -> new`` for every leaf that differs, dotted as on the command line."""
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        inner = f"{where}." if where else ""
        for key in {**now, **before}:
            yield from differences(before.get(key), now.get(key), f"{inner}{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{where}.{number}")
    else:
        yield f"{where}: {before} -> {now}"


@contextlib.contextmanager
def disk_full_told(output_dir: Path) -> Iterator[None]:
    """Say of a full disk which one it is.

    Raises:
        CapacityError: the disk of ``output_dir`` is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        inside = f" ({error.filename})" if error.filename else ""
        raise CapacityError(
            f"the disk of output_dir {output_dir} is full{inside}",
            remedy="free space, or choose another output_dir; resume_from_checkpoint: auto goes on "
            "from the last checkpoint",
        ) from error


@contextlib.contextmanager
def writable(output_dir: Path) -> Iterator[None]:
    """Say of an ``output_dir`` what makes it unusable.

    Raises:
        CapacityError: its disk is full.
        ConfigError: it, or a file of a run in it, cannot be written.
    """
    try:
        with disk_full_told(output_dir):
            yield
    except OSError as error:
        place = error.filename2 or error.filename
        inside = "" if place in (None, str(output_dir)) else f" ({place})"
        raise ConfigError(
            f"output_dir {output_dir} cannot be written: {error.strerror}{inside}",
            remedy="choose a folder, new or of an earlier run, that can be written",
        ) from error


class RunLock:
    """Keeps two processes out of one output folder; the kernel lets go when a process ends."""

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / ".lock"
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        with writable(self._path.parent):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise ConfigError(
                f"another process is training into {self._path.parent}",
                remedy="wait for it, or choose another output_dir",
            ) from error
        except OSError:
            pass  # a file system without locks; two processes there are the user's care
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
