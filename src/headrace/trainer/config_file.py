"""Configuration files: reading YAML and ``key=value``, naming what is unknown.

The invariant: nothing a user wrote is lost in silence. A key given twice, a key that does not
exist and an override that goes nowhere are errors with the place and the nearest name. Knows no
key by name.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import yaml

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse names that are not ``known``, each with the nearest one that is.

    Raises:
        ConfigError: naming all of them.
    """
    known = list(known)
    problems = []
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(sorted(known))
        problems.append(f"unknown key {where}{name}; {hint}")
    if problems:
        raise ConfigError("\n  ".join(problems), remedy="correct or remove it; nothing is ignored")


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice: one of the two would be ignored."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(
                f"{key_node.start_mark.name}:{key_node.start_mark.line + 1}: a key is a list or a "
                "mapping",
                remedy="write key: value lines",
            )
        key = loader.construct_object(key_node)
        if key in seen:
            raise ConfigError(
                f"{key_node.start_mark.name}:{key_node.start_mark.line + 1}: {key} is given twice",
                remedy="keep one",
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration file.

    Raises:
        ConfigError: it is not there, not YAML (with the line), or not a mapping.
    """
    try:
        with path.open(encoding="utf-8") as file:
            raw = yaml.load(file, _Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}", remedy="correct the path"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Besides syntax: bytes that are not UTF-8, dates such as 2021-13-45, endless nesting.
        raise ConfigError(f"{path} is not YAML: {error}", remedy="correct that line") from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path} holds {type(raw).__name__}, not keys with values",
            remedy="write key: value lines",
        )
    return raw


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one ``key=value`` in place; dotted keys go into mappings and lists.

    Raises:
        ConfigError: it has no ``=``, no YAML value, or goes into something that has no parts.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not key=value", remedy="headrace train CONFIG learning_rate=1e-4"
        )
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{override!r}: the value is not YAML", remedy="quote it") from error
    *path, last = key.split(".")
    place: Any = raw
    for part in path:
        if isinstance(place, dict):
            if place.get(part) is None:
                place[part] = {}
            elif not isinstance(place[part], (dict, list)):
                raise ConfigError(
                    f"{override!r}: {part} is {place[part]!r}, which has no parts",
                    remedy=f"set {part} whole",
                )
            place = place[part]
        else:
            place = place[_index(place, part, override)]
    if isinstance(place, list):
        place[_index(place, last, override)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise ConfigError(f"{override!r}: {'.'.join(path)} has no parts", remedy="set it whole")


def _index(place: Any, part: str, override: str) -> int:
    # isdigit alone takes digits such as ², which are no numbers.
    digits = part.isascii() and part.isdigit()
    if not isinstance(place, list) or not digits or int(part) >= len(place):
        size = len(place) if isinstance(place, list) else 0
        raise ConfigError(
            f"{override!r}: {part} is no index into a list of {size}",
            remedy="count from 0, or set the list whole: datasets='[{path: a.jsonl}]'",
        )
    return int(part)
