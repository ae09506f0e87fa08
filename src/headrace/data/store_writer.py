"""Writing a token store so that a stop at any moment loses little and damages nothing.

Owns the files of a store that is being made. The invariant: ``journal.json`` names lengths of
the files that are on the disk at the end of a whole part; whatever lies behind those lengths is
cut off before anything is appended. A finished folder appears under its name by one rename.
One process writes; another that wants the same store waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.data.rows import TokenChunk

FORMAT = 2
_SYNC_SECONDS = 5.0
_FILES = {"tokens": 4, "labels": 4, "lengths": 8, "months": 4}


@dataclass(kw_only=True)
class Counts:
    """What a store holds so far.

    Attributes:
        parts: whole parts written.
        num_documents: documents.
        num_tokens: tokens.
        num_unsupervised: rows left out because nothing in them is supervised.
        max_token_id: largest id in tokens and labels.
        has_labels: whether some document has labels.
        has_months: whether documents have dates.
    """

    parts: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_unsupervised: int = 0
    max_token_id: int = -1
    has_labels: bool = False
    has_months: bool = False


class StoreWriter:
    """Appends parts to a folder that is not yet a store.

    Args:
        folder: where; what an earlier process left there is gone on with.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts = self._journal()
        self._whole = replace(self.counts)  # at the end of the last part
        self._files: dict[str, IO[bytes]] = {}
        self._synced = time.monotonic()
        sizes = {
            "tokens": self.counts.num_tokens,
            "lengths": self.counts.num_documents,
            "labels": self.counts.num_tokens if self.counts.has_labels else None,
            "months": self.counts.num_documents if self.counts.has_months else None,
        }
        for name, size in sizes.items():
            if size is not None:
                self._open(name, size * _FILES[name])

    def _journal(self) -> Counts:
        try:
            found = Counts(**json.loads((self.folder / "journal.json").read_text()))
            sizes = [
                ("tokens", found.num_tokens * 4),
                ("lengths", found.num_documents * 8),
                ("labels", found.num_tokens * 4 if found.has_labels else 0),
                ("months", found.num_documents * 4 if found.has_months else 0),
            ]
            for name, size in sizes:
                if size and (self.folder / f"{name}.bin").stat().st_size < size:
                    return Counts()
        except (OSError, ValueError, TypeError, RecursionError):
            return Counts()
        return found

    def _open(self, name: str, size: int) -> None:
        path = self.folder / f"{name}.bin"
        path.touch()
        file = path.open("r+b")
        file.truncate(size)
        file.seek(size)
        self._files[name] = file

    def append(self, chunk: TokenChunk) -> None:
        """Write the documents of a chunk."""
        counts = self.counts
        if chunk.labels is not None and not counts.has_labels:
            # Documents before the first one with labels supervise all of their tokens.
            self._files["tokens"].flush()
            shutil.copyfile(self.folder / "tokens.bin", self.folder / "labels.bin")
            self._open("labels", counts.num_tokens * 4)
            counts.has_labels = True
        if chunk.months is not None and not counts.has_months:
            self._open("months", 0)
            counts.has_months = True
        labels = chunk.input_ids if chunk.labels is None else chunk.labels
        self._write("tokens", chunk.input_ids, "<i4")
        self._write("lengths", chunk.lengths, "<i8")
        if counts.has_labels:
            self._write("labels", labels, "<i4")
        if chunk.months is not None:
            self._write("months", chunk.months, "<i4")
        if len(labels):
            largest = max(int(chunk.input_ids.max()), int(labels.max()))
            counts.max_token_id = max(counts.max_token_id, largest)
        counts.num_documents += len(chunk.lengths)
        counts.num_tokens += len(chunk.input_ids)
        counts.num_unsupervised += chunk.num_unsupervised

    def _write(self, name: str, values: Any, dtype: str) -> None:
        self._files[name].write(values.astype(dtype, copy=False).tobytes())

    def part_done(self) -> None:
        """A part is whole; from time to time this becomes durable."""
        self.counts.parts += 1
        self._whole = replace(self.counts)
        if time.monotonic() - self._synced >= _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make the whole parts durable, at any moment, and go on from there after a stop."""
        for file in self._files.values():
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())
        temporary = self.folder / ".journal"
        temporary.write_text(json.dumps(asdict(self._whole)))
        temporary.replace(self.folder / "journal.json")
        self._synced = time.monotonic()

    def finish(self) -> None:
        """Complete the files of the store."""
        self.close()
        lengths = np.fromfile(self.folder / "lengths.bin", "<i8")
        offsets = np.zeros(len(lengths) + 1, "<i8")
        np.cumsum(lengths, out=offsets[1:])
        offsets.tofile(self.folder / "offsets.bin")
        meta = {"format": FORMAT, **asdict(self.counts)}
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=1))
        for name in ("lengths.bin", "journal.json"):
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; what the journal does not hold is lost."""
        for file in self._files.values():
            file.close()


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Hold a folder, made if need be, against other processes; waits for the one that holds it.

    Yields:
        Whether the folder is held; otherwise another process finished with it meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # A file system without locks: two processes there are the user's care.
            if error.errno not in {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}:
                raise
        try:
            held = os.path.samestat(os.fstat(descriptor), folder.stat())
        except FileNotFoundError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def remove_stale(root: Path, seconds: float) -> None:
    """Delete folders of writers that were killed long ago and that nobody holds."""
    for folder in root.glob(".writing-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < seconds:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
