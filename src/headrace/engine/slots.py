"""Windows on the device: weight slots, and the hooks that let a kept graph forget its weights.

Invariants: a slot is refilled only after its last reader; a graph kept from forward to backward
holds no weight, only where in the slot it lay, and finds it again in the slot that holds the
layer when backward runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.engine.offload import ActivationReference
from headrace.kernels.sums import add, overwrite
from headrace.store.layout import align

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headrace.engine.lanes import Mark, Ticket
    from headrace.engine.offload import SavedActivations
    from headrace.store.layout import UnitLayout


class Slot:
    """One flat buffer of weights on the device.

    Attributes:
        flat: ``(size,)`` in the compute dtype.
        full: float32, the values of parameters that are computed in float32 although the state
            is split (see :attr:`headrace.store.layout.ParamSpec.low_offset`).
        sent: the transfer that begins to fill it.
        ready: the one that completes it: the same, or an exchange between ranks; None for a slot
            that is never filled.
        free: the point after its last reader.
    """

    def __init__(
        self, size: int, dtype: torch.dtype, device: torch.device, *, full_size: int = 0
    ) -> None:
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        self.full = torch.zeros(full_size, dtype=torch.float32, device=device)
        self.sent: Ticket | None = None
        self.ready: Ticket | None = None
        self.free: Mark | None = None
        self._leaves: dict[int, dict[str, torch.Tensor]] = {}

    @classmethod
    def over(cls, flat: torch.Tensor, *, full_size: int = 0) -> Slot:
        """A slot that is the unit's own working weights, always filled."""
        slot = cls(0, flat.dtype, flat.device, full_size=full_size)
        slot.flat = flat
        return slot

    def parameters(self, layout: UnitLayout) -> dict[str, torch.Tensor]:
        """The unit's parameters and buffers by local name: leaves that alias the slot.

        Trainable ones require grad. They are made once a layout structure: gradients are taken
        with ``torch.autograd.grad``, so nothing accumulates in them.
        """
        key = hash(tuple((p.local_name, p.shape, p.offset, p.trainable) for p in layout.params))
        if key not in self._leaves:
            places = self._full_places(layout)
            self._leaves[key] = {
                p.local_name: places.get(p.local_name, self.flat[p.slice])
                .view(p.shape)
                .detach()
                .requires_grad_(p.trainable)
                for p in layout.params
            }
        return self._leaves[key]

    @torch.no_grad()
    def expand(self, layout: UnitLayout) -> None:
        """Join both halves of float32 parameters; call once the slot is filled."""
        places = self._full_places(layout)
        for param in layout.float32_params if places else ():
            high, low = self.flat[param.slice], self.flat[param.low_slice]
            if self.flat.dtype == torch.float32:  # halves were upcast on their way in
                high_bits, low_bits = high.view(torch.int32), low.view(torch.int32) >> 16
            else:
                high_bits = high.view(torch.int16).to(torch.int32) << 16
                low_bits = low.view(torch.int16).to(torch.int32)
            places[param.local_name].copy_((high_bits + low_bits).view(torch.float32))

    def _full_places(self, layout: UnitLayout) -> dict[str, torch.Tensor]:
        if not self.full.numel():
            return {}
        places, offset = {}, 0
        for param in layout.float32_params:
            places[param.local_name] = self.full[offset : offset + param.numel]
            offset = align(offset + param.numel)
        return places

    def poison(self) -> None:
        """Overwrite with NaN: whoever still reads it is found out."""
        self.flat.fill_(float("nan"))
        self.full.fill_(float("nan"))


def full_size(layout: UnitLayout) -> int:
    """Elements of :attr:`Slot.full` that a unit needs."""
    return sum(align(param.numel) for param in layout.float32_params)


