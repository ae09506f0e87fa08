"""Which layer is in which slot when: a pure plan of one step, made before it runs.

Invariant: a slot is refilled only after the last use of what it held, and every use finds its
layer in the slot the plan names. Eviction takes the layer that is needed again last (Belady),
so the layers around the turn from forward to backward are not sent twice.

A layer whose experts are sent in slices is used in stages: what is no expert's *opens* it, each
slice follows, and what is no expert's *closes* it. A slot then holds one section of the layer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Phase = Literal["forward", "backward"]
Stage = Literal["whole", "open", "slice", "close"]


@dataclass(frozen=True, kw_only=True)
class Use:
    """One pass of a wave through one layer, or one stage of it.

    Attributes:
        layer: which.
        wave: index of the wave.
        phase: forward or backward.
        stage: the whole layer, or which part of a pass through a sliced one.
        section: which section of the layer; 0 is the whole, or what is no expert's.
        slot: where the weights are.
        fetch: they must be sent for this use.
        fetch_after: index of the use that frees the slot; -1 when it is free from the start.
    """

    layer: int
    wave: int
    phase: Phase
    stage: Stage = "whole"
    section: int = 0
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
    slices: Mapping[int, int] | None = None,
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
        slices: of experts, by layer that is not whole.
    """
    resident = resident or {}
    order: list[tuple[int, int, Phase, Stage, int]] = []
    for wave in range(num_waves):
        for layer in range(num_layers):
            stages = _stages((slices or {}).get(layer, 0))
            order += [(layer, wave, "forward", *stage) for stage in stages]
        for layer in reversed(range(first, num_layers)) if backward else ():
            stages = _stages((slices or {}).get(layer, 0), reverse=True)
            order += [(layer, wave, "backward", *stage) for stage in stages]
    next_use = _next_uses([(layer, section) for layer, *_, section in order])
    held: dict[int, tuple[int, int]] = {}  # slot -> layer and section
    last_use: dict[int, int] = {}  # slot -> index of the latest use
    due: dict[int, int] = {}  # slot -> index of the next use of what it holds
    plan: list[Use] = []
    for index, (layer, wave, phase, stage, section) in enumerate(order):
        wanted = layer, section
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
        slot = next((s for s, content in held.items() if content == wanted), None)
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
                stage=stage,
                section=section,
                slot=slot,
                fetch=fetch,
                fetch_after=last_use.get(slot, -1),
            )
        )
        held[slot] = wanted
        last_use[slot] = index
        due[slot] = next_use[index]
    return plan


def _stages(num_slices: int, *, reverse: bool = False) -> list[tuple[Stage, int]]:
    """Stages of a pass through a layer with its sections; backward takes the last slice first."""
    if not num_slices:
        return [("whole", 0)]
    order = range(1, num_slices + 1)
    slices = reversed(order) if reverse else order
    return [("open", 0), *(("slice", section) for section in slices), ("close", 0)]


def _victim(due: dict[int, int], last_use: dict[int, int], *, reuse: bool) -> int:
    if not reuse:
        return min(last_use, key=lambda slot: last_use[slot])
    # Of layers needed equally late (never again), the one used longest ago: it is free first.
    return max(due, key=lambda slot: (due[slot], -last_use[slot]))


def _next_uses(wanted: Sequence[tuple[int, int]]) -> list[int]:
    never = len(wanted) + 1
    upcoming: dict[tuple[int, int], int] = {}
    result = [never] * len(wanted)
    for index in reversed(range(len(wanted))):
        result[index] = upcoming.get(wanted[index], never)
        upcoming[wanted[index]] = index
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
