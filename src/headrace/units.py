"""Bytes, counts and durations: parsing what users write, printing what they read."""

from __future__ import annotations

import re

from headrace.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
}  # fmt: skip
_MOST = 2**62
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*")


def _parse(text: str | float, table: dict[str, int], what: str) -> int:
    if isinstance(text, (int, float)):
        return int(text)
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in table:
        units = ", ".join(unit for unit in table if unit)
        raise ConfigError(f"{text!r} is not a {what}", remedy=f"write a number and one of: {units}")
    number = float(match[1].replace("_", "")) * table[match[2].lower()]
    if number > _MOST:
        raise ConfigError(f"{text!r} is not a {what}: too large", remedy="write a smaller number")
    return int(number)


def parse_bytes(text: str | float) -> int:
    """``"128GiB"``, ``"64 MB"``, ``"2k"`` or a number of bytes, as bytes."""
    return _parse(text, _BYTES, "size in bytes")


def parse_memory(text: str | float, name: str) -> int:
    """A size of memory or disk as bytes, where a forgotten unit would be taken at its word.

    A number without a unit is bytes, as everywhere; below 1 MiB it is refused unless it is zero,
    since no machine is that small and ``64`` was meant as GiB. With its unit any size is taken.

    Args:
        text: what the user gave.
        name: the option, key or variable that it was given for, for messages.

    Raises:
        ConfigError: it is no size, or lacks its unit.
    """
    try:
        num_bytes = parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", remedy=error.remedy) from error
    bare = str(text).strip()
    is_zero = not bare.strip("0._")
    if 0 <= num_bytes < MIB and not is_zero and not bare[-1].isalpha():
        raise ConfigError(
            f"{name}: {bare} has no unit and so means {num_bytes} bytes, less than any machine has",
            remedy=f"write the unit, such as {bare}GiB",
        )
    return num_bytes


def parse_count(text: str | float) -> int:
    """``"1.5B"``, ``"30k"`` or a number, as a count (tokens, parameters)."""
    return _parse(text, _COUNTS, "count")


def format_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit and three significant digits: ``"1.50 GiB"``."""
    for limit, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= limit:
            return f"{num_bytes / limit:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """A count with a decimal unit: ``"134.5M"``."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.1f}{unit}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """Seconds as ``"1 h 02 min"``, ``"3 min 20 s"`` or ``"4.2 s"``."""
    if seconds >= 3600:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours} h {rest:02d} min"
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    return f"{seconds:.1f} s"
