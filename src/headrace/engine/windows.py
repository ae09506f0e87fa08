"""The windows on the device, and the transfers that fill them in time.

Owns the weight slots and the H2D lane; a slot holds a layer, or one section of a sliced one.
Invariants: a slot is refilled only after its last reader; a unit is sent only after its update.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from headrace.engine.lanes import Lane, Mark
from headrace.engine.schedule import Phase, Use, fetches_after, plan_uses
from headrace.engine.slots import Slot, full_size
from headrace.store.ranges import section_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from headrace.engine.config import EngineConfig
    from headrace.engine.exchange import Exchange
    from headrace.engine.exposure import Exposure
    from headrace.engine.lanes import Ticket
    from headrace.engine.update import Updater
    from headrace.store.ranges import Piece
    from headrace.store.sections import Section
    from headrace.store.state import ModelState, UnitState


class Windows:
    """Weight slots of one model on one device.

    Attributes:
        embed: holds the embedding for the whole step.
        head: holds the head for the whole step.
        layers: take turns.
    """

    def __init__(
        self,
        state: ModelState,
        updater: Updater,
        config: EngineConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        exposure: Exposure,
        jitter: Callable[[], float] | None,
        sections: Sequence[tuple[Section, ...]],
        exchange: Exchange | None = None,
    ) -> None:
        """Allocate the slots for ``sections`` of every unit and start the H2D lane."""
        self._state = state
        self._updater = updater
        self._device = device
        self._exposure = exposure
        self._exchange = exchange
        self._poison = config.poison_slots
        layouts = state.layouts
        self._sections = sections
        self._num_layers = len(layouts) - 2
        full = [full_size(layout) if state.dtype == "bfloat16" else 0 for layout in layouts]
        # A unit on the device is its own slot, unless compute wants another type or other ranks
        # have parts of it.
        own = {
            index: Slot.over(unit.weights, full_size=full[index])
            for index, unit in enumerate(state.units)
            if unit.on_device and unit.weights.dtype == dtype and unit.shard.is_whole
        }
        sizes = [
            [section_shard(part.layout, state.share).slot_size for part in parts]
            for parts in sections
        ]
        streamed = [i for i in range(1, len(layouts) - 1) if i not in own]
        pieces = [size for i in streamed for size in sizes[i]]
        num_slots = max(2, min(config.weight_slots, len(pieces) + 1)) if streamed else 0
        size = max(pieces, default=0)
        most = max((full[i] for i in streamed), default=0)
        self.layers = [Slot(size, dtype, device, full_size=most) for _ in range(num_slots)]
        self._num_streaming = num_slots
        self._resident: dict[int, int] = {}
        for index, slot in own.items():
            if 0 < index < len(layouts) - 1:
                self._resident[index - 1] = len(self.layers)
                self.layers.append(slot)
        self.embed = own.get(0) or Slot(sizes[0][0], dtype, device, full_size=full[0])
        self.head = own.get(len(layouts) - 1) or Slot(
            sizes[-1][0], dtype, device, full_size=full[-1]
        )
        self._streams_ends = (0 not in own, len(layouts) - 1 not in own)
        self._tracer = exposure.tracer
        self._h2d = Lane(
            "h2d",
            device,
            timeout_seconds=config.lane_timeout_seconds,
            jitter=jitter,
            tracer=self._tracer,
        )

    def close(self) -> None:
        """End the lane."""
        self._h2d.close()

    def _is_whole(self, unit: int) -> bool:
        return len(self._sections[unit]) == 1

    def restart(self) -> None:
        """Wait for what a failed step had sent; every slot may be filled anew."""
        for slot in (self.embed, self.head, *self.layers):
            if slot.ready is not None:
                slot.ready.synchronize()
            slot.free = Mark.here(self._device)

    def fetch_embed(self) -> None:
        """Queue the embedding."""
        if self._streams_ends[0]:
            self._fetch(0, self.embed)

    def fetch_head(self) -> None:
        """Queue the head; it is updated last, and what is queued behind it waits, too."""
        if self._streams_ends[1]:
            self._fetch(self._num_layers + 1, self.head)

    def release_ends(self) -> None:
        """The step's last reader of embedding and head is in the compute stream."""
        for slot in (self.embed, self.head):
            slot.free = Mark.here(self._device)
        if self._tracer is not None:
            self._tracer.pause()

    def wait(self, slot: Slot) -> Slot:
        """Wait until the embedding's or the head's slot is filled."""
        unit = 0 if slot is self.embed else self._num_layers + 1
        if self._tracer is not None:
            self._tracer.pause()
        self._exposure.wait(slot)
        if self._tracer is not None:
            self._tracer.compute(self._state.layouts[unit].name)
        self.expand(unit, slot)
        return slot

    def expand(self, unit: int, slot: Slot) -> None:
        """Make the float32 parameters of a unit that is in its slot."""
        if slot.full.numel():
            if self._state.units[unit].on_device:
                self._state.units[unit].refresh_low_halves()
            slot.expand(self._sections[unit][0].layout)  # no expert is computed in float32

    def wait_for(self, use: Use) -> Slot:
        """Wait until a layer is in its slot."""
        slot = self.layers[use.slot]
        if self._tracer is not None:
            self._tracer.pause()
        if use.fetch:
            self._exposure.wait(slot)
        if self._tracer is not None:
            self._tracer.compute(f"{use.phase} {self._section(use).layout.name}")
        if use.stage in ("whole", "open") and (use.fetch or use.layer in self._resident):
            self.expand(1 + use.layer, slot)
        return slot

    def _section(self, use: Use) -> Section:
        return self._sections[1 + use.layer][use.section]

    def walk(self, num_layers: int, num_waves: int, *, backward: bool, first: int = 0) -> Walk:
        """Begin a step over the first ``num_layers`` layers: the first transfers are queued.

        Backward ends with layer ``first``.
        """
        plan = plan_uses(
            num_layers,
            num_waves,
            self._num_streaming,
            backward=backward,
            first=first,
            reuse=not self._poison,
            resident=self._resident,
            slices={
                unit - 1: len(sections) - 1
                for unit, sections in enumerate(self._sections)
                if not self._is_whole(unit)
            },
        )
        return Walk(self, plan)

    def after_layers(self) -> None:
        """A wave's last layer is in the compute stream; what follows is the embedding's."""
        if self._tracer is not None:
            self._tracer.compute(f"backward {self._state.layouts[0].name}")

    def fetch_for(self, use: Use) -> None:
        """Queue the transfer that a use needs."""
        self._fetch(1 + use.layer, self.layers[use.slot], use.section)

    def mark_free(self, use: Use) -> None:
        """The slot of a use may be refilled after this point of the compute stream."""
        self.layers[use.slot].free = Mark.here(self._device)

    def _fetch(self, unit: int, slot: Slot, number: int = 0) -> None:
        """Queue the transfer of a unit, or of its section of this number."""
        section, after = self._sections[unit][number], [self._updater.updated[unit], slot.free]
        if self._exchange is None:
            work = self._send_spans(self._state.units[unit], section, slot)
            slot.sent = slot.ready = self._h2d.submit(work, after, label=section.layout.name)
        else:
            self._fetch_shards(self._exchange, section, number, slot, after)

    def _send_spans(self, state: UnitState, section: Section, slot: Slot) -> Callable[[], None]:
        def work() -> None:
            if self._poison:
                slot.poison()
            if section.experts is None:
                state.refresh_low_halves()
            for span in section.spans:
                target = slot.flat[span.at : span.at + span.stop - span.start]
                target.copy_(state.weights[span.start : span.stop], non_blocking=True)

        return work

    def _fetch_shards(
        self,
        exchange: Exchange,
        section: Section,
        number: int,
        slot: Slot,
        after: list[Ticket | Mark | None],
    ) -> None:
        """Send what is here of a section, piece by piece, and gather what others have."""
        state, label = self._state.units[section.unit], section.layout.name
        for index, (piece, at) in enumerate(state.shard.pieces(number)):
            send = self._send_piece(state, slot, piece, at, first=index == 0)
            sent = self._h2d.submit(send, after, label=label)
            if index == 0:
                slot.sent = sent
            slot.ready = exchange.gather(slot.flat, piece, sent, label)
            after = [slot.ready]  # a gathered piece reaches into the next one's place
        if section.experts is None:
            joined = exchange.join_low_halves(section.unit, slot.flat, section.layout)
            slot.ready = joined or slot.ready

    def _send_piece(
        self, state: UnitState, slot: Slot, piece: Piece, at: int, *, first: bool
    ) -> Callable[[], None]:
        source = state.weights[at : at + piece.numel]
        target = slot.flat[piece.start : piece.stop]

        def work() -> None:
            if first and self._poison:
                slot.poison()
            target.copy_(source, non_blocking=True)

        return work


