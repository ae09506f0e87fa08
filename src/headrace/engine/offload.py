"""Activations that wait for their backward in host memory.

Owns the host buffers and the lane that leaves and the lane that returns. Invariants: backward
finds the bits that forward saved; device memory is given back only once its copy is done, and what
:data:`IN_FLIGHT` micro-batches saved of one layer may wait for that; what a layer was called with
(its input, masks, the sums that its backward adds to) stays where it is, because others use it too.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.engine.lanes import Lane, Mark, Ticket
from headrace.store.arena import Arena
from headrace.store.layout import align

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace.engine.trace import Tracer

IN_FLIGHT = 2
SMALLEST_BYTES = 1 << 16  # smaller tensors cost more in calls than they free


@dataclass(frozen=True)
class ActivationReference:
    """Where a saved tensor lies: which storage, and how it is seen."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class SavedActivations:
    """What one layer saved of one micro-batch, by storage."""

    def __init__(self, staying: Iterable[torch.Tensor]) -> None:
        """Begin with nothing saved.

        Args:
            staying: tensors whose storage must not leave the device.
        """
        self._staying = {tensor.untyped_storage().data_ptr() for tensor in staying}
        self._index: dict[int, int] = {}
        self.sizes: list[int] = []
        self.storages: list[torch.Tensor] = []  # uint8; empty while they are away
        self.host: torch.Tensor | None = None
        self.layer = -1
        self.left: Ticket | None = None
        self.returned: Ticket | None = None

    def put(self, saved: torch.Tensor) -> torch.Tensor | ActivationReference:
        """What autograd keeps in place of ``saved``."""
        storage = saved.untyped_storage()
        pointer = storage.data_ptr()
        if storage.nbytes() < SMALLEST_BYTES or pointer in self._staying:
            return saved
        if pointer not in self._index:
            self._index[pointer] = len(self.storages)
            whole = torch.empty(0, dtype=torch.uint8, device=saved.device)
            self.storages.append(whole.set_(storage, 0, (storage.nbytes(),), (1,)))
            self.sizes.append(storage.nbytes())
        return ActivationReference(
            self._index[pointer],
            saved.dtype,
            int(saved.storage_offset()),
            saved.size(),
            saved.stride(),
        )

    def get(self, reference: ActivationReference) -> torch.Tensor:
        """The tensor again, on the device."""
        storage = self.storages[reference.storage]
        view = torch.empty(0, dtype=reference.dtype, device=storage.device)
        return view.set_(
            storage.untyped_storage(), reference.offset, reference.size, reference.stride
        )

    @property
    def num_bytes(self) -> int:
        """What they take on the host."""
        return sum(align(size) for size in self.sizes)

    @property
    def is_away(self) -> bool:
        """The device memory was given back."""
        return bool(self.sizes) and not self.storages


class ActivationOffload:
    """Sends saved activations to the host, and brings them back in time."""

    def __init__(
        self,
        device: torch.device,
        *,
        timeout_seconds: float,
        jitter: Callable[[], float] | None,
        tracer: Tracer | None = None,
    ) -> None:
        """Start both lanes; host memory is taken when the first step needs it."""
        self._device = device
        self._out, self._back = (
            Lane(name, device, timeout_seconds=timeout_seconds, jitter=jitter, tracer=tracer)
            for name in ("offload", "reload")
        )
        self._arenas: dict[tuple[int, int], Arena] = {}
        self._leaving: collections.deque[SavedActivations] = collections.deque()
        self._returning: collections.deque[SavedActivations] = collections.deque()

    def close(self) -> None:
        """End the lanes and give the host memory back."""
        self._out.close()
        self._back.close()
        self.begin()
        for arena in self._arenas.values():
            arena.close()

    def begin(self) -> None:
        """Begin a wave: what an interrupted one left is forgotten."""
        self._leaving.clear()
        self._returning.clear()

    def send(self, layer: int, number: int, saved: SavedActivations) -> None:
        """Queue the copies to the host; waits while too many are on their way.

        Args:
            layer: that saved them.
            number: of the micro-batch in its wave.
            saved: complete.
        """
        if saved.sizes:
            saved.host, saved.layer = self._host(layer, number, saved.num_bytes), layer
            saved.left = self._out.submit(
                _copies(saved, out=True), [Mark.here(self._device)], label=f"layer {layer}"
            )
        self._leaving.append(saved)
        while len(self._leaving) > IN_FLIGHT:
            gone = self._leaving.popleft()
            if gone.left is not None:
                gone.left.synchronize()
                gone.storages = []

    def turn(self, order: Iterable[SavedActivations]) -> None:
        """Backward begins; it needs what was saved in this order. What has not left yet stays."""
        self._leaving.clear()
        self._returning.extend(order)
        self._fetch_next()

    def arrive(self, saved: SavedActivations) -> None:
        """Have the next in order on the device, and the one after it on its way.

        Call before the compute on ``saved`` is queued: copies wait for what is queued.
        """
        assert not self._returning or self._returning[0] is not saved, "fetched out of order"
        self._fetch_next()
        if saved.returned is not None:
            saved.returned.wait_on_stream()

    def _fetch_next(self) -> None:
        if not self._returning:
            return
        saved = self._returning.popleft()
        if saved.is_away:
            saved.storages = [
                torch.empty(size, dtype=torch.uint8, device=self._device) for size in saved.sizes
            ]
            saved.returned = self._back.submit(
                _copies(saved, out=False), [Mark.here(self._device)], label=f"layer {saved.layer}"
            )

    def _host(self, layer: int, number: int, num_bytes: int) -> torch.Tensor:
        arena = self._arenas.get((layer, number))
        if arena is None or arena.num_bytes < num_bytes:
            if arena is not None:
                arena.close()
            arena = Arena(
                num_bytes, name="offloaded activations", register_cuda=self._device.type == "cuda"
            )
            self._arenas[layer, number] = arena
        return arena.tensor(0, arena.num_bytes, torch.uint8)


def _copies(saved: SavedActivations, *, out: bool) -> Callable[[], None]:
    """The work of a lane: every storage to its place on the host, or back from there."""
    storages, host = saved.storages, saved.host
    assert host is not None

    def work() -> None:
        offset = 0
        for storage in storages:
            place = host[offset : offset + storage.numel()]
            target, source = (place, storage) if out else (storage, place)
            target.copy_(source, non_blocking=True)
            offset += align(storage.numel())

    return work
