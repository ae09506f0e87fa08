"""Windows on the device: weight slots, and the hooks that let a kept graph forget its weights.

Invariants: a slot is refilled only after its last reader; a graph kept from forward to backward
holds no weight, only where in the slot it lay, and finds it again in the slot that holds the
layer when backward runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from headrace.engine.lanes import Mark, Ticket
    from headrace.store.layout import UnitLayout


class Slot:
    """One flat buffer of weights on the device.

    Attributes:
        flat: ``(size,)`` in the compute dtype.
        ready: the transfer that filled it; None for a slot that is never filled.
        free: the point after its last reader.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        self.ready: Ticket | None = None
        self.free: Mark | None = None
        self._leaves: dict[int, dict[str, torch.Tensor]] = {}

    @classmethod
    def over(cls, flat: torch.Tensor) -> Slot:
        """A slot that is the unit's own working weights, always filled."""
        slot = cls(0, flat.dtype, flat.device)
        slot.flat = flat
        return slot

    def parameters(self, layout: UnitLayout) -> dict[str, torch.Tensor]:
        """The unit's parameters by local name: leaves that alias the slot.

        Trainable ones require grad. They are made once a layout structure: gradients are taken
        with ``torch.autograd.grad``, so nothing accumulates in them.
        """
        key = hash(tuple((p.local_name, p.shape, p.offset, p.trainable) for p in layout.params))
        if key not in self._leaves:
            self._leaves[key] = {
                p.local_name: self.flat[p.slice].view(p.shape).detach().requires_grad_(p.trainable)
                for p in layout.params
            }
        return self._leaves[key]

    def poison(self) -> None:
        """Overwrite with NaN: whoever still reads it is found out."""
        self.flat.fill_(float("nan"))


@dataclass(frozen=True)
class _WeightReference:
    """Where a saved weight lay in its slot."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class KeptGraph:
    """The graph of one layer and micro-batch, kept without its weights.

    Use :meth:`hooks` around the layer's forward in ``slot``; before backward, :meth:`rebind` to
    the slot that then holds the layer.
    """

    def __init__(self, slot: Slot) -> None:
        self._storage = slot.flat.untyped_storage().data_ptr()
        self._dtype = slot.flat.dtype
        self._flat = slot.flat

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Saved-tensor hooks that store references in place of weights."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def rebind(self, slot: Slot) -> None:
        """Let backward read the weights from ``slot``."""
        self._flat = slot.flat

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def _pack(self, saved: torch.Tensor) -> torch.Tensor | _WeightReference:
        if saved.untyped_storage().data_ptr() != self._storage:
            return saved
        assert saved.dtype == self._dtype, "a weight was saved under another dtype"
        return _WeightReference(int(saved.storage_offset()), saved.size(), saved.stride())

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _WeightReference):
            return self._flat.as_strided(packed.size, packed.stride, packed.offset)
        assert isinstance(packed, torch.Tensor)
        return packed


class GradientSlot:
    """One flat float32 accumulator on the device, and views by parameter.

    Attributes:
        flat: ``(num_trainable,)`` float32.
        returned: the transfer that last read it; it may be overwritten once that is done.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.flat = torch.zeros(size, dtype=torch.float32, device=device)
        self.returned: Ticket | None = None
        self._views: dict[int, list[torch.Tensor]] = {}

    def views(self, layout: UnitLayout) -> list[torch.Tensor]:
        """One view a trainable parameter, in layout order."""
        key = hash(tuple((p.shape, p.offset) for p in layout.params if p.trainable))
        if key not in self._views:
            self._views[key] = [
                self.flat[p.slice].view(p.shape) for p in layout.params if p.trainable
            ]
        return self._views[key]

    def add(self, layout: UnitLayout, gradients: list[torch.Tensor | None], *, first: bool) -> None:
        """Add gradients in layout order; ``first`` overwrites what an earlier layer left.

        A parameter without a gradient (an idle expert) counts as zero.
        """
        views = self.views(layout)
        present = [
            (view, gradient)
            for view, gradient in zip(views, gradients, strict=True)
            if gradient is not None
        ]
        if first:
            if len(present) < len(views) or layout.num_trainable != sum(
                view.numel() for view in views
            ):
                # Alignment gaps and idle parameters must read as zero; both are rare.
                self.flat[: layout.num_trainable].zero_()
            torch._foreach_copy_([v for v, _ in present], [g for _, g in present])
        else:
            torch._foreach_add_([v for v, _ in present], [g for _, g in present])
