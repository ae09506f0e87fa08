"""Gradient accumulators on the device: a few that take turns, or one a layer over several waves.

Invariant: an accumulator is overwritten only after what it held was returned.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from headrace.engine.slots import GradientSlot
from headrace.store.ranges import section_shard

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from headrace.engine.exposure import Exposure
    from headrace.store.ranges import Share
    from headrace.store.sections import Section


class Accumulators:
    """The float32 gradient buffers of a step, allocated when the first step needs them."""

    def __init__(
        self,
        sections: Sequence[tuple[Section, ...]],
        share: Share,
        *,
        num_slots: int,
        device: torch.device,
        exposure: Exposure,
    ) -> None:
        """Allocate nothing yet.

        Args:
            sections: of all units; each has a gradient of its own.
            share: of the gradients that returns: an exchange between ranks adds to their sizes.
            num_slots: accumulators that sections of layers take turns in.
            device: of compute.
            exposure: told of waits.
        """
        self._sections = sections
        self._sizes = [
            [section_shard(part.layout, share).gradient_size for part in parts]
            for parts in sections
        ]
        counts = [len(parts) for parts in sections[1:-1]]
        self._first = [0, *itertools.accumulate(counts)]  # number of each layer's first section
        self._num_slots = num_slots
        self._device = device
        self._exposure = exposure
        self._layers: list[GradientSlot] = []
        self._ends: tuple[GradientSlot, GradientSlot] | None = None

    def prepare(self, *, num_waves: int) -> None:
        """Allocate for a step: several waves sum every layer until the last one."""
        every = [size for unit in self._sizes[1:-1] for size in unit]
        wanted = len(every) if num_waves > 1 else min(self._num_slots, len(every))
        if len(self._layers) < wanted:
            for slot in self._layers:
                self._exposure.reuse(slot)
            sizes = every if wanted == len(every) else [max(every)] * wanted
            shared = wanted < len(every)
            self._layers = [GradientSlot(size, self._device, shared=shared) for size in sizes]

    def begin(self, unit: int, summed: Collection[str], section: int = 0) -> None:
        """Free an accumulator, before anything of a step is added to it.

        Args:
            unit: whose; the ends before the first head, which adds to a tied embedding's.
            summed: parameters whose gradients are added in place.
            section: of the unit.
        """
        if unit == 0:
            slot = self.embed
        elif unit == len(self._sections) - 1:
            slot = self.head
        else:
            slot = self.layer(unit - 1, section)
        self._exposure.reuse(slot).begin(self._sections[unit][section].layout, summed)

    def layer(self, layer: int, section: int = 0) -> GradientSlot:
        """The accumulator of a layer's section."""
        return self._layers[(self._first[layer] + section) % len(self._layers)]

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
                GradientSlot(self._sizes[0][0], self._device),
                GradientSlot(self._sizes[-1][0], self._device),
            )
        return self._ends
