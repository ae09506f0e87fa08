"""Audit results to JSON and back.

Owns the two directions between the dataclasses of :mod:`headrace.audit.records` and the file.
The invariant: ``from_dict(to_dict(result)) == result`` for finite numbers, and the same result
always gives the same bytes. It knows no field by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from typing import Any, Literal, TypeVar

from headrace.audit.records import SCHEMA, SCHEMA_VERSION, AuditResult
from headrace.errors import ConfigError, DataError

if typing.TYPE_CHECKING:
    from pathlib import Path

_Record = TypeVar("_Record")
_OURS = "give the JSON that headrace audit wrote"
_AGAIN = "run the audit again with this version of headrace"


def to_dict(record: Any) -> dict[str, Any]:
    """A record as JSON-ready dictionaries; NaN and infinity become ``None``."""
    plain = _plain(record)
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def from_dict(data: dict[str, Any]) -> AuditResult:
    """The inverse of :func:`to_dict`.

    Raises:
        DataError: another schema, a newer version, or a field that is missing or of a wrong kind.
    """
    if data.get("schema") != SCHEMA:
        raise DataError(
            f"not an audit result: schema is {data.get('schema')!r}, not {SCHEMA!r}",
            remedy=_OURS,
        )
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"audit result of schema version {version!r}; this headrace reads {SCHEMA_VERSION}",
            remedy="read it with the headrace that wrote it, or run the audit again",
        )
    return _build(AuditResult, data, "audit")


def _build(cls: type[_Record], data: Any, where: str) -> _Record:
    if not isinstance(data, dict):
        raise DataError(
            f"{where}: expected an object, got {type(data).__name__}",
            remedy=_AGAIN,
        )
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]  # _Record is always a dataclass
        if f.name in data:
            values[f.name] = _convert(hints[f.name], data[f.name], f"{where}.{f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise DataError(
                f"{where}: field {f.name!r} is missing",
                remedy=_AGAIN,
            )
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is types.UnionType:
        if value is None:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise DataError(
                f"{where}: {value!r} is none of {', '.join(map(repr, arguments))}",
                remedy=_AGAIN,
            )
        return value
    if origin is tuple:
        return tuple(_convert(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        return {k: _convert(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint):
        raise DataError(
            f"{where}: expected {hint.__name__}, got {value!r}",
            remedy=_AGAIN,
        )
    return value


def check_writable(path: Path) -> None:
    """That :func:`write_json` can write to ``path``, before minutes are spent on what it writes.

    Raises:
        ConfigError: it is a folder, a device or a pipe (which a rename would replace by a file),
            or its folder cannot be made or written to.
    """
    reason = "is a folder" if path.is_dir() else ""
    if path.exists() and not path.is_dir() and not path.is_file():
        reason = "is a device or a pipe, and results are put in place as a whole; '-' is stdout"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
    if reason or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"{path} {reason or 'cannot be written: no permission'}",
            remedy="name a file in a folder of yours",
        )


def write_json(result: AuditResult, path: Path) -> None:
    """Write ``result`` to ``path``: temporary name, flush, rename.

    Raises:
        ConfigError: it cannot be written: a full disk, a folder that went away; ``path`` is then
            as it was.
    """
    text = json.dumps(to_dict(result), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}",
            remedy="make room, or name a file elsewhere",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> AuditResult:
    """Read what :func:`write_json` wrote.

    Raises:
        DataError: the file is missing, not JSON, or not an audit result of this version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"no audit result at {path}", remedy="check the path, or run headrace audit"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}", remedy=_OURS) from error
    if not isinstance(data, dict):
        raise DataError(
            f"{path} holds {type(data).__name__}, not an audit result",
            remedy=_OURS,
        )
    return from_dict(data)
