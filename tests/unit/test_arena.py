"""The arena: views without copies, memory that outlives a close, errors before training."""

from __future__ import annotations

import gc
import os
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.errors import CapacityError
from headrace.store import arena as arena_module
from headrace.store.arena import HUGE_PAGE_BYTES, Arena
from headrace.store.host_memory import HostMemory
from headrace.units import GIB, MIB


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def memory(**changes) -> HostMemory:
    values = {
        "total": 32 * GIB, "mem_available": 24 * GIB, "resident": GIB,
        "cgroup_limit": None, "cgroup_available": None, "override": None,
    }  # fmt: skip
    return HostMemory(**{**values, **changes})


def test_views_share_memory_and_start_at_zero():
    with Arena(4 * MIB, name="test") as arena:
        as_bf16 = arena.tensor(512, 100, torch.bfloat16)
        assert (as_bf16 == 0).all()
        as_bf16.fill_(1.0)
        assert (arena.numpy(512, 100, np.uint16) == 0x3F80).all()
        assert (arena.numpy(0, 256, np.uint16) == 0).all()
        assert arena.numpy(0, 1, np.uint8).ctypes.data % HUGE_PAGE_BYTES == 0
        assert as_bf16.data_ptr() % 256 == 0


def test_every_page_is_backed_when_the_constructor_returns():
    num_bytes = 64 * MIB
    before = resident_bytes()
    with Arena(num_bytes, name="test"):
        assert resident_bytes() - before >= num_bytes * 0.99


def test_views_keep_the_memory_and_the_last_one_frees_it():
    num_bytes = 64 * MIB
    arena = Arena(num_bytes, name="test")
    tensor, array = arena.tensor(0, 1000, torch.float32), arena.numpy(0, 1000, np.float32)
    narrow = tensor[10:20].view(torch.int32)
    arena.close()
    arena.close()
    array[:] = 2.0
    assert tensor.sum() == 2000
    held = resident_bytes()
    del tensor, array, arena
    gc.collect()
    assert (narrow == 0x40000000).all()
    assert resident_bytes() > held - num_bytes / 2
    del narrow
    gc.collect()
    assert resident_bytes() < held - num_bytes / 2


@pytest.mark.parametrize(
    ("offset", "numel", "dtype"),
    [
        (0, MIB + 1, torch.uint8),
        (MIB - 2, 1, torch.float32),
        (-4, 1, torch.float32),
        (2, 1, torch.float32),
        (0, -1, torch.float32),
    ],
)
def test_views_outside_or_astride_are_refused(offset, numel, dtype):
    with Arena(MIB, name="test") as arena, pytest.raises(ValueError, match="no view of test"):
        arena.tensor(offset, numel, dtype)


def test_closed_and_empty_arenas():
    arena = Arena(MIB, name="weights")
    arena.close()
    with pytest.raises(ValueError, match="weights is closed"):
        arena.tensor(0, 1, torch.float32)
    with Arena(0, name="nothing") as empty:
        assert empty.tensor(0, 0, torch.bfloat16).numel() == 0
        assert empty.numpy(0, 0, np.int16).dtype == np.int16


def test_what_does_not_fit_is_refused_with_the_arithmetic(monkeypatch):
    """Pitfall 14. The kernel would end the process: an error before a page is touched."""
    monkeypatch.setattr(arena_module, "host_memory", lambda: memory(mem_available=2 * GIB))
    before = resident_bytes()
    with pytest.raises(CapacityError) as caught:
        Arena(2 * GIB, name="optimizer state")
    assert caught.value.exit_code == 3
    for part in ("optimizer state needs 2.00 GiB", "256.00 MiB", "2.25 GiB", "HEADRACE_HOST"):
        assert part in str(caught.value)
    assert resident_bytes() - before < 100 * MIB


def test_the_override_says_no_too(monkeypatch):
    monkeypatch.setenv("HEADRACE_HOST_MEMORY", "1MiB")
    with pytest.raises(CapacityError, match="HEADRACE_HOST_MEMORY 1"):
        Arena(MIB, name="test")


