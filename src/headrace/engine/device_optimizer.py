"""Updates of units whose state lives on the device, in the compute stream.

Invariant: the same chunks, groups, norms and factors as on the host, bitwise the same result.
Nothing is updated before the norm of all gradients is known: on the device that costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.engine.lanes import Mark
from headrace.kernels import device as kernels
from headrace.kernels.coefficients import coefficients

if TYPE_CHECKING:
    from headrace.engine.host_optimizer import Chunk, HostOptimizer, UpdateSettings
    from headrace.engine.norms import BlockNorms
    from headrace.engine.slots import GradientSlot
    from headrace.store.state import ModelState


class DeviceOptimizer:
    """Keeps the gradients of units on the device until the norm is known, then applies them."""

    def __init__(
        self,
        state: ModelState,
        host: HostOptimizer,
        norms: BlockNorms,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Nothing is allocated before the first step.

        Args:
            state: what it updates.
            host: has the chunks, and the factors of each.
            norms: where the norms of retained gradients go.
            device: of the state.
            dtype: what gradients are rounded to, as on their way to the host.
        """
        self._state = state
        self._host = host
        self._norms = norms
        self._device = device
        self._dtype = dtype
        self._retained: dict[int, torch.Tensor] = {}
        self._landed: list[Mark | None] = [None] * state.device_units

    def retain(self, unit: int, slot: GradientSlot) -> None:
        """Keep a unit's complete gradient until its update.

        A slot of the unit's own keeps it in place; one that is shared, or that other ranks'
        parts lie in, may be overwritten by later compute.
        """
        piece = self._state.shards[unit].sections[0].trained  # units on the device are whole
        source = slot.flat[piece.start : piece.stop]
        moves = slot.shared or not self._state.shards[unit].is_whole
        if moves:
            retained = self.reserve(unit)
        else:
            retained = self._retained[unit] = source.view(self._dtype)[: source.numel()]
        for chunk in self._host.chunks[unit]:
            part = self._host.own(chunk)
            if retained.dtype != source.dtype or moves:
                # In place a chunk lands on float32 values that it, or one before, was read from.
                retained[part] = source[part].to(self._dtype)
            self._norms.record(chunk, retained[part])
        self._landed[unit] = Mark.here(self._device)

    def reserve(self, unit: int) -> torch.Tensor:
        """Memory for the gradient of a unit that does not stay in its slot."""
        retained = self._retained.get(unit)
        if retained is None:
            size = self._state.shards[unit].num_trained
            retained = torch.empty(size, dtype=self._dtype, device=self._device)
            self._retained[unit] = retained
        return retained

    def wait(self) -> None:
        """Block the host until the norms of retained gradients are known."""
        for mark in self._landed:
            if mark is not None:
                mark.synchronize()

    def update(self, chunk: Chunk, settings: UpdateSettings) -> None:
        """AdamW on a chunk, ordered after the compute stream's work so far."""
        self._state.before_update(chunk.unit)
        unit = self._state.units[chunk.unit]
        part = self._host.own(chunk)
        factors = coefficients(
            grad_scale=settings.gradient_scale, **self._host.factors(chunk, settings)
        )
        moments = unit.exp_avg[part], unit.exp_avg_sq[part]
        gradient = self._retained[chunk.unit][part]
        if unit.remainder is None:
            kernels.adamw_float32(unit.weights[part], *moments, gradient, c=factors)
        else:
            kernels.adamw_split(
                unit.weights[part], unit.remainder[part], *moments, gradient, c=factors
            )

    def gradient(self, unit: int) -> torch.Tensor:
        """The retained gradient of a unit, flat; of several ranks this one's part."""
        return self._retained[unit]
