"""A prediction as text for a terminal: what decides first, every figure's formula on request.

:func:`summary` fits on a screen; :func:`details` holds all that ``--json`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.plan.fsdp import NO_SYNC_QUOTE, OPTIMIZERS, per_card_gigabytes
from headrace.plan.memory import usable_device, usable_host
from headrace.plan.records import size_in_name
from headrace.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.plan.memory import Item
    from headrace.plan.predict import Prediction


def _table(title: str, items: Iterable[Item], total: int, limit: int | None) -> list[str]:
    room = "no limit given" if limit is None else f"of {format_bytes(limit)} usable"
    lines = [f"{title}: {format_bytes(total)} ({room})"]
    lines += [
        f"  {format_bytes(item.num_bytes):>12}  {item.kind:<20} {item.formula}" for item in items
    ]
    return lines


def _lacking(plan: Prediction) -> str:
    """The memories that are too small: those that overflow, and a host whose rest a card holds."""
    choice, machine = plan.choice, plan.machine
    over = set(choice.over)
    note = ""
    if choice.need.spilled and "device" in over:
        over.add("host")
        without = choice.need.device_bytes - choice.need.spilled // machine.num_gpus
        if without <= usable_device(machine):
            over.remove("device")
            note = ", and on the cards no room for the rest of the state"
    names = {"host": "host memory", "device": "device memory", "disk": "disk"}
    return " and ".join(name for kind, name in names.items() if kind in over) + note


def _answer(plan: Prediction) -> list[str]:
    choice, machine = plan.choice, plan.machine
    cards = machine.title if machine.num_gpus == 1 else f"{machine.num_gpus} x {machine.title}"
    how = f"activations {choice.activations}, {choice.waves} wave" + "s" * (choice.waves != 1)
    if choice.slices > 1:
        how += f", experts in {choice.slices} slices (such layers recompute)"
    if plan.fits:
        return [f"FITS on {cards}: {how}."]
    if choice.over == ("disk",):
        lines = [f"DOES NOT FIT on {cards}: too little disk for checkpoints."]
    else:
        lines = [f"DOES NOT FIT on {cards}: too little {_lacking(plan)} ({how})."]
    for change in plan.changes:
        mark = "" if change.available else " [not in this version]"
        lines.append(f"  fits with {change.what} ({change.setting}){mark}")
    if not plan.changes:
        lines.append("  no single change makes it fit; combine more host memory and larger cards")
    if plan.alternatives:
        lines.append(f"  shipped models that fit as described: {', '.join(plan.alternatives)}")
    return lines


def _speed(plan: Prediction) -> list[str]:
    speed = plan.choice.speed
    mfu = "" if speed.mfu is None else f", MFU {speed.mfu:.0%} of the data sheet"
    lines = [
        (
            f"Speed: {speed.tokens_per_second:,.0f} tokens/s, "
            f"{format_duration(speed.step_seconds)} a step, "
            f"{speed.tflops:.0f} TFLOP/s a card{mfu}; binding lane: {speed.binding}"
        ),
    ]
    for name, phase in (("forward", speed.forward), ("backward", speed.backward)):
        lanes = ", ".join(f"{lane} {seconds:.2f}" for lane, seconds in phase.items())
        lines.append(f"  {name:<9} seconds a lane: {lanes}")
    lines.append(f"  {'ramp':<9} {speed.ramp_seconds:.2f} s")
    return [*lines, _rates(plan), *_price(plan)]


def _rates(plan: Prediction) -> str:
    named = plan.machine.rates.items()
    return "Rates: " + ", ".join(f"{name} {r.value:.3g} ({r.origin})" for name, r in named)


def _fsdp(plan: Prediction) -> list[str]:
    need = plan.fsdp
    if need is None:
        return []
    cards = plan.machine.num_gpus
    verdict = "fits" if need.fits else "does not fit"
    lines = [
        "",
        (
            f"FSDP, all on {cards} card{'s' * (cards != 1)}: {verdict} without accumulation "
            f"({need.activations} activations)"
        ),
        *_table("  a card", need.items, need.card_bytes, usable_device(plan.machine)),
        (
            f"  fewest cards of this kind: {need.min_gpus or 'more than 1,024'}; at most "
            f"{need.tokens_per_second:,.0f} tokens/s if every transfer hides behind compute"
        ),
        f'  TRAP: with gradient_accumulation_steps above 1 under no_sync, "{NO_SYNC_QUOTE}":',
        f"    {format_bytes(need.unsharded_gradient_bytes)} on every card, however many there are: "
        + ("fits" if need.fits_accumulating else "out of memory at the first backward"),
        "  optimizers with FSDP2:",
    ]
    for note in OPTIMIZERS:
        works = "works" if note.works else "FAILS"
        lines.append(f"    {works}  {', '.join(note.names)}: {note.reason} ({note.source})")
    return lines


def _by_name(plan: Prediction) -> list[str]:
    size = size_in_name(plan.source.name)
    if size is None or not plan.job.trains_all:
        return []
    cards = plan.machine.num_gpus
    gb = per_card_gigabytes(size, cards)
    return [
        (
            f"By the size in its name ({format_count(size)}, decimal GB): weights "
            f"{gb['weights_gb']:g}, optimizer state {gb['optimizer_gb']:g}; sharded over {cards}: "
            f"{gb['weights_gb_per_card']:.2f} + {gb['gradients_gb_per_card']:.2f} + "
            f"{gb['optimizer_gb_per_card']:.1f} a card; unsharded gradient "
            f"{gb['unsharded_gradient_gb_per_card']:g} a card"
        )
    ]


_NAMED = 3  # kinds of bytes that a line of the summary names


def _line(title: str, items: Sequence[Item], total: int, limit: int | None) -> str:
    """One memory: the total, what there is, and the kinds that weigh most."""
    room = "limit not given" if limit is None else f"of {format_bytes(limit)}"
    largest = sorted(items, key=lambda item: -item.num_bytes)[:_NAMED]
    named = ", ".join(f"{item.kind} {format_bytes(item.num_bytes)}" for item in largest)
    moved = -sum(item.num_bytes for item in items if item.num_bytes < 0)
    named += f"; {format_bytes(moved)} of it on the cards" if moved else ""
    return f"  {title:<10} {format_bytes(total):>10} {room:<15}  {named}"


def _fsdp_line(plan: Prediction) -> list[str]:
    need = plan.fsdp
    if need is None:
        return []
    cards = plan.machine.num_gpus
    fits = "fits" if need.fits else "does not fit"
    trap = "fits too" if need.fits_accumulating else "does not fit"
    return [
        "",
        (
            f"FSDP, all on {cards} card{'s' * (cards != 1)}: {fits} "
            f"({format_bytes(need.card_bytes)} a card); with gradient accumulation, which holds "
            f"{format_bytes(need.unsharded_gradient_bytes)} of unsharded gradient, it {trap}; "
            f"fewest cards: {need.min_gpus or 'more than 1,024'}"
        ),
    ]


def summary(plan: Prediction) -> str:
    """What decides: fits or not, the memories, speed, money, FSDP; no colour."""
    model, need, machine, speed = plan.model, plan.choice.need, plan.machine, plan.choice.speed
    device = usable_device(machine) if machine.host_bytes or not machine.is_cpu else None
    disk = None if machine.disk_bytes is None else int(machine.disk_bytes.value)
    active = model.num_active_parameters
    used = f" ({format_count(active)} used by a token)" if model.sparse else ""
    mfu = "" if speed.mfu is None else f", MFU {speed.mfu:.0%}"
    lines = [
        (
            f"{plan.source.name}: {format_count(model.num_parameters)} parameters{used}, "
            f"{format_count(plan.job.tokens_per_step)} tokens a step"
        ),
        *_answer(plan),
        _line("host", need.host, need.host_bytes, usable_host(machine)),
        _line("step" if machine.is_cpu else "each card", need.device, need.device_bytes, device),
        _line("disk", need.disk, need.disk_bytes, disk),
        "",
        (
            f"{speed.tokens_per_second:,.0f} tokens/s, {format_duration(speed.step_seconds)} a step"
            f"{mfu}; binding lane: {speed.binding}; rates: {speed.origin}"
        ),
        *_price(plan),
        *_fsdp_line(plan),
        "",
        *(f"note: {note}" for note in plan.notes),
        "--verbose shows every kind of bytes, lane and formula; --json all of it",
    ]
    return "\n".join(lines)


def _price(plan: Prediction) -> list[str]:
    if plan.hours is None or plan.job.num_tokens is None:
        return []
    long = plan.hours >= 1
    time = f"{plan.hours:,.1f} hours" if long else format_duration(plan.hours * 3600)
    line = f"{format_count(plan.job.num_tokens)} tokens take {time}"
    if plan.cost is not None and plan.job.price is not None:
        line += f" and cost {plan.cost:,.2f} at {plan.job.price:g} a card and hour"
    return [line]


def details(plan: Prediction) -> str:
    """Everything, as lines of text, no colour."""
    model, choice, machine = plan.model, plan.choice, plan.machine
    lines = [
        (
            f"{plan.source.name}: {model.num_parameters:,} parameters "
            f"({format_count(model.num_active_parameters)} used by a token), "
            f"{len(model.layers)} layers, "
            f"{model.flops_per_token(plan.job.max_length) / 1e9:.1f} GFLOP a token in sequences of "
            f"{plan.job.max_length}"
        ),
        *_by_name(plan),
        "",
        *_answer(plan),
        "",
        *_table("Host", choice.need.host, choice.need.host_bytes, usable_host(machine)),
        *_table(
            "Host, windows and activations" if machine.is_cpu else "Each card",
            choice.need.device,
            choice.need.device_bytes,
            usable_device(machine) if machine.host_bytes or not machine.is_cpu else None,
        ),
        *_table(
            "Disk",
            choice.need.disk,
            choice.need.disk_bytes,
            None if machine.disk_bytes is None else int(machine.disk_bytes.value),
        ),
        "",
        *_speed(plan),
        *_fsdp(plan),
    ]
    for run in plan.source.runs:
        lines += [
            "",
            (
                f"Published: {run['gpus']} x {run['gpu']}, {run['tokens_per_second']:,} tokens/s, "
                f"{run['peak_device_gb']} GB a card ({run['source']}; {run['note']})"
            ),
        ]
    lines += ["", *(f"note: {note}" for note in plan.notes)] if plan.notes else []
    return "\n".join(lines)
