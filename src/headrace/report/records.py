"""Reading result records: corpus manifests, training runs and audits, as they lie on disk.

A :class:`Node` is one JSON object that knows where it came from, so a missing or mistyped
field is an error that names file and path, never a traceback. The report reads records by
their published schema and imports nothing of what wrote them. It computes no statistic.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AUDIT_SCHEMA, AUDIT_SCHEMA_VERSION = "headrace.audit", 1
CORPUS_FORMAT, CORPUS_VERSION = "headrace-corpus", 1

_REWRITE = "write it again with this version of headrace"


class Node:
    """One JSON object and its path. Keys that nobody asks for are ignored."""

    def __init__(self, data: Any, where: str) -> None:
        """Wrap ``data``, which must be an object; ``where`` is how errors name it."""
        if not isinstance(data, dict):
            raise DataError(f"{where}: expected an object, got {_kind(data)}", remedy=_REWRITE)
        self._data: dict[str, Any] = data
        self.where = where

    def __contains__(self, key: str) -> bool:
        """Whether ``key`` is there with a value other than null."""
        return self._data.get(key) is not None

    def names(self) -> list[str]:
        """Names of the fields, in file order."""
        return list(self._data)

    def raw(self, key: str) -> Any:
        """The value as parsed, ``None`` when absent."""
        return self._data.get(key)

    def _require(self, key: str) -> Any:
        if key not in self._data:
            raise DataError(f"{self.where}: field {key!r} is missing", remedy=_REWRITE)
        return self._data[key]

    def _wrong(self, key: str, value: Any, wanted: str) -> DataError:
        return DataError(
            f"{self.where}.{key}: expected {wanted}, got {_kind(value)}", remedy=_REWRITE
        )

    def text(self, key: str, default: str | None = None) -> str:
        """A string; without ``default`` it must be there."""
        value = self._require(key) if default is None else self._data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def number(self, key: str) -> float | None:
        """A finite number, or ``None`` when absent, null or not finite."""
        value = self._data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, value, "a number")
        return float(value) if math.isfinite(value) else None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; without ``default`` it must be there."""
        value = self._require(key) if default is None else self._data.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "a whole number")
        return value

    def values(self, key: str) -> list[Any]:
        """A list, empty when absent."""
        value = self._data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings, empty when absent."""
        values = self.values(key)
        for value in values:
            if not isinstance(value, str):
                raise self._wrong(key, value, "a list of texts")
        return values

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers, empty when absent; others are dropped."""
        values = self.values(key)
        for value in values:
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise self._wrong(key, value, "a list of numbers")
        return [float(value) for value in values if value is not None and math.isfinite(value)]

    def child(self, key: str) -> Node:
        """The object under ``key``, which must be there."""
        return Node(self._require(key), f"{self.where}.{key}")

    def maybe(self, key: str) -> Node | None:
        """The object under ``key``, ``None`` when absent or null."""
        return self.child(key) if key in self else None

    def children(self, key: str) -> list[Node]:
        """A list of objects, empty when absent."""
        return [
            Node(value, f"{self.where}.{key}[{index}]")
            for index, value in enumerate(self.values(key))
        ]

    def items(self, key: str) -> Iterator[tuple[str, Node]]:
        """Named objects under ``key``, none when absent."""
        if key not in self:
            return
        inner = self.child(key)
        for name, value in inner._data.items():  # noqa: SLF001 (same class)
            yield name, Node(value, f"{inner.where}.{name}")


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file the report was made from; its hash ties the report to it."""

    kind: str
    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: ``run.json`` and the logged steps of ``metrics.jsonl``."""

    name: str
    record: Node
    metrics: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus folder: the manifests of its vintages, earliest cutoff first, by name."""

    name: str
    vintages: tuple[tuple[str, Node], ...]


def read_object(path: Path, kind: str) -> tuple[Node, Source]:
    """A JSON object and its provenance.

    Raises:
        ConfigError: no such file.
        DataError: not a JSON object.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"no {kind} at {path}", remedy="check the path") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the {kind} at {path}: {error.strerror}", remedy="make it readable"
        ) from None
    try:
        data = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"the {kind} at {path} is not JSON: {error}", remedy=_REWRITE) from None
    return Node(data, path.name), Source(
        kind=kind, path=str(path), sha256=hashlib.sha256(raw).hexdigest()
    )


def read_audit(path: Path) -> tuple[Node, Source]:
    """An audit record of the version this report knows.

    Raises:
        DataError: another schema or version.
    """
    node, source = read_object(path, "audit record")
    schema, version = node.raw("schema"), node.raw("schema_version")
    if schema != AUDIT_SCHEMA or version != AUDIT_SCHEMA_VERSION:
        raise DataError(
            f"{path} is {schema!r} version {version!r}; this report reads {AUDIT_SCHEMA!r} "
            f"version {AUDIT_SCHEMA_VERSION}",
            remedy="run the audit again with this version of headrace"
            if schema == AUDIT_SCHEMA
            else "give the file that headrace audit wrote with --json",
        )
    return node, source


def read_corpus(folder: Path) -> tuple[Corpus, list[Source]]:
    """The manifest of a corpus folder, and those of its vintages where it has several.

    Raises:
        DataError: another format, or a version that this report does not know.
    """
    node, source = _read_manifest(folder)
    name = folder.resolve().name
    if "vintages" not in node:
        return Corpus(name=name, vintages=((name, node),)), [source]
    vintages, sources = [], [source]
    for vintage in node.children("vintages"):
        path = vintage.text("path")
        inner, source = _read_manifest(folder / path)
        vintages.append((path, inner))
        sources.append(source)
    return Corpus(name=name, vintages=tuple(vintages)), sources


def _read_manifest(folder: Path) -> tuple[Node, Source]:
    path = folder / "manifest.json"
    node, source = read_object(path, "corpus manifest")
    if node.raw("format") != CORPUS_FORMAT or node.raw("version") != CORPUS_VERSION:
        raise DataError(
            f"{path} is {node.raw('format')!r} version {node.raw('version')!r}; this report reads "
            f"{CORPUS_FORMAT!r} version {CORPUS_VERSION}",
            remedy="build the corpus again with this version of headrace",
        )
    return node, source


def read_run(folder: Path) -> tuple[Run, list[Source]]:
    """A run folder. The metrics' last line may be half written; other bad lines are errors."""
    record, source = read_object(folder / "run.json", "training run")
    path = folder / "metrics.jsonl"
    metrics: list[Node] = []
    sources = [source]
    if path.is_file():
        raw = path.read_bytes()
        sources.append(
            Source(kind="training metrics", path=str(path), sha256=hashlib.sha256(raw).hexdigest())
        )
        lines = raw.decode("utf-8", errors="replace").splitlines()
        for index, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                metrics.append(Node(json.loads(line), f"{path.name}:{index + 1}"))
            except json.JSONDecodeError as error:
                if index == len(lines) - 1:
                    break
                raise DataError(
                    f"{path}, line {index + 1} is not JSON: {error}", remedy=_REWRITE
                ) from None
    name = folder.resolve().name
    return Run(name=name, record=record, metrics=tuple(metrics)), sources
