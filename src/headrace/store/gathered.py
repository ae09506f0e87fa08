"""A state whose units are shared among ranks, read whole on the main rank, one at a time.

Invariants: what is read is what one rank alone would have had: a checkpoint's tensors do not
depend on the number of ranks; the main rank holds one whole unit at a time, the others nothing. All
ranks go through the units in the same order, in the thread that saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.store.state import UnitState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.parallel.ranks import Ranks
    from headrace.store.snapshot import Snapshot
    from headrace.store.state import StateDtype


class GatheredSource:
    """What the main rank's writer reads, a :class:`~headrace.store.snapshot.StateSource`."""

    def __init__(self, snapshot: Snapshot, ranks: Ranks) -> None:
        """Read ``snapshot`` and what the other ranks' :func:`give_shards` send."""
        self._snapshot = snapshot
        self._ranks = ranks
        self._current: tuple[int, UnitState] | None = None
        self.described: Sequence[UnitState] = [
            UnitState.empty(unit.layout, snapshot.dtype, "meta") for unit in snapshot.described
        ]

    @property
    def dtype(self) -> StateDtype:
        """Of the working weights."""
        return self._snapshot.dtype

    @property
    def optimizer_step(self) -> int:
        """Updates applied."""
        return self._snapshot.optimizer_step

    def unit(self, index: int) -> UnitState:
        """A whole unit, valid until :meth:`done`."""
        if self._current is None or self._current[0] != index:
            self._current = index, self._gather(index)
        return self._current[1]

    def done(self, index: int) -> None:
        """A unit was read."""
        self.unit(index)  # others sent it, also when nothing of it was written
        self._snapshot.done(index)
        self._current = None

    def _gather(self, index: int) -> UnitState:
        own = self._snapshot.unit(index)
        whole = UnitState.empty(own.layout, self.dtype)
        for rank in range(self._ranks.size):
            shard = own.shard.of_rank(rank)
            places = [
                place
                for part in shard.trained_parts
                for place in _planes(whole, part.start, part.stop)
            ]
            places += [whole.weights[part.start : part.stop] for part in shard.frozen_parts]
            if rank == 0:
                for place, plane in zip(places, _parts_of_shard(own), strict=True):
                    place.copy_(plane)
                continue
            for place in places:
                self._ranks.receive(place.view(torch.uint8), rank)
        return whole


def give_shards(snapshot: Snapshot, ranks: Ranks) -> None:
    """Send every unit's shard to the main rank, as it asks for them."""
    for index in range(len(snapshot.described)):
        for part in _parts_of_shard(snapshot.unit(index)):
            ranks.send_to_main(part.cpu().contiguous().view(torch.uint8))
        snapshot.done(index)


def _parts_of_shard(unit: UnitState) -> list[torch.Tensor]:
    """What a rank holds, in the order in which it sends it."""
    parts = [
        plane
        for part in unit.shard.trained_parts
        for plane in _planes(unit, part.at, part.at + part.stop - part.start)
    ]
    frozen = unit.shard.frozen_parts
    return parts + [unit.weights[part.at : part.at + part.stop - part.start] for part in frozen]


def _planes(unit: UnitState, start: int, stop: int) -> list[torch.Tensor]:
    """Trainable elements of all planes, in the order in which ranks send them.

    They are counted in the planes.
    """
    planes = unit.planes
    return [unit.weights[start:stop], *(planes[name][start:stop] for name in sorted(planes))]
