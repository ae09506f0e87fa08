"""Values of a YAML recipe, checked by the dataclass that they configure.

Owns the step from what YAML gives to what a frozen dataclass takes: whole numbers, numbers, text,
truth values and tuples of them. The invariant: a key or value that does not fit is an error that
says where it stands, and YAML's dates are text again. It knows no key.
"""

from __future__ import annotations

import dataclasses
import difflib
from datetime import date
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_Settings = TypeVar("_Settings")


def mapping(value: Any, where: str, known: Iterable[str]) -> dict[str, Any]:
    """``value``, if it is a mapping of ``known`` keys.

    Raises:
        ConfigError: it is none, or a key is unknown; the nearest known one is named.
    """
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where} is {type(value).__name__}, not a mapping of keys",
            remedy="docs/audit.md shows a recipe with its keys",
        )
    names = list(known)
    for key in value:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(names)}"
            raise ConfigError(
                f"{where} has no key {key!r}; {hint}",
                remedy="docs/audit.md shows a recipe with its keys",
            )
    return value


def settings(cls: type[_Settings], value: Any, where: str, *, without: str = "") -> _Settings:
    """Build a frozen dataclass from a mapping of some of its fields, but for ``without``.

    Raises:
        ConfigError: as :func:`mapping`, a value of another type, or one the dataclass refuses.
    """
    # Annotations as written: some types are imported for the type checker alone.
    kinds = {f.name: str(f.type) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # a dataclass
    given = mapping(value or {}, where, [name for name in kinds if name != without])
    return cls(**{key: _typed(kinds[key], v, f"{where}.{key}") for key, v in given.items()})


def whole(value: Any, where: str) -> int:
    """``value``, if it is a whole number.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"{where} is {value!r}, which is no whole number", remedy="write a number such as 10"
        )
    return value


def _typed(kind: str, value: Any, where: str) -> Any:
    if value is None and kind.endswith(" | None"):
        return None
    kind = kind.removesuffix(" | None")
    if kind.startswith("tuple["):
        if not isinstance(value, list):
            raise ConfigError(
                f"{where} is {value!r}, which is no list", remedy="write it as [a, b]"
            )
        item = kind.removeprefix("tuple[").partition(",")[0]
        return tuple(_typed(item, v, f"{where}[{k}]") for k, v in enumerate(value))
    if kind == "int":
        return whole(value, where)
    if kind == "float":
        # YAML 1.1 reads 1e-3 as text.
        try:
            return float(str(value) if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{where} is {value!r}, which is no number", remedy="write a number such as 0.5"
            ) from None
    if kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(
                f"{where} is {value!r}, which is not true or false", remedy="write true or false"
            )
        return value
    assert kind == "str", f"{where}: a field of type {kind} is not read from recipes"
    if isinstance(value, date):
        return value.isoformat()
    if not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}, which is no text", remedy="write it in quotes")
    return value