class Walk:
    """One pass over a plan: issues transfers as slots become free, hands out filled slots."""

    def __init__(self, windows: Windows, plan: list[Use]) -> None:
        """Queue the transfers that need no slot to be freed."""
        self._windows = windows
        first = itertools.takewhile(lambda use: (use.wave, use.phase) == (0, "forward"), plan)
        forward = [index for index, use in enumerate(first) if use.fetch]
        self._last_forward = forward[-1] if forward else None
        self._plan = plan
        self._issue = fetches_after(plan)
        self._next = 0
        self._start(-1)

    def uses(self, phase: Phase) -> Iterator[int]:
        """Indices of the next uses, if they are of ``phase``: those of one wave."""
        wave = self._plan[self._next].wave if self._next < len(self._plan) else None
        for index in range(self._next, len(self._plan)):
            use = self._plan[index]
            if (use.wave, use.phase) != (wave, phase):
                break
            self._next = index + 1
            yield index
        if phase == "backward":
            self._windows.after_layers()

    def layers(self, phase: Phase) -> Iterator[tuple[Use, Slot]]:
        """The next uses of ``phase``, each with its filled slot.

        A use is over when the loop goes on, which must not be left early.
        """
        for index in self.uses(phase):
            use = self._plan[index]
            yield use, self._windows.wait_for(use)
            self._windows.mark_free(use)  # means nothing for a resident layer's own slot
            self._start(index)

    def _start(self, done: int) -> None:
        if done == -1 and self._last_forward is None:
            self._windows.fetch_head()
        for index in self._issue.get(done, ()):
            self._windows.fetch_for(self._plan[index])
            if index == self._last_forward:
                self._windows.fetch_head()  # needed next
