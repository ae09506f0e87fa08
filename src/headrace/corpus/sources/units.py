"""Which files a source reads, and how they are cut into units of work.

A unit is what is read, cached and redone as one piece: a byte range of a large plain file,
some row groups of a Parquet file, or a batch of small files. Its key is a hash of contents
and settings, so the invariant holds: same key, same result, on any machine and at any time.
Where batches are cut depends on the file names alone, and adding a file moves few cuts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from headrace.corpus.source_config import BaseSource

UNIT_BYTES = 32 << 20
_PIECES_A_FILE = 16  # of a file smaller than this many units: enough for some cores to share
_SMALLEST = 8  # times smaller than UNIT_BYTES is the least worth a folder of its own
_HASH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One input file: where it is, what it is called in the corpus, and its content's hash."""

    path: Path
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A file, or the range ``[start, stop)`` of it (bytes or row groups; ``stop`` -1: all)."""

    file: InputFile
    start: int = 0
    stop: int = -1

    @property
    def whole(self) -> bool:
        """Whether this is all of the file."""
        return self.start == 0 and self.stop == -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parts that are worked on as one piece, in order."""

    source: str
    parts: tuple[Part, ...]
    num_bytes: int

    def content_key(self) -> str:
        """A hash over what the unit will read."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(
                f"{part.file.name}\0{part.file.sha256}\0{part.start}\0{part.stop}\n".encode()
            )
        return digest.hexdigest()


def glob_expression(pattern: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """A glob (``*``, ``?``, ``**/``, ``{a,b}``) over ``/``-separated paths."""
    out, index = "", 0
    while index < len(pattern):
        if pattern.startswith("**/", index):
            out, index = out + "(?:.*/)?", index + 3
        elif pattern[index] == "*":
            out, index = out + "[^/]*", index + 1
        elif pattern[index] == "?":
            out, index = out + "[^/]", index + 1
        elif pattern[index] == "{" and "}" in pattern[index:]:
            end = pattern.index("}", index)
            choices = "|".join(map(re.escape, pattern[index + 1 : end].split(",")))
            out, index = f"{out}(?:{choices})", end + 1
        else:
            out, index = out + re.escape(pattern[index]), index + 1
    return re.compile(out, re.IGNORECASE if ignore_case else 0)


def resolve_path(given: str) -> Path:
    """A path as given; ``package:NAME/sub`` is a folder inside an installed package.

    Raises:
        ConfigError: no such package or path.
    """
    if given.startswith("package:"):
        package, _, below = given.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"{given}: no installed package {package!r}", remedy=f"pip install {package}"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / below
    else:
        path = Path(given).expanduser()
    if not path.exists():
        raise ConfigError(f"source path {given} does not exist", remedy="check the path")
    return path


def list_files(source: BaseSource, *, excluded: Iterable[Path] = ()) -> list[tuple[str, Path]]:
    """Files of a source as (name, path), sorted by name; no file is listed twice.

    Args:
        source: its paths and pattern.
        excluded: folders that are passed over: a build does not read what it writes.

    Raises:
        ConfigError: a path does not exist.
        DataError: nothing matches.
    """
    matches = _matcher(source)
    found: dict[str, Path] = {}
    seen: set[Path] = set()
    closed = {path.resolve() for path in excluded}
    for given in source.path:
        root = resolve_path(given)
        candidates: Iterable[tuple[str, Path]] = (
            [(_readable(root.name), root)] if root.is_file() else _walk(root, matches, closed)
        )
        for name, path in candidates:
            real = path.resolve()
            if real in seen or not real.is_file():
                continue
            seen.add(real)
            if name in found:  # two roots with the same relative name
                name = f"{given.rstrip('/')}/{name}"  # noqa: PLW2901 - the name it gets instead
            found[name] = path
    if not found:
        raise DataError(
            f"source {source.name!r}: no file matches {source.pattern or source.default_pattern!r} "
            f"below {', '.join(source.path)}",
            remedy="set pattern, or point path at the files",
        )
    return sorted(found.items())


def files_not_matched(source: BaseSource, *, excluded: Iterable[Path] = ()) -> list[str]:
    """Names of files in a source's folders that it does not read; hidden ones do not count."""
    matches = _matcher(source)
    closed = {path.resolve() for path in excluded}
    roots = [root for root in map(resolve_path, source.path) if root.is_dir()]
    return sorted(
        name for root in roots for name, _ in _walk(root, lambda name: not matches(name), closed)
    )


