"""Writing so that a kill at any moment leaves either the old state or the new one.

Files and folders are written under temporary names beside their place, flushed to the disk,
and renamed. This module knows nothing of what is in them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TEMPORARY = ".tmp-"
COMPLETE = "complete.json"
"""Sizes of a folder's files, written last: its presence says that the folder is whole."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and fixed separators: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def hash_of(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Flush every file and folder below ``root``."""
    for folder, _, names in os.walk(root):
        for name in names:
            sync_file(Path(folder, name))
        sync_file(Path(folder))


def write_text(path: Path, text: str) -> None:
    """A whole file or none."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    sync_file(temporary)
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """An indented JSON file, whole or none; keys keep their order."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def whole_folder(place: Path) -> Iterator[Path]:
    """A folder to fill; it takes its place when the block ends well, and vanishes otherwise.

    A record of the files' sizes is added (:data:`COMPLETE`, :func:`is_whole`).
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f"{_TEMPORARY}{place.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        sizes = {
            path.relative_to(temporary).as_posix(): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        (temporary / COMPLETE).write_text(json.dumps(sizes), encoding="utf-8")
        sync_tree(temporary)
        if is_whole(place):  # somebody else was faster; pieces of one name are alike
            shutil.rmtree(temporary)
            return
        if place.exists():
            shutil.rmtree(place)
        temporary.rename(place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_file(place.parent)


def is_whole(place: Path) -> bool:
    """Whether a folder of :func:`whole_folder` is there with all its files at their sizes."""
    try:
        sizes: Mapping[str, int] = json.loads((place / COMPLETE).read_text("utf-8"))
        return all((place / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def remove_temporaries(root: Path) -> None:
    """Remove what killed runs left half-written below ``root`` (one level of folders)."""
    if not root.is_dir():
        return
    for folder in (root, *(path for path in root.iterdir() if path.is_dir())):
        for path in list(folder.glob(f"{_TEMPORARY}*")):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def put_in_place(built: Path, place: Path) -> None:
    """Move a finished folder to its place in one step, whatever stood there before.

    The old folder is exchanged with the new one (``renameat2``), then removed. Where the
    file system cannot exchange, two renames follow each other.
    """
    sync_tree(built)
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        built.rename(place)
    elif _exchange(built, place):
        shutil.rmtree(built)
    else:
        old = place.with_name(f"{_TEMPORARY}{place.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
        built.rename(place)
        shutil.rmtree(old)
    sync_file(place.parent)


def _exchange(first: Path, second: Path) -> bool:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    failed = library.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in {errno.ENOSYS, errno.EINVAL}:
        return False
    raise OSError(number, os.strerror(number), str(second))


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for an immutable file, or a copy where links are not possible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process.

    Raises:
        ConfigError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another build is using {folder}",
                remedy="wait for it, or give this one its own output_dir",
            ) from error
        yield
