"""The host: instruction set, cores, memory and its limits, NUMA, disk.

Reads ``/proc`` and ``/sys`` below a root that tests replace; a file that is absent is no finding.
"""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from headrace.doctor.findings import Finding, Status
from headrace.store.host_memory import host_memory
from headrace.units import GIB, MIB, format_bytes

# The levels of the x86-64 psABI that the kernels are compiled for, by the flags they add.
_LEVEL_4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_LEVEL_3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _fields(text: str | None) -> dict[str, str]:
    pairs = (line.partition(":") for line in (text or "").splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def check_processor(root: Path = Path("/")) -> list[Finding]:
    """Instruction set level and cores of this process."""
    cpu = _fields(_read(root / "proc/cpuinfo"))
    flags = set(cpu.get("flags", "").split())
    level = (
        "x86-64-v4 (AVX-512)"
        if flags >= _LEVEL_4
        else "x86-64-v3 (AVX2)"
        if flags >= _LEVEL_3
        else "below x86-64-v3"
    )
    slow = level.startswith("below")
    cores = len(os.sched_getaffinity(0))
    present = os.cpu_count() or cores
    return [
        Finding(
            area="processor",
            name="instruction set",
            status="warning" if slow else "ok",
            value=f"{level}, {cpu.get('model name', 'unknown model')}",
            detail="the optimizer's plain loop runs without wide vectors" if slow else "",
        ),
        Finding(
            area="processor",
            name="cores",
            status="ok" if cores == present else "info",
            value=f"{cores} of {present}",
            detail=""
            if cores == present
            else "this process is bound to some; the update uses only these",
        ),
    ]


def check_memory(root: Path = Path("/")) -> list[Finding]:
    """Memory, the container's limit, huge pages, overcommit, locked and shared memory."""
    memory = host_memory(proc=root / "proc", cgroup=root / "sys/fs/cgroup")
    findings = [
        Finding(
            area="memory",
            name="host memory",
            status="ok",
            value=f"{format_bytes(memory.available)} available of {format_bytes(memory.total)}",
            detail=f"{memory.explain()}; room for the state of {memory.available / 14 / 1e9:.1f}B "
            "parameters (14 bytes each, gradients included)",
        )
    ]
    if memory.cgroup_limit is not None:
        findings.append(
            Finding(
                area="memory",
                name="container limit",
                status="info",
                value=format_bytes(memory.cgroup_limit),
                detail="beyond it the kernel ends the process; plans hold against this limit",
            )
        )
    pages = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if pages is not None:
        never = "[never]" in pages
        findings.append(
            Finding(
                area="memory",
                name="transparent huge pages",
                status="warning" if never else "ok",
                value=pages.partition("[")[2].partition("]")[0] or pages,
                detail="registering host memory takes several times as long" if never else "",
                remedy="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
                if never
                else None,
            )
        )
    if _read(root / "proc/sys/vm/overcommit_memory") == "2":
        findings.append(
            Finding(
                area="memory",
                name="overcommit",
                status="warning",
                value="2 (never)",
                detail="the arena is one large mapping, which this mode may refuse",
                remedy="sudo sysctl vm.overcommit_memory=0",
            )
        )
    return [*findings, *_limits(root)]


def _limits(root: Path) -> list[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    findings = [
        Finding(
            area="memory",
            name="locked memory (memlock)",
            status="ok" if unlimited else "info",
            value="unlimited" if unlimited else format_bytes(soft),
            detail=""
            if unlimited
            else "does not bind CUDA registration; RDMA between nodes needs it unlimited",
            remedy=None if unlimited else "ulimit -l unlimited",
        )
    ]
    shared = root / "dev/shm"
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = free < 256 * MIB
        findings.append(
            Finding(
                area="memory",
                name="/dev/shm",  # noqa: S108 - named, not written to
                status="warning" if small else "ok",
                value=f"{format_bytes(free)} free",
                detail="collectives between processes and data workers need more" if small else "",
                remedy="start the container with --shm-size=1g or --ipc=host" if small else None,
            )
        )
    return findings


def check_numa(root: Path = Path("/")) -> list[Finding]:
    """NUMA nodes and the memory of each."""
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    if not nodes:
        return []
    sizes = []
    for node in nodes:
        text = _read(node / "meminfo") or ""
        total = next((line.split()[3] for line in text.splitlines() if "MemTotal" in line), "0")
        sizes.append(int(total) << 10)
    several = len(nodes) > 1
    return [
        Finding(
            area="memory",
            name="NUMA nodes",
            status="info" if several else "ok",
            value=", ".join(
                f"{node.name} {format_bytes(size)}" for node, size in zip(nodes, sizes, strict=True)
            ),
            detail="bind each process to its card's node: updates across nodes are slower"
            if several
            else "",
            remedy="numactl --cpunodebind=N --membind=N" if several else None,
        )
    ]


def check_disk(path: Path | None = None) -> list[Finding]:
    """Free disk where a run would write."""
    place = path or Path.cwd()
    free = shutil.disk_usage(place).free
    status: Status = "warning" if free < 5 * GIB else "ok"
    return [
        Finding(
            area="disk",
            name=f"free under {place}",
            status=status,
            value=format_bytes(free),
            detail=f"a checkpoint takes 12 bytes a parameter, twice while it is written: room for "
            f"{free / 24 / 1e9:.2f}B parameters",
        )
    ]
