"""Global-norm clipping while updates overlap backward: when to update before the norm is known.

``deferred`` updates nothing before the norm of all gradients is known: bitwise the plain order.
``optimistic`` updates a chunk as its gradient lands, as if nothing were clipped, and corrects it
before its next use if the norm turns out to exceed the limit. ``auto`` starts deferred, measures
what waiting costs and how often clipping strikes, and changes over when that pays.

Pure: decides, waits for nothing.
"""

from __future__ import annotations

import logging
import math
from typing import Literal

ClippingMode = Literal["auto", "deferred", "optimistic"]

# Gates of an early update: within them the correction's error stays below 3e-6 of a step.
FIRST_EARLY_STEP = 10
LARGEST_RATIO = 16.0

_SMOOTHING = 0.9
_WORTHWHILE = 0.02  # of the step
_OFTEN = 0.5
_logger = logging.getLogger(__name__)


def clip_coefficient(norm: float, max_grad_norm: float | None) -> float:
    """What gradients are multiplied by, as ``torch.nn.utils.clip_grad_norm_`` computes it."""
    if max_grad_norm is None or max_grad_norm <= 0:
        return 1.0
    return min(1.0, max_grad_norm / (norm + 1e-6))


class ClippingPolicy:
    """Says before each step whether chunks may be updated before the norm is known."""

    def __init__(self, mode: ClippingMode, *, host_computes: bool) -> None:
        """Begin a run.

        Args:
            mode: what the user asked for.
            host_computes: the host's cores run the model too (a CPU device): updating early then
                takes them from backward and gains nothing.
        """
        self._mode = mode
        self._host_computes = host_computes
        self._optimistic = mode == "optimistic"
        self._clip_rate = 1.0
        self._deferral_cost: float | None = None

    def may_update_early(self, step: int) -> bool:
        """Whether the optimizer step ``step`` (from 1) may update before the norm is known."""
        return self._optimistic and step >= FIRST_EARLY_STEP

    def observe(self, *, coefficient: float, exposed_update: float, step_seconds: float) -> None:
        """Learn from a finished step.

        Args:
            coefficient: the clipping coefficient of the step.
            exposed_update: seconds that the step waited for updates of the step before.
            step_seconds: the step's duration.
        """
        clipped = float(coefficient < 1.0)
        self._clip_rate = _SMOOTHING * self._clip_rate + (1 - _SMOOTHING) * clipped
        if self._mode != "auto" or self._host_computes or step_seconds <= 0:
            return
        if not self._optimistic:
            share = exposed_update / step_seconds
            before = share if self._deferral_cost is None else self._deferral_cost
            self._deferral_cost = _SMOOTHING * before + (1 - _SMOOTHING) * share
        # A clipped optimistic step corrects every unit, which costs what deferring costs.
        gain = (self._deferral_cost or 0.0) * (1 - self._clip_rate)
        wanted = gain > _WORTHWHILE and self._clip_rate < _OFTEN
        if wanted != self._optimistic:
            self._optimistic = wanted
            _logger.info(
                "clipping is now %s: waiting for updates takes %.1f%% of a step, %.0f%% of steps "
                "are clipped",
                "optimistic" if wanted else "deferred",
                100 * (self._deferral_cost or 0.0),
                100 * self._clip_rate,
            )


class ChunkGate:
    """Lets a chunk through whose gradient looks like the ones before it."""

    def __init__(self) -> None:
        self._mean_square: float | None = None

    def admits(self, norm: float, num_elements: int) -> bool:
        """Whether the gradient is finite and its RMS at most 16 times the running RMS."""
        if self._mean_square is None or not math.isfinite(norm):
            return False
        return norm * norm / num_elements <= LARGEST_RATIO**2 * self._mean_square

    def observe(self, norm: float, num_elements: int) -> None:
        """Learn from a step that was not skipped."""
        square = norm * norm / num_elements
        before = square if self._mean_square is None else self._mean_square
        self._mean_square = _SMOOTHING * before + (1 - _SMOOTHING) * square
