"""Which layer is in which slot when: a pure plan of one step, made before it runs.

Invariant: a slot is refilled only after the last use of what it held, and every use finds its
layer in the slot the plan names. Eviction takes the layer that is needed again last (Belady),
so the layers around the turn from forward to backward are not sent twice.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Use:
    """One pass of a wave through one layer.

    Attributes:
        layer: which.
        wave: index of the wave.
        phase: forward or backward.
        slot: where the weights are.
        fetch: they must be sent for this use.
        fetch_after: index of the use that frees the slot; -1 when it is free from the start.
    """

    layer: int
    wave: int
    phase: Phase
    slot: int
    fetch: bool
    fetch_after: int


def split_waves(num_micro_batches: int, per_wave: int | None) -> list[range]:
    """Consecutive micro-batches of each wave; the last may be shorter."""
    size = per_wave or num_micro_batches
    return [
        range(start, min(start + size, num_micro_batches))
        for start in range(0, num_micro_batches, size)
    ]


def plan_uses(
    num_layers: int,
    num_waves: int,
    num_slots: int,
    *,
    backward: bool = True,
    first: int = 0,
    reuse: bool = True,
    resident: Mapping[int, int] | None = None,
) -> list[Use]:
    """Plan the uses of all layers in one step.

    Args:
        num_layers: decoder layers.
        num_waves: passes over the model.
        num_slots: windows on the device.
        backward: follow each forward pass by a backward pass in reverse order.
        first: the last layer of a backward pass; those before it have none.
        reuse: take a layer that is still in a slot as it is; False sends it every time.
        resident: layers that are never sent, and the slots (beyond ``num_slots``) they are in.
    """
    resident = resident or {}
    order: list[tuple[int, int, Phase]] = []
    for wave in range(num_waves):
        order += [(layer, wave, "forward") for layer in range(num_layers)]
        if backward:
            order += [(layer, wave, "backward") for layer in reversed(range(first, num_layers))]
    next_use = _next_uses([layer for layer, _, _ in order])
    held: dict[int, int] = {}  # slot -> layer
    last_use: dict[int, int] = {}  # slot -> index of the latest use
    due: dict[int, int] = {}  # slot -> index of the next use of what it holds
    plan: list[Use] = []
    for index, (layer, wave, phase) in enumerate(order):
        if layer in resident:
            plan.append(
                Use(
                    layer=layer,
                    wave=wave,
                    phase=phase,
                    slot=resident[layer],
                    fetch=False,
                    fetch_after=-1,
                )
            )
            continue
        slot = next((s for s, held_layer in held.items() if held_layer == layer), None)
        fetch = slot is None or not reuse
        if slot is None or not reuse:
            free = [s for s in range(num_slots) if s not in held]
            # Without reuse the oldest slot is taken: look-ahead still alternates between slots.
            slot = free[0] if free else _victim(due, last_use, reuse=reuse)
        plan.append(
            Use(
                layer=layer,
                wave=wave,
                phase=phase,
                slot=slot,
                fetch=fetch,
                fetch_after=last_use.get(slot, -1),
            )
        )
        held[slot] = layer
        last_use[slot] = index
        due[slot] = next_use[index]
    return plan


def _victim(due: dict[int, int], last_use: dict[int, int], *, reuse: bool) -> int:
    if not reuse:
        return min(last_use, key=lambda slot: last_use[slot])
    # Of layers needed equally late (never again), the one used longest ago: it is free first.
    return max(due, key=lambda slot: (due[slot], -last_use[slot]))


def _next_uses(layers: Sequence[int]) -> list[int]:
    never = len(layers) + 1
    upcoming: dict[int, int] = {}
    result = [never] * len(layers)
    for index in reversed(range(len(layers))):
        result[index] = upcoming.get(layers[index], never)
        upcoming[layers[index]] = index
    return result


def fetches_after(plan: Sequence[Use]) -> dict[int, list[int]]:
    """For each use, the uses whose fetch may start once it is done; key -1 is the start.

    Fetches are issued in order of need: one is delayed until all before it were issued, because
    the transfer lane is a queue and an early fetch must not stand before a more urgent one.
    """
    issue: dict[int, list[int]] = {}
    fetches = [(index, use.fetch_after) for index, use in enumerate(plan) if use.fetch]
    latest = itertools.accumulate((after for _, after in fetches), max)
    for (index, _), after in zip(fetches, latest, strict=True):
        issue.setdefault(after, []).append(index)
    return issue
