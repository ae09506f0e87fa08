"""The exception tree: every error a user can cause or meet.

::

    HeadraceError            exit 1   anything headrace reports on purpose
    ├── ConfigError          exit 2   a setting, key, path or argument is wrong
    ├── DataError            exit 2   input rows, documents or panels are unusable
    ├── ModelRefusedError    exit 2   the model cannot be trained exactly
    ├── CapacityError        exit 3   the plan needs more memory or disk than there is
    ├── CheckpointError      exit 1   a checkpoint is missing, partial or inconsistent
    │   └── DamagedCheckpointError    its contents are not what was saved
    ├── NumericsError        exit 1   training diverged beyond what skipping a step repairs
    ├── LaneError            exit 1   a transfer or update lane failed in the middle of a step
    └── RankError            exit 1   another process of the run failed, left, or was never met

Every message says what was given, the limit, the reason and the remedy. A broken
invariant is an ``assert``, never one of these.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from headrace.interrupts import end_of

if TYPE_CHECKING:
    from pathlib import Path

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_WILL_NOT_FIT = 3
EXIT_REQUEUE = 75

_ANOTHER_MODEL = (
    "take a family that docs/models.md lists; headrace doctor --model FOLDER examines any other"
)


class HeadraceError(Exception):
    """Base class. ``exit_code`` is what the command line returns for it.

    Attributes:
        said: another process of the run tells people, once for all of them.
    """

    exit_code = EXIT_FAILED
    said = False

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        """Build from what was given, the limit and the reason (``message``) and a ``remedy``."""
        super().__init__(message if remedy is None else f"{message}\n  remedy: {remedy}")
        self.message = message
        self.remedy = remedy


class ConfigError(HeadraceError):
    """A setting, key, path or argument is wrong."""

    exit_code = EXIT_USAGE


class DataError(HeadraceError):
    """Input rows, documents or panels are unusable; the message names them."""

    exit_code = EXIT_USAGE


class ModelRefusedError(HeadraceError):
    """The model cannot be trained exactly by the streamed step."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, remedy: str = _ANOTHER_MODEL) -> None:
        """Build from what of the model cannot be; most often only another one helps."""
        super().__init__(message, remedy=remedy)


class CapacityError(HeadraceError):
    """The plan needs more memory or disk than there is; the message holds the arithmetic."""

    exit_code = EXIT_WILL_NOT_FIT


class CheckpointError(HeadraceError):
    """A checkpoint is missing, partial or inconsistent."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's contents are not what was saved; ``folder`` is the checkpoint's."""

    def __init__(self, message: str, *, folder: Path) -> None:
        """Build from what is wrong and where; the remedy is the same for all."""
        super().__init__(message, remedy="resume from an earlier checkpoint, or copy it again")
        self.folder = folder


class NumericsError(HeadraceError):
    """Training diverged beyond what skipping a step repairs."""


class LaneError(HeadraceError):
    """A transfer or update lane failed in the middle of a step."""


class RankError(HeadraceError):
    """Another process of the run failed, left, or was never met."""


def is_full_disk(error: BaseException) -> bool:
    """Whether the system says that a disk, or a share of it, is full."""
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of a device ran out; torch says so in a RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def exit_code_of(error: BaseException) -> int:
    """What a process returns that ends with an error, of whatever kind."""
    if isinstance(error, HeadraceError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return end_of(error)[1]
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return EXIT_WILL_NOT_FIT if is_full_disk(error) or is_out_of_memory(error) else EXIT_FAILED
