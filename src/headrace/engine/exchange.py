"""The lane in which ranks exchange what each holds of a unit.

A unit, or a section of one, is sent by shards, one from each rank's host, and gathered in place in
the weight slot; its gradient is summed over ranks in place, each rank keeping the sum of its shard.
So what passes between host and device does not depend on the number of ranks.

Invariant: all collectives of a run's units are jobs of this one lane, submitted by the thread that
runs the step, in the order of the step's plan, which is the same on every rank: no two ranks ever
wait for each other in different collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.engine.lanes import Lane, Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace.engine.config import EngineConfig
    from headrace.engine.lanes import Ticket
    from headrace.engine.slots import GradientSlot
    from headrace.engine.trace import Tracer
    from headrace.parallel.ranks import Ranks
    from headrace.store.layout import UnitLayout
    from headrace.store.ranges import Piece
    from headrace.store.state import ModelState


class Exchange:
    """Gathers weights and hands out sums of gradients, one unit after the other."""

    def __init__(
        self,
        ranks: Ranks,
        state: ModelState,
        config: EngineConfig,
        device: torch.device,
        jitter: Callable[[], float] | None,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        """Start the lane.

        Args:
            ranks: of the run, more than one.
            state: this rank's shards.
            config: has the bound of a wait.
            device: where slots are.
            jitter: seconds to sleep before each job, or None.
            tracer: told of every job, or None.
        """
        self._ranks = ranks
        self._state = state
        self._device = device
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        self._lane = Lane(
            "exchange",
            device,
            timeout_seconds=config.lane_timeout_seconds,
            jitter=jitter,
            tracer=tracer,
        )

    def close(self) -> None:
        """End the lane."""
        self._lane.close()

    def gather(self, flat: torch.Tensor, piece: Piece, sent: Ticket, label: str) -> Ticket:
        """Complete a piece of a section in its slot, where this rank's own part was sent."""
        size = piece.size
        whole = flat[piece.begin : piece.reach]
        own = whole[piece.share.rank * size : (piece.share.rank + 1) * size]
        return self._lane.submit(
            lambda: self._ranks.all_gather(whole, own),
            [sent],
            label=label,
        )

    def join_low_halves(self, unit: int, flat: torch.Tensor, sent_as: UnitLayout) -> Ticket | None:
        """Bring low halves of what is trained in float32 to where :meth:`Slot.expand` reads them.

        They are updated where their upper halves are, and lie elsewhere in the unit, so that they
        are no piece of it: ranks add what each has, as bytes, to the zeros of the others.

        Args:
            unit: which.
            flat: the slot.
            sent_as: layout of what is in it: the unit, or its section without experts.

        Returns:
            None when the unit has none.
        """
        state = self._state.units[unit]
        params = [param for param in state.layout.float32_params if param.trainable]
        if not params or state.remainder is None:
            return None
        remainder = state.remainder
        sizes = [param.numel for param in params]
        places = {param.local_name: param.low_slice for param in sent_as.float32_params}

        def work() -> None:
            lows = torch.zeros(sum(sizes), dtype=torch.int16, device=self._device)
            for param, low in zip(params, torch.split(lows, sizes), strict=True):
                for own, given in state.shard.own(param.offset, param.numel):
                    low[given].copy_(remainder[own])
            self._ranks.all_reduce(lows.view(torch.uint8))
            for param, low in zip(params, torch.split(lows, sizes), strict=True):
                flat[places[param.local_name]].copy_(low.view(torch.bfloat16))

        return self._lane.submit(work, label=state.layout.name)

    def reduce(self, unit: int, section: int, slot: GradientSlot, label: str) -> Ticket:
        """Sum a section's gradient over ranks; this rank's part of the sum lies in its place."""
        piece = self._state.shards[unit].sections[section].trained
        whole = slot.flat[: piece.reach]
        own = whole[piece.share.rank * piece.size : (piece.share.rank + 1) * piece.size]
        after: Iterable[Mark] = [Mark.here(self._device)]
        return self._lane.submit(
            lambda: self._ranks.reduce_scatter(own, whole),
            after,
            label=label,
        )

    def joined(self, norms: torch.Tensor) -> torch.Tensor:
        """Norms of all ranks' blocks, on the host; each is zero on all ranks but one."""
        if self._norms is None:
            pinned = self._device.type == "cuda"
            self._norms = (
                torch.empty(norms.shape, dtype=norms.dtype, device=self._device),
                torch.empty(norms.shape, dtype=norms.dtype, pin_memory=pinned),
            )
        on_device, on_host = self._norms

        def work() -> None:
            on_device.copy_(norms, non_blocking=True)
            self._ranks.all_reduce(on_device)
            on_host.copy_(on_device, non_blocking=True)

        self._lane.submit(work, label="norm").synchronize()
        return on_host
