"""Gradients come back and weights are updated: the D2H and update lanes, the norm, clipping.

Invariants: an update consumes the complete gradient of the global batch; what a step leaves is
that of clipping first and updating after, bitwise where nothing was updated early, else within
the correction's error; a unit is not sent again before its update is done; a step whose gradient
is not finite leaves the state as it was.

With ``weights_first`` every weight is updated before any moment is: the next forward waits for 18
bytes a parameter instead of 26, and the moments follow while it runs. A unit's returned gradient
stays until both have read it.

The gradient returns in ``gradient_dtype`` and stays on the host until the norm is known. The norm
is taken of the returned values (:mod:`headrace.engine.norms`). Of several ranks each returns and
updates its shard of the gradient's sum; all of them know the norm of the whole.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headrace import kernels
from headrace.engine.clipping import ChunkGate
from headrace.engine.device_optimizer import DeviceOptimizer
from headrace.engine.host_optimizer import Chunk, HostOptimizer, UpdateSettings
from headrace.engine.lanes import Lane, Mark, Ticket
from headrace.engine.norms import BlockNorms
from headrace.errors import NumericsError
from headrace.kernels.headroom import Store
from headrace.store.arena import Arena
from headrace.store.ranges import NORM_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.engine.config import AdamWConfig, EngineConfig
    from headrace.engine.exchange import Exchange
    from headrace.engine.slots import GradientSlot
    from headrace.engine.trace import Tracer
    from headrace.store.sections import Section
    from headrace.store.state import ModelState


class Updater:
    """Owns returned gradients and applies them to the state.

    Attributes:
        state: what it updates.
        updated: for each unit what its next dispatch waits for, the last queued update.
    """

    def __init__(
        self,
        state: ModelState,
        optimizer: AdamWConfig,
        config: EngineConfig,
        device: torch.device,
        jitter: Callable[[], float] | None,
        *,
        tracer: Tracer | None = None,
        exchange: Exchange | None = None,
        sections: Sequence[tuple[Section, ...]],
    ) -> None:
        """Allocate room for the returned gradients and start both lanes.

        ``sections`` are what units return in.

        Raises:
            CapacityError: the host cannot hold the returned gradients.
        """
        self.state = state
        self._device = device
        self._exchange = exchange
        self._sections = sections
        wanted = config.gradient_dtype or state.dtype
        self._dtype = torch.bfloat16 if wanted == "bfloat16" else torch.float32
        blocks = max(1, config.chunk_bytes // self._dtype.itemsize // NORM_BLOCK)
        self._optimizer = HostOptimizer(
            state,
            optimizer,
            kernels.load(),
            num_threads=config.update_threads or kernels.num_usable_cores(),
            chunk_elements=blocks * NORM_BLOCK,
            sections=sections,
        )
        counts = [
            0 if unit.on_device else shard.num_trained
            for unit, shard in zip(state.units, state.shards, strict=True)
        ]
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
        self._norms = BlockNorms(
            self._optimizer.segments,
            self._optimizer.chunks,
            pinned=device.type == "cuda",
        )
        self._on_device = DeviceOptimizer(
            state, self._optimizer, self._norms, device=device, dtype=self._dtype
        )
        # By unit and section, what of it is here, each with its place in the section.
        self._places = [
            [
                [(chunk, at) for chunk in chunks if (at := part.place(chunk.start)) is not None]
                for part in parts
            ]
            for parts, chunks in zip(sections, self._optimizer.chunks, strict=True)
        ]
        self._gates = {chunk: ChunkGate() for unit in self._optimizer.chunks for chunk in unit}
        timeout = config.lane_timeout_seconds
        self._tracer = tracer
        self._d2h = Lane("d2h", device, timeout_seconds=timeout, jitter=jitter, tracer=tracer)
        # Updates run on the host whatever the device: their lane has no stream.
        self._update = Lane(
            "update", torch.device("cpu"), timeout_seconds=timeout, jitter=jitter, tracer=tracer
        )
        self._early: set[Chunk] = set()  # updated before the norm was known
        self._weights_first = config.update_order == "weights_first"
        self._late: set[Chunk] = set()  # whose moments are still those of the step before
        self._returned: list[Ticket | None] = [None] * len(counts)
        self._returning = -1  # the unit of which something was sent to the host last
        self.updated: list[Ticket | Mark | None] = [None] * len(counts)
        self._moments_updated: list[Ticket | None] = [None] * len(counts)

    @property
    def pending_bytes(self) -> int:
        """Host bytes of returned gradients."""
        return self._arena.num_bytes

    def return_gradient(
        self,
        unit: int,
        slot: GradientSlot,
        early: UpdateSettings | None,
        section: int = 0,
    ) -> Ticket | None:
        """Send the complete gradient of a unit, or of a section, to the host.

        Args:
            unit: index of the unit.
            slot: holds its gradient; may be overwritten once the returned ticket is done.
            early: update chunks that pass their gate as they land, with these settings.
            section: of a unit that returns in several, one after another.

        Returns:
            The last transfer, or None when there is none: nothing of the unit is trained, or its
            state is on the device and no other rank has a part of it.
        """
        slot.finish()
        on_device = self.state.units[unit].on_device
        if on_device and self._exchange is None:
            self._on_device.retain(unit, slot)
            return None
        after: list[Ticket | Mark | None] = [
            Mark.here(self._device),
            self.updated[unit],
            self._moments_updated[unit],
        ]
        part = self._sections[unit][section]
        label = part.layout.name
        if len(self._sections[unit]) > 1 and self._returning == unit:
            after = after[:1]  # the lane is past the others: they held back what was sent before
        ticket = None
        if self._exchange is not None and part.layout.num_trainable:
            ticket = self._exchange.reduce(unit, section, slot, label)
            after.append(ticket)
        if on_device:
            self._on_device.reserve(unit)  # by the thread that allocates for compute
            ticket = self._d2h.submit(
                lambda: self._on_device.retain(unit, slot),
                after,
                label=label,
            )
            slot.returned = self._returned[unit] = ticket
            return ticket
        for chunk, at in self._places[unit][section]:
            self._returning = unit
            work = self._return_work(chunk, slot, at)
            ticket = self._d2h.submit(work, after, label=label)
            after = []
            if early is not None:
                self.updated[unit] = self._submit_early(chunk, early, ticket)
        slot.returned = ticket
        self._returned[unit] = ticket or self._returned[unit]
        return ticket

    def _return_work(self, chunk: Chunk, slot: GradientSlot, at: int) -> Callable[[], None]:
        source = slot.flat[at : at + chunk.stop - chunk.start]
        target = self._pending[chunk.unit][self._optimizer.own(chunk)]

        def work() -> None:
            landed = target
            if self._device.type == "cuda":
                landed = source.to(self._dtype)
                target.copy_(landed, non_blocking=True)
            else:
                target.copy_(source)
            # The host reads the norms: copied before the event that announces the chunk.
            self._norms.record(chunk, landed)

        return work

    def _submit_early(self, chunk: Chunk, settings: UpdateSettings, landed: Ticket) -> Ticket:
        def work() -> None:
            landed.synchronize()
            norm = self._norms.of(chunk)
            if not self._gates[chunk].admits(norm, chunk.stop - chunk.start):
                return
            bounded = replace(settings, largest_gradient=1.001 * norm)
            if self._optimizer.update(chunk, self._arrays[chunk.unit], bounded):
                self._early.add(chunk)

        return self._update.submit(work, label=self.state.layouts[chunk.unit].name)

    def gradient_norm(self) -> float:
        """The 2-norm of all returned gradients; waits until they have landed."""
        begun = time.perf_counter()
        for ticket in self._returned:
            if ticket is not None:
                ticket.synchronize()
        self._on_device.wait()
        norm = self._norms.total(None if self._exchange is None else self._exchange.joined)
        if self._tracer is not None:
            self._tracer.add_host("clip", "wait for the norm", begun)
        return norm

    def returned_gradient(self, unit: int) -> torch.Tensor:
        """A unit's last gradient as its update sees it, flat; valid until the next step.

        Of several ranks, this one's part.
        """
        if self.state.units[unit].on_device:
            return self._on_device.gradient(unit)
        return self._pending[unit]

    def settle(self, norm: float, settings: UpdateSettings) -> None:
        """Queue what is left to do of a step, every unit in order of its next use.

        Args:
            norm: of all gradients; when it is not finite the step is undone.
            settings: with the clipping coefficient.
        """
        finite = math.isfinite(norm)
        begun = time.perf_counter()
        if self._tracer is not None and self.state.device_units:
            self._tracer.compute("update on the device")
        if finite:
            self.state.optimizer_step = settings.step
        for unit, chunks in zip(self.state.units, self._optimizer.chunks, strict=True):
            for chunk in chunks:
                if unit.on_device:
                    if finite:
                        self._on_device.update(chunk, settings)
                    if self._exchange is not None:  # it is sent from there
                        self.updated[chunk.unit] = Mark.here(self._device)
                    continue
                work = self._undo
                if finite:
                    work = self._finish_weights if self._weights_first else self._finish
                self.updated[chunk.unit] = self._update.submit(
                    _bind(work, chunk, settings), label=unit.layout.name
                )
        if finite and self._weights_first:
            # Backward returns the last unit's gradient first, over the one that is read here.
            for chunks in reversed(self._optimizer.chunks):
                for chunk in chunks:
                    if not self.state.units[chunk.unit].on_device:
                        self._moments_updated[chunk.unit] = self._update.submit(
                            _bind(self._finish_moments, chunk, settings),
                            label=f"{self.state.layouts[chunk.unit].name}, moments",
                        )
        if self._tracer is not None:
            self._tracer.pause()
            self._tracer.add_host("clip", "queue updates", begun)

    def _finish_weights(self, chunk: Chunk, settings: UpdateSettings) -> None:
        self._finish(chunk, settings, Store.WEIGHTS)

    def _finish_moments(self, chunk: Chunk, settings: UpdateSettings) -> None:
        if chunk in self._late:
            self._optimizer.update(chunk, self._arrays[chunk.unit], settings, Store.MOMENTS)
            self._late.remove(chunk)

    def _finish(
        self, chunk: Chunk, settings: UpdateSettings, store: Store = Store.EVERYTHING
    ) -> None:
        gradient = self._arrays[chunk.unit]
        self._gates[chunk].observe(self._norms.of(chunk), chunk.stop - chunk.start)
        if chunk not in self._early:
            done = self._optimizer.update(chunk, gradient, settings, store)
            if store == Store.WEIGHTS:
                self._late.add(chunk)
        else:
            self._early.remove(chunk)
            done = settings.gradient_scale == 1.0 or self._optimizer.correct(
                chunk, gradient, settings, applied_scale=1.0
            )
        if not done:
            raise self._optimizer.refusal(chunk)

    def _undo(self, chunk: Chunk, settings: UpdateSettings) -> None:
        if chunk in self._early:
            self._early.remove(chunk)
            early = UpdateSettings(step=settings.step, learning_rate=settings.learning_rate)
            self._optimizer.invert(chunk, self._arrays[chunk.unit], early)

    def abandon(self) -> bool:
        """Wait for what a failed step has queued; whether the state is as before that step."""
        for ticket in (*self._returned, *self.updated, *self._moments_updated):
            if ticket is not None:
                ticket.synchronize()
        return not self._early

    def synchronize(self) -> None:
        """Wait until the state holds every queued update."""
        for ticket in (*self.updated, *self._moments_updated):
            if ticket is not None:
                ticket.synchronize()
        if self.state.device_units:
            Mark.here(self._device).synchronize()

    def close(self) -> None:
        """Finish both lanes and give the returned gradients' memory back."""
        self._d2h.close()
        self._update.close()
        self._optimizer.close()
        self._pending.clear()
        self._arrays.clear()
        self._arena.close()


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


def _bind(
    work: Callable[[Chunk, UpdateSettings], None], chunk: Chunk, settings: UpdateSettings
) -> Callable[[], None]:
    return lambda: work(chunk, settings)


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = (
        tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array
