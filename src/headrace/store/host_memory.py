"""How much memory this process may still take on the host.

Invariant: reads, never allocates. What it says holds for this moment; other processes may take
memory right after, so whoever fills a large mapping looks again as it goes (``arena.py``).

The rule, in order:

1. ``HEADRACE_HOST_MEMORY`` (``128GiB``), where set, is the memory of this process: what is left
   of it is that size minus what the process holds already. MemAvailable is not asked.
2. A control group (v1 or v2, every level up to the root) has a limit that the kernel enforces by
   killing: what is left is limit minus usage, page cache not counted, and it bounds rule 1 too.
3. MemAvailable of ``/proc/meminfo`` bounds the rest, except where a control group's limit is above
   MemTotal: then the machine's memory grows as it is used (some virtual machines start with a
   fraction of theirs), and the limit is believed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.units import format_bytes, parse_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

OVERRIDE_VARIABLE = "HEADRACE_HOST_MEMORY"
_NO_LIMIT = 1 << 60  # v1 writes "none" as a number near 2^63


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What was found, in bytes."""

    total: int
    """MemTotal: what the system has at this moment."""
    mem_available: int
    """MemAvailable: free, or page cache that can be dropped."""
    resident: int
    """What this process holds."""
    cgroup_limit: int | None
    """The tightest limit of a control group, None without one."""
    cgroup_available: int | None
    """What is left under that limit, page cache not counted."""
    override: int | None
    """``HEADRACE_HOST_MEMORY``."""

    @property
    def may_grow(self) -> bool:
        """Whether more memory than MemTotal is promised."""
        return max(self.override or 0, self.cgroup_limit or 0) > self.total

    @property
    def available(self) -> int:
        """What this process may still take; see the module's rule."""
        if self.override is not None:
            available = self.override - self.resident
        elif self.cgroup_limit is not None and self.cgroup_limit > self.total:
            available = self.cgroup_limit
        else:
            available = self.mem_available
        if self.cgroup_available is not None:
            available = min(available, self.cgroup_available)
        return max(0, available)

    def explain(self) -> str:
        """Where ``available`` comes from, in words."""
        parts = [f"MemAvailable {format_bytes(self.mem_available)} of {format_bytes(self.total)}"]
        if self.cgroup_limit is not None and self.cgroup_available is not None:
            parts.append(
                f"control group {format_bytes(self.cgroup_available)} left of "
                f"{format_bytes(self.cgroup_limit)}"
            )
        if self.override is not None:
            parts.append(
                f"{OVERRIDE_VARIABLE} {format_bytes(self.override)}, of which this process "
                f"holds {format_bytes(self.resident)}"
            )
        return "; ".join(parts)


def host_memory(
    *,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    environ: Mapping[str, str] = os.environ,
) -> HostMemory:
    """Read the memory of the host as it is now.

    Args:
        proc: Where procfs is mounted.
        cgroup: Where the control groups are mounted.
        environ: Where the override is looked up.

    Raises:
        ConfigError: ``HEADRACE_HOST_MEMORY`` is not a size.
    """
    fields = _key_values(proc / "meminfo")
    limits = _cgroup_limits(proc / "self" / "cgroup", cgroup)
    tightest = min(limits, key=lambda pair: pair[0] - pair[1], default=None)
    given = environ.get(OVERRIDE_VARIABLE)
    override = parse_memory(given, OVERRIDE_VARIABLE) if given else None
    pages = int((proc / "self" / "statm").read_text().split()[1])
    return HostMemory(
        total=fields["MemTotal"] * 1024,
        mem_available=fields["MemAvailable"] * 1024,
        resident=pages * os.sysconf("SC_PAGE_SIZE"),
        cgroup_limit=None if tightest is None else tightest[0],
        cgroup_available=None if tightest is None else max(0, tightest[0] - tightest[1]),
        override=override,
    )


def _key_values(path: Path) -> dict[str, int]:
    """``name value`` or ``name: value kB`` a line."""
    values = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(" ")
        number = rest.split()
        if number and number[0].isdigit():
            values[name.rstrip(":")] = int(number[0])
    return values


def _cgroup_limits(membership: Path, root: Path) -> list[tuple[int, int]]:
    """(limit, usage without page cache) of every level that has a limit."""
    if not membership.exists():
        return []
    limits = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        limit_name, usage_name, prefix = names
        for level in _levels(base, path):
            limit_file, usage_file = level / limit_name, level / usage_name
            if not limit_file.exists() or not usage_file.exists():
                continue
            text = limit_file.read_text().strip()
            if text == "max" or int(text) >= _NO_LIMIT:
                continue
            stat = _key_values(level / "memory.stat") if (level / "memory.stat").exists() else {}
            cache = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            usage = int(usage_file.read_text()) - cache
            limits.append((int(text), max(0, usage)))
    return limits


def _levels(base: Path, path: str) -> list[Path]:
    """The group's folder and its parents, up to the mount.

    Inside a container the path may be the host's and not exist here; the mount itself is then
    the group.
    """
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    return [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
