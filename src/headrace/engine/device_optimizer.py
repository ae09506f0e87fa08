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
    from headrace.engine.slots import GradientSlot
    from headrace.engine.update import BlockNorms
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
        """Allocate room for the retained gradients (``dtype``, one element a parameter)."""
        self._state = state
        self._host = host
        self._norms = norms
        self._device = device
        self._retained = [
            torch.zeros(layout.num_trainable, dtype=dtype, device=device)
            for layout in state.layouts[: state.device_units]
        ]
        self._landed: list[Mark | None] = [None] * state.device_units

    def retain(self, unit: int, slot: GradientSlot) -> None:
        """Keep a unit's complete gradient; the slot may be overwritten by later compute."""
        retained = self._retained[unit]
        retained.copy_(slot.flat[: retained.numel()])
        for chunk in self._host.chunks[unit]:
            self._norms.record(chunk, retained[chunk.start : chunk.stop])
        self._landed[unit] = Mark.here(self._device)

    def wait(self) -> None:
        """Block the host until the norms of retained gradients are known."""
        for mark in self._landed:
            if mark is not None:
                mark.synchronize()

    def update(self, chunk: Chunk, settings: UpdateSettings) -> None:
        """AdamW on a chunk, ordered after the compute stream's work so far."""
        unit = self._state.units[chunk.unit]
        part = slice(chunk.start, chunk.stop)
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
        """The retained gradient of a unit, flat."""
        return self._retained[unit]
