"""What of a work directory is done: steps that are skipped, resumed or run again.

The invariant: a step counts as done only if it ended and everything it depends on, settings
and earlier steps alike, is what it was then. Killing the program at any moment costs at most
the work of the step it was in. Knows nothing of what the steps do.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

import headrace
from headrace.errors import ConfigError
from headrace.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Self

_FOLDER = ".steps"


class Ledger:
    """Runs named steps in order and remembers them in ``folder``; a context manager.

    Args:
        folder: the work directory, created when absent.
        num_steps: how many there will be, for the progress shown.
        say: where a line of progress goes.
    """

    def __init__(self, folder: Path, *, num_steps: int, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._marks = folder / _FOLDER
        self._num_steps = num_steps
        self._say = say
        self._digests: dict[str, str] = {}
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Open or create the work directory and lock it.

        Raises:
            ConfigError: it holds other files, cannot be written, or another run is in it.
        """
        folder = self._folder
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file", remedy="choose another --output-dir")
        if folder.is_dir() and not self._marks.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} holds files that are not of an earlier quickstart",
                remedy="choose an empty or new --output-dir",
            )
        try:
            self._marks.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._marks / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {folder}: {error.strerror}", remedy="choose another --output-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise ConfigError(
                f"another quickstart is running in {folder}", remedy="wait for it to end"
            ) from None
        return self

    def __exit__(self, *_exception: object) -> None:
        """Let the next run in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def step(
        self,
        name: str,
        title: str,
        action: Callable[[bool], None],
        *,
        settings: Mapping[str, Any],
        after: tuple[str, ...] = (),
        always: bool = False,
    ) -> None:
        """Run ``action`` unless it is done.

        Args:
            name: of the step, unique.
            title: shown.
            action: does the work; told whether the same work was begun before and may go on.
            settings: everything that shapes the result, as JSON types.
            after: earlier steps that it reads from.
            always: run it even if it is done; for steps that cost nothing.
        """
        assert name not in self._digests
        key = {
            "headrace": headrace.__version__,
            "settings": dict(settings),
            "after": {step: self._digests[step] for step in after},
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        number = len(self._digests) + 1
        self._digests[name] = digest
        mark = self._read(name)
        same = mark.get("digest") == digest
        if same and mark.get("done") and not always:
            self._say(f"[{number}/{self._num_steps}] {title}: done before")
            return
        self._say(f"[{number}/{self._num_steps}] {title}")
        self._write(name, {"digest": digest, "done": False})
        started = time.monotonic()
        action(same)
        seconds = time.monotonic() - started
        self._write(name, {"digest": digest, "done": True, "seconds": round(seconds, 3)})
        self._say(f"      {format_duration(seconds)}")

    def seconds(self) -> dict[str, float]:
        """Time each step took when it ran, by name."""
        return {name: float(self._read(name).get("seconds", 0.0)) for name in self._digests}

    def _read(self, name: str) -> dict[str, Any]:
        try:
            mark = json.loads((self._marks / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) else {}

    def _write(self, name: str, mark: dict[str, Any]) -> None:
        path = self._marks / f"{name}.json"
        partial = path.with_name(f".{name}.writing")
        partial.write_text(json.dumps(mark), encoding="utf-8")
        partial.replace(path)
