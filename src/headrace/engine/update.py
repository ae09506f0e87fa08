"""Gradients come back, weights are updated: the D2H and update lanes, the norm, clipping.

Invariants: an update consumes the complete gradient of the global batch; with clipping no unit is
updated before the norm of all gradients is known (``deferred``), so the result is bitwise that of
clipping first and updating after; a unit is not sent again before its update is done; a step whose
gradient is not finite leaves the state as it was.

The gradient is returned in ``gradient_dtype``, and its norm is taken of the returned values, over
blocks of fixed length, so that it depends neither on chunks nor on threads.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace import kernels
from headrace.engine.lanes import Lane, Mark, Ticket
from headrace.errors import NumericsError
from headrace.store.arena import Arena
from headrace.store.layout import ParamSpec, plan_segments, split_range

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.engine.config import AdamWConfig, EngineConfig
    from headrace.engine.slots import GradientSlot
    from headrace.store.layout import Segment
    from headrace.store.state import ModelState

NORM_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """What one optimizer step uses everywhere.

    Attributes:
        step: t of the bias correction, 1 for the first update.
        learning_rate: before group scales.
        gradient_scale: the clipping coefficient c, at most 1.
    """

    step: int
    learning_rate: float
    gradient_scale: float


class Updater:
    """Owns returned gradients and applies them to the state."""

    def __init__(
        self,
        state: ModelState,
        optimizer: AdamWConfig,
        config: EngineConfig,
        device: torch.device,
        jitter: Callable[[], float] | None,
    ) -> None:
        """Allocate room for the returned gradients and start both lanes.

        Raises:
            CapacityError: the host cannot hold the returned gradients.
        """
        self.state = state
        self._optimizer = optimizer
        self._device = device
        self._kernels = kernels.load()
        self._pool = self._kernels.Pool(config.update_threads or kernels.num_usable_cores())
        wanted = config.gradient_dtype or state.dtype
        self._dtype = torch.bfloat16 if wanted == "bfloat16" else torch.float32
        self._chunk = max(NORM_BLOCK, config.chunk_bytes // self._dtype.itemsize)
        self._chunk -= self._chunk % NORM_BLOCK
        counts = [layout.num_trainable for layout in state.layouts]
        self._arena = Arena(
            sum(counts) * self._dtype.itemsize,
            name="returned gradients",
            register_cuda=device.type == "cuda",
        )
        self._pending: list[torch.Tensor] = []
        offset = 0
        for count in counts:
            self._pending.append(self._arena.tensor(offset, count, self._dtype))
            offset += count * self._dtype.itemsize
        self._arrays = [_as_numpy(pending) for pending in self._pending]
        num_blocks = [-(-count // NORM_BLOCK) for count in counts]
        self._norms = [torch.zeros(n, dtype=torch.float32, device=device) for n in num_blocks]
        self._segments = [self._plan_segments(i) for i in range(len(counts))]
        timeout = config.lane_timeout_seconds
        self._d2h = Lane("d2h", device, timeout_seconds=timeout, jitter=jitter)
        # Updates run on the host whatever the device: their lane has no stream.
        self._update = Lane("update", torch.device("cpu"), timeout_seconds=timeout, jitter=jitter)
        self._refused: set[tuple[int, int]] = set()  # (unit, first element) of refused updates
        self._returned: list[Ticket | None] = [None] * len(counts)
        self.updated: list[Ticket | None] = [None] * len(counts)

    @property
    def pending_bytes(self) -> int:
        """Host bytes of returned gradients."""
        return self._arena.num_bytes

    def _plan_segments(self, unit: int) -> tuple[Segment, ...]:
        groups = self._optimizer.groups

        def group_of(param: ParamSpec) -> int:
            matrix = len(param.shape) >= 2
            for index, group in enumerate(groups):
                if re.search(group.pattern, param.name):
                    return 2 * index + matrix
            return 2 * len(groups) + matrix

        return plan_segments(self.state.layouts[unit], group_of)

    def _group_settings(self, group: int) -> tuple[float, float]:
        """Learning-rate scale and weight decay of a segment's group."""
        index, matrix = divmod(group, 2)
        scale, decay = 1.0, self._optimizer.weight_decay if matrix else 0.0
        if index < len(self._optimizer.groups):
            overrides = self._optimizer.groups[index]
            scale = overrides.learning_rate_scale
            if overrides.weight_decay is not None:
                decay = overrides.weight_decay
        return scale, decay

    def return_gradient(
        self, unit: int, slot: GradientSlot, overlap: UpdateSettings | None
    ) -> Ticket | None:
        """Send a unit's complete gradient to the host; with ``overlap`` update it as it lands."""
        count = self.state.layouts[unit].num_trainable
        if count == 0:
            return None
        source = slot.flat[:count]
        pending, norms = self._pending[unit], self._norms[unit]
        after: list[Ticket | Mark | None] = [Mark.here(self._device), self.updated[unit]]
        tickets = []
        for start, stop in split_range(0, count, self._chunk):

            def work(start: int = start, stop: int = stop) -> None:
                piece = source[start:stop]
                if self._device.type == "cuda":
                    piece = piece.to(self._dtype)
                    landed = piece
                    pending[start:stop].copy_(piece, non_blocking=True)
                else:
                    pending[start:stop].copy_(piece)
                    landed = pending[start:stop]
                blocks = slice(start // NORM_BLOCK, -(-stop // NORM_BLOCK))
                _block_norms(landed, norms[blocks])

            ticket = self._d2h.submit(work, after)
            after = []
            tickets.append(ticket)
            if overlap is not None:
                self.updated[unit] = self._submit(unit, start, stop, overlap, ticket)
        slot.returned = tickets[-1]
        self._returned[unit] = tickets[-1]
        return tickets[-1]

    def _submit(
        self, unit: int, start: int, stop: int, settings: UpdateSettings, after: Ticket | None
    ) -> Ticket:
        def work() -> None:
            if after is not None:
                after.synchronize()
            self._apply(unit, start, stop, settings, self._step_kernel)
            if after is None:  # deferred: the norm is known to be finite
                self._raise_if_refused()

        return self._update.submit(work)

    @property
    def _step_kernel(self) -> Any:
        split = self.state.dtype == "bfloat16"
        return self._kernels.adamw_split if split else self._kernels.adamw_float32

    @property
    def _inverse_kernel(self) -> Any:
        split = self.state.dtype == "bfloat16"
        return self._kernels.invert_split if split else self._kernels.invert_float32

    def _apply(
        self,
        unit: int,
        start: int,
        stop: int,
        settings: UpdateSettings,
        kernel: Any,
        *,
        skip: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        planes = self.state.units[unit]
        for segment in self._segments[unit]:
            a, b = max(start, segment.start), min(stop, segment.stop)
            if a >= b or (unit, a) in skip:
                continue
            scale, decay = self._group_settings(segment.group)
            weights: list[NDArray[Any]]
            if planes.weight_array is not None:
                weights = [planes.weight_array[a:b]]
            else:
                assert planes.weight_bits is not None
                assert planes.remainder_array is not None
                weights = [planes.weight_bits[a:b], planes.remainder_array[a:b]]
            applied = kernel(
                *weights,
                planes.exp_avg_array[a:b],
                planes.exp_avg_sq_array[a:b],
                self._arrays[unit][a:b],
                step=settings.step,
                learning_rate=settings.learning_rate * scale,
                beta1=self._optimizer.beta1,
                beta2=self._optimizer.beta2,
                eps=self._optimizer.eps,
                weight_decay=decay,
                grad_scale=settings.gradient_scale,
                pool=self._pool,
            )
            if not applied:
                self._refused.add((unit, a))

    def _raise_if_refused(self) -> None:
        """A refusal with a finite norm means that the weights themselves ran away."""
        if self._refused:
            unit, start = min(self._refused)
            layout = self.state.layouts[unit]
            name = next(p.name for p in reversed(layout.params) if p.offset <= start)
            raise NumericsError(
                f"the update of {name} would leave the range of its type; it was not applied",
                remedy="resume from the last checkpoint with a lower learning_rate",
            )

    def gradient_norm(self) -> float:
        """The 2-norm of all returned gradients; waits until they have landed."""
        for ticket in self._returned:
            if ticket is not None:
                ticket.synchronize()
        blocks = torch.cat(self._norms) if self._norms else torch.zeros(1)
        return math.sqrt(math.fsum(x * x for x in blocks.double().cpu().tolist()))

    def apply_all(self, settings: UpdateSettings) -> None:
        """Queue the update of every unit, in order of its next use."""
        self.state.optimizer_step = settings.step
        for unit, layout in enumerate(self.state.layouts):
            for start, stop in split_range(0, layout.num_trainable, self._chunk):
                self.updated[unit] = self._submit(unit, start, stop, settings, None)

    def undo_all(self, settings: UpdateSettings) -> None:
        """Invert what an overlapped step applied, using the gradients that are still here."""
        self.synchronize()
        refused = frozenset(self._refused)
        self._refused.clear()
        for unit, layout in enumerate(self.state.layouts):
            for start, stop in split_range(0, layout.num_trainable, self._chunk):

                def work(unit: int = unit, start: int = start, stop: int = stop) -> None:
                    self._apply(unit, start, stop, settings, self._inverse_kernel, skip=refused)

                self.updated[unit] = self._update.submit(work)

    def synchronize(self) -> None:
        """Wait until the state holds every queued update."""
        for ticket in self.updated:
            if ticket is not None:
                ticket.synchronize()

    def finish_overlapped(self, norm: float, settings: UpdateSettings) -> bool:
        """Settle a step that updated as gradients landed; False if it was undone.

        Raises:
            NumericsError: gradients were finite but an update was refused.
        """
        if not math.isfinite(norm):
            self.undo_all(settings)
            return False
        self.synchronize()
        self._raise_if_refused()
        self.state.optimizer_step = settings.step
        return True

    def close(self) -> None:
        """Finish both lanes and give the returned gradients' memory back."""
        self._d2h.close()
        self._update.close()
        self._pool.close()
        self._pending.clear()
        self._arrays.clear()
        self._arena.close()


def clip_coefficient(norm: float, max_grad_norm: float | None) -> float:
    """What gradients are multiplied by, as ``torch.nn.utils.clip_grad_norm_`` computes it."""
    if max_grad_norm is None or max_grad_norm <= 0:
        return 1.0
    return min(1.0, max_grad_norm / (norm + 1e-6))


def check_finite_state(norm: float, num_skipped: int, limit: int) -> None:
    """Stop a run whose gradients stay non-finite: skipping no longer helps.

    Raises:
        NumericsError: ``limit`` steps in a row were skipped.
    """
    if not math.isfinite(norm) and num_skipped >= limit:
        raise NumericsError(
            f"{num_skipped} steps in a row had a gradient that is not finite",
            remedy="lower learning_rate, or look at the data of these steps",
        )


def _block_norms(values: torch.Tensor, out: torch.Tensor) -> None:
    whole = values.numel() // NORM_BLOCK
    if whole:
        blocks = values[: whole * NORM_BLOCK].view(whole, NORM_BLOCK)
        torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float32, out=out[:whole])
    if whole < out.numel():
        out[whole:] = torch.linalg.vector_norm(values[whole * NORM_BLOCK :], dtype=torch.float32)


def _as_numpy(tensor: torch.Tensor) -> Any:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
