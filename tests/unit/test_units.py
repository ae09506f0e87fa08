"""Sizes that people write."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.units import GIB, MIB, parse_memory


@pytest.mark.parametrize("given", ["64", " 64 ", "1_000", 64, 64.0, "1e3", "0.5", str(MIB - 1)])
def test_memory_whose_unit_was_forgotten_is_refused(given):
    bare = str(given).strip()
    with pytest.raises(ConfigError, match=f"^--disk: {bare} has no unit .* bytes") as caught:
        parse_memory(given, "--disk")
    assert caught.value.remedy.endswith(f"{bare}GiB")


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (0, 0), ("0", 0), (2147483648, 2 * GIB), ("2147483648", 2 * GIB), (str(MIB), MIB),
        ("64GiB", 64 * GIB), ("1k", 1024), ("64 B", 64),
    ],
)  # fmt: skip
def test_plain_bytes_of_a_machine_and_sizes_with_units_are_taken(given, size):
    assert parse_memory(given, "--disk") == size
