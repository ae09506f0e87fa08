"""Announcing every operation of this process that changes a disk, so that a test can stop there."""

import builtins
import io
import os

NAMES = ("fsync", "mkdir", "rename", "rmdir", "unlink")


class AnnouncingFile:
    """A file that calls ``announce`` before, and in the middle of, each write."""

    def __init__(self, file, announce):
        self._file = file
        self._announce = announce

    def write(self, data):
        """Write in two halves, an announcement before each."""
        self._announce("write")
        half = len(data) // 2
        if isinstance(data, memoryview | bytes | str) and half:
            self._file.write(data[:half])
            self._file.flush()
            self._announce("half-write")
            self._file.write(data[half:])
        else:
            self._file.write(data)
        return len(data)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)


def announce_operations(announce, *, setattr=setattr):  # noqa: A002 - monkeypatch.setattr fits here
    """Call ``announce(name)`` before every write, flush, rename, creation and removal.

    ``setattr`` does the replacing: pass pytest's to have it undone.
    """
    original_open = io.open

    def opening(file, mode="r", *args, **kwargs):
        if not set(mode) & set("wax+"):
            return original_open(file, mode, *args, **kwargs)
        announce("open")
        return AnnouncingFile(original_open(file, mode, *args, **kwargs), announce)

    setattr(io, "open", opening)
    setattr(builtins, "open", opening)
    for name in NAMES:
        original = getattr(os, name)

        def call(*args, original=original, name=name, **kwargs):
            announce(name)
            return original(*args, **kwargs)

        setattr(os, name, call)