@dataclass(frozen=True)
class _WeightReference:
    """Where a saved weight lay in its slot: in ``flat``, or in ``full``."""

    full: bool
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class KeptGraph:
    """The graph of one layer and micro-batch, kept without its weights.

    Use :meth:`hooks` around the layer's forward in ``slot``; before backward, :meth:`rebind` to
    the slot that then holds the layer.

    Attributes:
        activations: what holds the rest, so that it can leave the device; None leaves it to
            autograd.
    """

    def __init__(self, slot: Slot, activations: SavedActivations | None = None) -> None:
        self.activations = activations
        self._flat, self._full = slot.flat, slot.full
        self._flat_storage = slot.flat.untyped_storage().data_ptr()
        # An empty tensor's storage has no address of its own.
        self._full_storage = slot.full.untyped_storage().data_ptr() if slot.full.numel() else -1

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Saved-tensor hooks that store references in place of weights."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def rebind(self, slot: Slot) -> None:
        """Let backward read the weights from ``slot``."""
        self._flat, self._full = slot.flat, slot.full

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def _pack(self, saved: torch.Tensor) -> torch.Tensor | _WeightReference | ActivationReference:
        storage = saved.untyped_storage().data_ptr()
        if storage not in (self._flat_storage, self._full_storage):
            # An operator that saves its own result would hold, through this hook, what holds it:
            # a graph that is dropped without its backward would never be freed.
            saved = saved if saved.grad_fn is None else saved.detach()
            return saved if self.activations is None else self.activations.put(saved)
        full = storage == self._full_storage
        source = self._full if full else self._flat
        assert saved.dtype == source.dtype, "a weight was saved under another dtype"
        return _WeightReference(full, int(saved.storage_offset()), saved.size(), saved.stride())

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _WeightReference):
            source = self._full if packed.full else self._flat
            return source.as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, ActivationReference):
            assert self.activations is not None
            return self.activations.get(packed)
        assert isinstance(packed, torch.Tensor)
        return packed


class GradientSlot:
    """One flat float32 accumulator on the device, and views by parameter.

    Attributes:
        flat: ``(num_trainable,)`` float32.
        shared: other units take turns in it: what it holds must leave it before they do.
        returned: the transfer that last read it; it may be overwritten once that is done.
    """

    def __init__(self, size: int, device: torch.device, *, shared: bool = False) -> None:
        self.flat = torch.zeros(size, dtype=torch.float32, device=device)
        self.shared = shared
        self.returned: Ticket | None = None
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._unwritten: dict[str, torch.Tensor] = {}

    def views(self, layout: UnitLayout) -> dict[str, torch.Tensor]:
        """One view a trainable parameter by local name, in layout order."""
        key = hash(tuple((p.local_name, p.shape, p.offset) for p in layout.params if p.trainable))
        if key not in self._views:
            self._views[key] = {
                p.local_name: self.flat[p.slice].view(p.shape) for p in layout.params if p.trainable
            }
        return self._views[key]

    @torch.no_grad()
    def begin(self, layout: UnitLayout, summed: Collection[str]) -> None:
        """Forget what an earlier unit or step left.

        Args:
            layout: of the unit whose gradient comes.
            summed: parameters whose views are added to by others: they are zeroed now. The first
                gradient of any other overwrites.
        """
        views = self.views(layout)
        if layout.num_trainable != sum(view.numel() for view in views.values()):
            self.flat[: layout.num_trainable].zero_()  # alignment gaps return, too
        elif zeroed := [view for name, view in views.items() if name in summed]:
            torch._foreach_zero_(zeroed)
        self._unwritten = {name: view for name, view in views.items() if name not in summed}

    def add(self, layout: UnitLayout, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients in layout order; None where there is none of this micro-batch."""
        copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        sums: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for (name, view), gradient in zip(self.views(layout).items(), gradients, strict=True):
            if gradient is not None:
                pair = sums if self._unwritten.pop(name, None) is None else copies
                pair[0].append(view)
                pair[1].append(gradient)
        if copies[0]:
            overwrite(*copies)
        if sums[0]:
            add(*sums)

    def finish(self) -> None:
        """The unit's gradient is complete: a parameter that got none (an idle expert) has zero."""
        if self._unwritten:
            torch._foreach_zero_(list(self._unwritten.values()))
            self._unwritten = {}
