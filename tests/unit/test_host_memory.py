"""What memory is left: made-up /proc and control group trees, one a kind of machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace.errors import ConfigError
from headrace.store.host_memory import host_memory
from headrace.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

V1_NO_LIMIT = 9223372036854771712


class Machine:
    """A folder that looks like /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        self.memory(total=32, available=24)
        (self.proc / "self" / "statm").write_text("9999 262144 1 1 0 1 0\n")  # 1 GiB resident

    def memory(self, *, total: int, available: int) -> None:
        (self.proc / "meminfo").write_text(
            f"MemTotal:       {total * GIB // 1024} kB\nMemFree:        1 kB\n"
            f"MemAvailable:   {available * GIB // 1024} kB\nHugePages_Total:       0\n"
        )

    def version2(self, path: str, levels: dict[str, tuple[str, int, int]]) -> None:
        """Levels: (memory.max, memory.current, page cache)."""
        (self.proc / "self" / "cgroup").write_text(f"0::{path}\n")
        for level, (limit, current, cache) in levels.items():
            folder = self.cgroup / level.strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{limit}\n")
            (folder / "memory.current").write_text(f"{current}\n")
            (folder / "memory.stat").write_text(
                f"anon 1\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}\n"
            )

    def version1(self, path: str, levels: dict[str, tuple[int, int, int]]) -> None:
        (self.proc / "self" / "cgroup").write_text(
            f"9:name=systemd:/\n8:cpu,cpuacct:/x\n4:memory:{path}\n0::/\n"
        )
        for level, (limit, usage, cache) in levels.items():
            folder = self.cgroup / "memory" / level.strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
            (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
            (folder / "memory.stat").write_text(
                f"cache 5\ninactive_file 5\nactive_file 5\ntotal_inactive_file {cache}\n"
                "total_active_file 0\n"
            )

    def available(self, **environ: str) -> int:
        return host_memory(proc=self.proc, cgroup=self.cgroup, environ=environ).available


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_mem_available_decides(machine):
    assert machine.available() == 24 * GIB


def test_a_tight_version_2_limit_decides_and_page_cache_is_free(machine):
    machine.version2("/job", {"/job": (str(8 * GIB), 5 * GIB, 2 * GIB), "/": ("max", 0, 0)})
    assert machine.available() == 5 * GIB


def test_a_parents_limit_counts(machine):
    machine.version2(
        "/slice/job",
        {"/slice": (str(6 * GIB), 4 * GIB, 0), "/slice/job": (str(16 * GIB), GIB, 0)},
    )
    assert machine.available() == 2 * GIB


def test_inside_a_container_the_mount_is_the_group(machine):
    machine.version2("/kubepods/pod1/abc", {"/": (str(10 * GIB), 3 * GIB, 0)})
    assert machine.available() == 7 * GIB


def test_a_tight_version_1_limit_decides(machine):
    machine.version1("/a/b", {"/a/b": (8 * GIB, 6 * GIB, 1 * GIB), "/": (V1_NO_LIMIT, 0, 0)})
    assert machine.available() == 3 * GIB


def test_no_limit_is_no_limit(machine):
    machine.version1("/a", {"/a": (V1_NO_LIMIT, 20 * GIB, 0)})
    assert machine.available() == 24 * GIB
    machine.version2("/a", {"/a": ("max", 20 * GIB, 0)})
    assert machine.available() == 24 * GIB


def test_a_loose_limit_leaves_the_decision_to_mem_available(machine):
    machine.version2("/a", {"/a": (str(30 * GIB), GIB, 0)})
    assert machine.available() == 24 * GIB


def test_a_limit_above_mem_total_means_that_memory_grows(machine):
    machine.version2("/a", {"/a": (str(256 * GIB), 2 * GIB, 0)})
    memory = host_memory(proc=machine.proc, cgroup=machine.cgroup, environ={})
    assert memory.available == 254 * GIB
    assert memory.may_grow


def test_the_override_replaces_mem_available_and_counts_what_is_held(machine):
    assert machine.available(HEADRACE_HOST_MEMORY="128GiB") == 127 * GIB
    assert machine.available(HEADRACE_HOST_MEMORY="4GiB") == 3 * GIB
    assert machine.available(HEADRACE_HOST_MEMORY="1k") == 0


def test_the_override_does_not_lift_a_control_groups_limit(machine):
    machine.version2("/job", {"/job": (str(8 * GIB), 5 * GIB, 0)})
    assert machine.available(HEADRACE_HOST_MEMORY="128GiB") == 3 * GIB


def test_an_override_that_is_no_size_is_a_configuration_error(machine):
    with pytest.raises(ConfigError, match="HEADRACE_HOST_MEMORY: 'lots' is not a size") as caught:
        machine.available(HEADRACE_HOST_MEMORY="lots")
    assert caught.value.remedy
    with pytest.raises(ConfigError, match="HEADRACE_HOST_MEMORY: 64 has no unit"):
        machine.available(HEADRACE_HOST_MEMORY="64")


def test_the_explanation_names_every_source(machine):
    machine.version2("/job", {"/job": (str(8 * GIB), 5 * GIB, 0)})
    text = host_memory(
        proc=machine.proc, cgroup=machine.cgroup, environ={"HEADRACE_HOST_MEMORY": "16GiB"}
    ).explain()
    for part in ("24.00 GiB of 32.00 GiB", "3.00 GiB left of 8.00 GiB", "16.00 GiB", "1.00 GiB"):
        assert part in text


def test_this_machine_can_be_read():
    memory = host_memory()
    assert 0 < memory.available <= max(memory.total, memory.cgroup_limit or 0)
    assert memory.resident > 1 << 20
