"""Turning a YAML file and ``key=value`` words into a checked model, with useful refusals.

An unknown key is an error that names the nearest known one. This module knows pydantic's
errors and nothing about corpora.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.errors import ConfigError

if typing.TYPE_CHECKING:
    from pathlib import Path


class Settings(BaseModel):
    """Base of every configuration model: frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=False)


_Model = TypeVar("_Model", bound=Settings)


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping.

    Raises:
        ConfigError: missing, unreadable or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {path}", remedy="check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {path} cannot be read: {error}",
            remedy="make it readable, and save it as UTF-8 text",
        ) from error
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", remedy="correct that line") from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{path} holds no mapping of keys to values", remedy="write key: value lines"
        )
    return dict(loaded)


def apply_overrides(values: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Set ``a.b=value`` words; values are read as YAML, list items by their index.

    Raises:
        ConfigError: a word without ``=``, or a path through something that has no keys.
    """
    result: dict[str, Any] = _copied(values)
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not key=value", remedy="write cutoff=2017-06-30")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"the value of {word!r} is not YAML: {error}", remedy="quote it"
            ) from error
        _set(result, key.split("."), value, word)
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


def _set(container: Any, path: list[str], value: Any, word: str) -> None:
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(container, list):
            if not key.isdecimal() or int(key) >= len(container):
                raise ConfigError(
                    f"{word!r}: {key!r} is not an index below {len(container)}",
                    remedy="count from 0, or set the list whole",
                )
            if last:
                container[int(key)] = value
            else:
                container = container[int(key)]
        elif isinstance(container, dict):
            if last:
                container[key] = value
            else:
                if container.get(key) is None:
                    container[key] = {}
                container = container[key]
        else:
            raise ConfigError(
                f"{word!r}: {'.'.join(path[:depth])} holds a value, not keys",
                remedy="set it whole",
            )


def validate(model: type[_Model], values: Mapping[str, Any], *, origin: str) -> _Model:
    """Build ``model``; every complaint in one error, unknown keys with their nearest name.

    Raises:
        ConfigError: the values do not fit the model.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        complaints = error.errors()
        # An item that is refused also makes its list "too short": that says nothing new.
        inner = {details["loc"][0] for details in complaints if len(details["loc"]) > 1}
        lines = [
            _explain(model, details)
            for details in complaints
            if not (details["type"] == "too_short" and details["loc"][0] in inner)
        ]
        raise ConfigError(
            f"{origin}:\n    " + "\n    ".join(dict.fromkeys(lines)),
            remedy="correct these keys; docs/corpus.md lists all of them",
        ) from error


def _explain(model: type[BaseModel], details: Any) -> str:
    location = [str(part) for part in details["loc"]]
    # After an index pydantic names the union's member, which the file does not show.
    where = ".".join(
        part
        for i, part in enumerate(location)
        if not (i and location[i - 1].isdecimal() and i < len(location) - 1)
    )
    if details["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location[-1], _known_keys(model, location[:-1]), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return f"unknown key '{where}'{hint}"
    if details["type"] == "missing":
        return f"key '{where}' is missing"
    if details["type"] == "union_tag_invalid":
        tag, expected = details["ctx"]["tag"], details["ctx"]["expected_tags"]
        near = difflib.get_close_matches(tag, expected.replace("'", "").split(", "), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; use one of {expected}"
        return f"'{where}.type': no type '{tag}'{hint}"
    message = details["msg"].removeprefix("Value error, ")
    return f"'{where}': {message} (given: {details['input']!r})"


def _known_keys(model: type[BaseModel], path: list[str]) -> list[str]:
    """Keys of the model at ``path``; indices and union tags in the path choose among unions."""
    candidates: list[type[BaseModel]] = [model]
    for part in path:
        following: list[type[BaseModel]] = []
        for candidate in candidates:
            field = candidate.model_fields.get(part)
            if field is not None:
                following += _models_in(field.annotation)
            elif part.isdecimal() or part == _tag(candidate):
                following.append(candidate)
        candidates = following or candidates
    return sorted({key for candidate in candidates for key in candidate.model_fields})


def _tag(candidate: type[BaseModel]) -> str | None:
    field = candidate.model_fields.get("type")
    literals = typing.get_args(field.annotation) if field is not None else ()
    return str(literals[0]) if literals else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found: list[type[BaseModel]] = []
    for argument in typing.get_args(annotation):
        found += _models_in(argument)
    return found
