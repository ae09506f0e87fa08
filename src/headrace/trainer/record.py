"""``run.json``: what a run was, on what, and how it ended.

The invariant: the file is whole at every moment (written aside and renamed), each start of the
run adds one session, and a session that never said how it ended was killed. Holds no figure that
``metrics.jsonl`` holds by step.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import headrace

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_FORMAT = 1
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pydantic")


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"headrace": headrace.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = importlib.metadata.version(name)
    return found


def host() -> dict[str, Any]:
    """The processors and memory of this machine, as JSON types."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - not a user's file
            model = next(line.split(":", 1)[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return {
        "cpu": model,
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """What the run is on, as JSON types."""
    gpu = None
    if device.type == "cuda":
        import torch  # noqa: PLC0415 - a plan compares hosts without it

        gpu = torch.cuda.get_device_name(device)
    return {**host(), "device": str(device), "gpu": gpu}


def model_hash(checkpoint: Path) -> str:
    """SHA-256 over the weight files of a checkpoint, in order of their names."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*model*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunRecord:
    """The record of one run over all of its sessions.

    Args:
        path: ``run.json``.
        facts: what does not change while it runs, as JSON types.
        first_step: steps done when this session began; 0 forgets earlier sessions.
        resumed_from: the checkpoint it goes on from.
    """

    def __init__(
        self, path: Path, facts: dict[str, Any], *, first_step: int, resumed_from: str | None
    ) -> None:
        self._path = path
        self._began = time.monotonic()
        earlier = self._earlier_sessions() if resumed_from else []
        self._session: dict[str, Any] = {
            "started_at": _now(),
            "first_step": first_step,
            "resumed_from": resumed_from,
            "outcome": None,
        }
        self._values: dict[str, Any] = {
            "format_version": _FORMAT,
            **facts,
            "sessions": [*earlier, self._session],
        }
        self.update(last_step=first_step)

    def _earlier_sessions(self) -> list[dict[str, Any]]:
        try:
            sessions = list(json.loads(self._path.read_text(encoding="utf-8"))["sessions"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        return [session for session in sessions if isinstance(session, dict)]

    def update(self, *, last_step: int, **values: Any) -> None:
        """Write how far the run is, with further top-level ``values``."""
        self._session["last_step"] = last_step
        self._session["seconds"] = round(time.monotonic() - self._began, 3)
        self._values |= values
        self._values["peak_rss_bytes"] = peak_rss_bytes()
        self._values["seconds"] = sum(s.get("seconds", 0.0) for s in self._values["sessions"])
        temporary = self._path.with_name(f".{self._path.name}.writing")
        try:
            temporary.write_text(json.dumps(self._values, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def end(self, outcome: str, *, last_step: int, **values: Any) -> None:
        """Write how the session ended: ``finished``, ``stopped`` or ``failed``."""
        self._session["outcome"] = outcome
        self._session["ended_at"] = _now()
        self.update(last_step=last_step, status=outcome, **values)