def _matcher(source: BaseSource) -> Callable[[str], bool]:
    """Whether a name is one of the source's; endings of its own accord in either case."""
    if source.pattern is not None:
        given = glob_expression(source.pattern)
        return lambda name: given.fullmatch(name) is not None
    usual = glob_expression(source.default_pattern, ignore_case=True)
    other = glob_expression(source.not_data)
    return lambda name: usual.fullmatch(name) is not None and other.fullmatch(name) is None


def _walk(
    root: Path, matches: Callable[[str], bool], closed: set[Path]
) -> Iterator[tuple[str, Path]]:
    for folder, names, files in os.walk(root, followlinks=False):
        names[:] = sorted(
            name
            for name in names
            if not name.startswith(".") and Path(folder, name).resolve() not in closed
        )
        for file in sorted(files):
            path = Path(folder, file)
            name = path.relative_to(root).as_posix()
            if not file.startswith(".") and matches(name):
                yield _readable(name), path


def _readable(name: str) -> str:
    """A file name as text: bytes that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class FileHashes:
    """SHA-256 of files, remembered by path, size and change time between runs.

    A file's change time (ctime) cannot be set back by ordinary means, so an edited file is
    hashed again.
    """

    def __init__(self, memory: Path) -> None:
        """Read what an earlier run remembered, if that file is whole."""
        self._memory = memory
        self._known: dict[str, list[int | str]] = {}
        try:
            loaded = json.loads(memory.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            loaded = {}
        if isinstance(loaded, dict):
            self._known = loaded

    def describe_all(self, files: Iterable[tuple[str, Path]]) -> list[InputFile]:
        """All files with their hashes, in order; hashing leaves the interpreter's lock.

        Raises:
            DataError: a file cannot be read.
        """
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(lambda item: self.describe(*item), files))

    def describe(self, name: str, path: Path) -> InputFile:
        """The file with its hash.

        Raises:
            DataError: it cannot be read.
        """
        try:
            return self._describe(name, path)
        except OSError as error:
            raise DataError(
                f"input file {path} cannot be read: {error}",
                remedy="give read permission, or leave the file out with pattern",
            ) from error

    def _describe(self, name: str, path: Path) -> InputFile:
        status = path.stat()
        stamp: list[int | str] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        key = str(path.resolve())
        known = self._known.get(key)
        if known is None or known[:3] != stamp:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while piece := file.read(_HASH_BYTES):
                    digest.update(piece)
            known = [*stamp, digest.hexdigest()]
            self._known[key] = known
        return InputFile(path=path, name=name, num_bytes=status.st_size, sha256=str(known[3]))

    def save(self) -> None:
        """Remember for the next run; losing this costs time only."""
        temporary = self._memory.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._known), encoding="utf-8")
        temporary.replace(self._memory)


Splitter = Callable[[InputFile], Iterable[tuple[int, int, int]]]
"""A file to ranges ``(start, stop, num_bytes)``."""


def plan_units(source: BaseSource, files: Iterable[InputFile], split: Splitter) -> list[Unit]:
    """Units of one source, in the order of its files."""
    units: list[Unit] = []
    batch: list[Part] = []
    batch_bytes = 0

    def close() -> None:
        nonlocal batch_bytes
        if batch:
            units.append(Unit(source=source.name, parts=tuple(batch), num_bytes=batch_bytes))
            batch.clear()
            batch_bytes = 0

    for file in files:
        ranges = list(split(file))
        if len(ranges) > 1 or file.num_bytes >= UNIT_BYTES:
            close()
            units += [
                Unit(
                    source=source.name,
                    parts=(Part(file=file, start=start, stop=stop),),
                    num_bytes=num_bytes,
                )
                for start, stop, num_bytes in ranges
            ]
            continue
        batch.append(Part(file=file))
        batch_bytes += file.num_bytes
        # A cut that depends on the name where it falls: a file added elsewhere leaves it there.
        cut_here = hashlib.sha256(file.name.encode(errors="surrogateescape")).digest()[0] % 8 == 0
        if batch_bytes >= UNIT_BYTES or (batch_bytes >= UNIT_BYTES // _SMALLEST and cut_here):
            close()
    close()
    return units


def unit_bytes(num_bytes: int) -> int:
    """The size of the units that a file of ``num_bytes`` is cut into.

    It depends on the file alone: adding a file changes no other file's units.
    """
    return max(UNIT_BYTES // _SMALLEST, min(UNIT_BYTES, num_bytes // _PIECES_A_FILE))


def byte_ranges(num_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of about :func:`unit_bytes` for a file that can be read from any byte."""
    count = max(1, round(num_bytes / unit_bytes(num_bytes)))
    if count == 1:
        yield 0, -1, num_bytes
        return
    for index in range(count):
        start, stop = num_bytes * index // count, num_bytes * (index + 1) // count
        yield start, stop, stop - start