def test_a_machine_that_grows_is_not_refused(monkeypatch):
    """The limit promises more than there is yet; memory follows with a delay."""
    seen = []

    def growing() -> HostMemory:
        seen.append(None)
        available = 0 if len(seen) in (2, 3) else GIB
        return memory(total=GIB, mem_available=available, override=128 * GIB)

    monkeypatch.setattr(arena_module, "host_memory", growing)
    with Arena(2 * MIB, name="test"):
        assert len(seen) == 4  # the check, two looks in vain, one that found it


def test_growth_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(arena_module, "_GROWTH_SECONDS", 0.1)
    monkeypatch.setattr(
        arena_module,
        "host_memory",
        lambda: memory(total=GIB, mem_available=0, override=128 * GIB),
    )
    with pytest.raises(CapacityError, match=r"ran out while taking 2\.00 MiB for test"):
        Arena(2 * MIB, name="test")


def test_memory_taken_by_others_meanwhile_is_an_error(monkeypatch):
    monkeypatch.setattr(arena_module, "_STEP_BYTES", MIB)
    looks = iter([GIB, GIB, GIB, 0])
    monkeypatch.setattr(arena_module, "host_memory", lambda: memory(mem_available=next(looks)))
    with pytest.raises(CapacityError, match=r"2\.00 MiB were taken"):
        Arena(4 * MIB, name="test")


class Cuda:
    """Stands for the CUDA runtime, which this machine may not have."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(  # noqa: N802  the runtime's name
        self, address: int, num_bytes: int, flags: int
    ) -> int:
        assert num_bytes == MIB
        assert flags == 1
        self.calls.append(("register", address))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  the runtime's name
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    runtime = Cuda()
    monkeypatch.setattr(arena_module, "torch", types.SimpleNamespace(
        cuda=types.SimpleNamespace(cudart=lambda: runtime),
        frombuffer=torch.frombuffer, empty=torch.empty,
    ))  # fmt: skip
    return runtime


def test_registration_ends_with_close(cuda):
    arena = Arena(MIB, name="test", register_cuda=True)
    address = arena.numpy(0, 1, np.uint8).ctypes.data
    assert arena.is_registered
    assert cuda.calls == [("register", address)]
    arena.close()
    arena.close()
    assert not arena.is_registered
    assert cuda.calls == [("register", address), ("unregister", address)]


def test_registration_lasts_as_long_as_a_view(cuda):
    view = Arena(MIB, name="test", register_cuda=True).tensor(0, 8, torch.float32)
    gc.collect()
    assert len(cuda.calls) == 1
    del view
    gc.collect()
    assert [name for name, _ in cuda.calls] == ["register", "unregister"]


def test_a_refused_registration_is_an_error_with_sizes(cuda):
    cuda.code = 2
    with pytest.raises(CapacityError, match=r"refuses to pin 1.00 MiB for test \(CUDA error 2\)"):
        Arena(MIB, name="test", register_cuda=True)
    assert [name for name, _ in cuda.calls] == ["register"]


def test_a_refused_mapping_is_an_error(monkeypatch):
    """Pitfall 14. The allocator itself fails."""
    monkeypatch.setattr(arena_module, "host_memory", lambda: memory(mem_available=1 << 62))
    with pytest.raises(CapacityError, match="refuses to map"):
        Arena(1 << 60, name="test")


def test_a_forked_child_does_not_have_the_memory():
    arena = Arena(MIB, name="test")
    address = arena.numpy(0, 1, np.uint8).ctypes.data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if child == 0:
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in maps]
        mapped = any(int(low, 16) <= address < int(high, 16) for low, high in spans)
        os._exit(1 if mapped else 0)
    _, status = os.waitpid(child, 0)
    arena.close()
    assert os.waitstatus_to_exitcode(status) == 0


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        Arena(-1, name="test")
