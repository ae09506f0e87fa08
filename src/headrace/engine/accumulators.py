"""Gradient accumulators on the device: a few that take turns, or one a layer over several waves.

Invariant: an accumulator is overwritten only after what it held was returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.engine.slots import GradientSlot

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from headrace.engine.exposure import Exposure
    from headrace.store.layout import UnitLayout


class Accumulators:
    """The float32 gradient buffers of a step, allocated when the first step needs them."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        sizes: Sequence[int],
        *,
        num_slots: int,
        device: torch.device,
        exposure: Exposure,
    ) -> None:
        """Allocate nothing yet.

        Args:
            layouts: of all units.
            sizes: elements of each one's gradient, with what an exchange between ranks adds.
            num_slots: accumulators that layers take turns in.
            device: of compute.
            exposure: told of waits.
        """
        self._layouts = layouts
        self._sizes = sizes
        self._num_slots = num_slots
        self._device = device
        self._exposure = exposure
        self._layers: list[GradientSlot] = []
        self._ends: tuple[GradientSlot, GradientSlot] | None = None

    def prepare(self, *, num_waves: int) -> None:
        """Allocate for a step: several waves sum every layer until the last one."""
        layers = self._layouts[1:-1]
        wanted = len(layers) if num_waves > 1 else min(self._num_slots, len(layers))
        if len(self._layers) < wanted:
            for slot in self._layers:
                self._exposure.reuse(slot)
            if wanted == len(layers):
                sizes = list(self._sizes[1:-1])
            else:
                sizes = [max(self._sizes[1:-1])] * wanted
            shared = wanted < len(layers)
            self._layers = [GradientSlot(size, self._device, shared=shared) for size in sizes]

    def begin(self, unit: int, summed: Collection[str]) -> None:
        """Free a unit's accumulator, before anything of a step is added to it.

        Args:
            unit: which; the ends before the first head, which adds to a tied embedding's.
            summed: parameters whose gradients are added in place.
        """
        if unit == 0:
            slot = self.embed
        elif unit == len(self._layouts) - 1:
            slot = self.head
        else:
            slot = self.layer(unit - 1)
        self._exposure.reuse(slot).begin(self._layouts[unit], summed)

    def layer(self, layer: int) -> GradientSlot:
        """A layer's accumulator."""
        return self._layers[layer % len(self._layers)]

    @property
    def embed(self) -> GradientSlot:
        """The embedding's accumulator, and a tied head's."""
        return self._pair()[0]

    @property
    def head(self) -> GradientSlot:
        """The head's accumulator."""
        return self._pair()[1]

    def _pair(self) -> tuple[GradientSlot, GradientSlot]:
        if self._ends is None:
            self._ends = (
                GradientSlot(self._sizes[0], self._device),
                GradientSlot(self._sizes[-1], self._device),
            )
        return self._ends
