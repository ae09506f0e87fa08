"""One large block of host memory: huge pages, backed from the start, registered with CUDA.

Invariants: when the constructor returns, every byte is backed by memory (running out is an error
before training, never a killed process in the middle of it); the memory stays mapped as long as
any view of it lives; a forked child does not see it. Does not know what is stored where: see
``layout.py``.

Why a private anonymous mapping: shared mappings and memfd get no huge pages on common systems.
Why ``cudaHostRegister``: it pins touched huge pages 7x faster than ``cudaHostAlloc`` and does not
round sizes up to a power of two (measured: 13 against 1.8 GiB/s).
Why ``MADV_DONTFORK``: a fork would mark pages copy-on-write that DMA writes to. Touching a view
in a forked child is a segmentation fault; data workers are spawned.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from headrace import kernels
from headrace.errors import CapacityError
from headrace.store.host_memory import OVERRIDE_VARIABLE, HostMemory, host_memory
from headrace.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

_LOGGER = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 * MIB
RESERVE_BYTES = 256 * MIB
"""Left to the rest of the process: a full machine kills, it does not fail."""
_STEP_BYTES = GIB  # touched between two looks at the memory that is left
_GROWTH_SECONDS = 20.0  # how long a machine that grows may take to give the next step
_CUDA_PORTABLE = 1  # cudaHostRegisterPortable: registered for every device of the process
_FALLBACK = "store less: fewer parameters, smaller moments, or a machine with more memory"


class _Mapping(mmap.mmap):
    """The memory itself. Views refer to it, so it is unmapped when the last of them is gone."""


class Arena:
    """A block of ``num_bytes`` bytes, zero at first, of which views are handed out.

    Args:
        num_bytes: Size; 0 is allowed and takes nothing.
        name: What it holds, for messages.
        register_cuda: Pin the memory, so that CUDA copies from and to it directly.

    Raises:
        CapacityError: The memory is not there, or cannot be pinned. Nothing is kept.
    """

    def __init__(self, num_bytes: int, *, name: str, register_cuda: bool = False) -> None:
        if num_bytes < 0:
            raise ValueError(f"an arena of {num_bytes} bytes")
        self.num_bytes = num_bytes
        self.name = name
        self.is_registered = False
        self._mapping: _Mapping | None = None
        self._start = 0
        self._unregister: weakref.finalize[Any, Any] | None = None
        self._is_closed = False
        if num_bytes == 0:
            return
        _check_fits(num_bytes, name, host_memory())
        self._map()
        try:
            self._touch()
            if register_cuda:
                self._register()
        except BaseException:
            self.close()
            raise

    def _map(self) -> None:
        # Room to start at a huge page's boundary, which not every kernel arranges by itself.
        length = -(-self.num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES
        try:
            mapping = _Mapping(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CapacityError(
                f"the system refuses to map {format_bytes(length)} for {self.name}: {error}",
                remedy="look at 'ulimit -v' and vm.overcommit_memory, or " + _FALLBACK,
            ) from error
        mapping.madvise(mmap.MADV_DONTFORK)
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages: slower, not wrong
            _LOGGER.warning("no huge pages for %s: this kernel does not offer them", self.name)
        address = np.frombuffer(mapping, np.uint8, count=1).__array_interface__["data"][0]
        self._start = -address % HUGE_PAGE_BYTES
        self._mapping = mapping

    def _touch(self) -> None:
        """Have every page backed, in parallel, watching the memory that is left."""
        backend = kernels.load()
        pool = backend.Pool(kernels.num_usable_cores())
        try:
            for begin in range(0, self.num_bytes, _STEP_BYTES):
                step = min(_STEP_BYTES, self.num_bytes - begin)
                _wait_for(step, begin, self.num_bytes, self.name)
                backend.touch(self.numpy(begin, step, np.uint8), pool=pool)
        finally:
            pool.close()

    def _register(self) -> None:
        address = self.numpy(0, self.num_bytes, np.uint8).__array_interface__["data"][0]
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(address, self.num_bytes, _CUDA_PORTABLE))
        if code != 0:
            raise CapacityError(
                f"cudaHostRegister refuses to pin {format_bytes(self.num_bytes)} for {self.name} "
                f"(CUDA error {code})",
                remedy="raise the limit on locked memory ('ulimit -l unlimited', in a container "
                "'--ulimit memlock=-1'), or " + _FALLBACK,
            )
        self.is_registered = True
        assert self._mapping is not None
        self._unregister = weakref.finalize(self._mapping, runtime.cudaHostUnregister, address)
        self._unregister.atexit = False  # CUDA may be gone by then, and the system unpins

    def _view(self, offset_bytes: int, numel: int, itemsize: int) -> tuple[_Mapping, int]:
        if self._is_closed or self._mapping is None:
            raise ValueError(f"the arena of {self.name} is closed or empty")
        end = offset_bytes + numel * itemsize
        if offset_bytes < 0 or numel < 0 or end > self.num_bytes or offset_bytes % itemsize:
            raise ValueError(
                f"elements of {itemsize} bytes in [{offset_bytes}, {end}) are no view of "
                f"{self.name}, which has {self.num_bytes} bytes"
            )
        return self._mapping, self._start + offset_bytes

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat view of ``numel`` elements from ``offset_bytes`` on, without a copy.

        The view keeps the memory mapped, also after :meth:`close`.

        Raises:
            ValueError: Outside the arena, not a multiple of the element's size, or closed.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        mapping, start = self._view(offset_bytes, numel, dtype.itemsize)
        return torch.frombuffer(mapping, dtype=dtype, count=numel, offset=start)

    def numpy(self, offset_bytes: int, numel: int, dtype: DTypeLike) -> NDArray[Any]:
        """Like :meth:`tensor`, as a numpy array."""
        kind = np.dtype(dtype)
        if numel == 0:
            return np.empty(0, dtype=kind)
        mapping, start = self._view(offset_bytes, numel, kind.itemsize)
        return np.frombuffer(mapping, dtype=kind, count=numel, offset=start)

    def close(self) -> None:
        """Unpin now, and unmap as soon as no view is left. Doing it twice is harmless.

        No copy from or to the memory may be in flight.
        """
        self._is_closed = True
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        self.is_registered = False
        self._mapping = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else format_bytes(self.num_bytes)
        return f"Arena({self.name}, {state}{', registered' if self.is_registered else ''})"


def _check_fits(num_bytes: int, name: str, memory: HostMemory) -> None:
    """Refuse what cannot fit, before any of it is taken.

    Raises:
        CapacityError: With the arithmetic.
    """
    if num_bytes + RESERVE_BYTES <= memory.available:
        return
    raise CapacityError(
        f"{name} needs {format_bytes(num_bytes)} of host memory and {format_bytes(RESERVE_BYTES)} "
        f"must stay free, {format_bytes(num_bytes + RESERVE_BYTES)} together; "
        f"{format_bytes(memory.available)} can be had ({memory.explain()})",
        remedy=f"{_FALLBACK}. If this machine's memory grows as it is used, say how far: "
        f"{OVERRIDE_VARIABLE}=128GiB",
    )


def _wait_for(step: int, done: int, num_bytes: int, name: str) -> None:
    """Return once ``step`` more bytes can be touched without the system running out.

    On a machine whose memory is all there this is one look; another process may have taken
    memory since the check. On one that grows, growth follows use with a delay.

    Raises:
        CapacityError: The memory did not come.
    """
    deadline = time.monotonic() + _GROWTH_SECONDS
    while True:
        memory = host_memory()
        if memory.mem_available >= step + RESERVE_BYTES:
            return
        if not memory.may_grow or time.monotonic() >= deadline:
            raise CapacityError(
                f"memory ran out while taking {format_bytes(num_bytes)} for {name}: "
                f"{format_bytes(done)} were taken, the next {format_bytes(step)} and a reserve of "
                f"{format_bytes(RESERVE_BYTES)} are not there ({memory.explain()})",
                remedy=f"end what else runs on this machine, or {_FALLBACK}",
            )
        time.sleep(0.05)
