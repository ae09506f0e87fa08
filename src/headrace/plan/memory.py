"""Bytes by kind: what a streamed run keeps on the host, on the device and on disk.

Every figure carries the formula it comes from, so that a reader can check it. The state is exact;
slots, gradients and the loss follow the engine's own allocation; kept activations follow what was
measured (see ``KEPT_FACTOR``); what libraries take is an allowance. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.plan.parts import (
    layer_modes,
    offloaded_bytes,
    resident_parameters,
    share,
    trained_part,
)
from headrace.plan.slices import layer_pieces, waiting_bytes, working_elements
from headrace.units import GIB, MIB

if TYPE_CHECKING:
    from headrace.plan.architecture import Architecture
    from headrace.plan.job import Activations, Features, Job, Moments
    from headrace.plan.machine import Machine

# What a layer leaves for its backward, over the outputs of its matmuls and attention. Compiled, an
# 8B layer on the H200 left 137 where those were 86 kB a token; the selective policy leaves just
# those. Eager Qwen3 and Llama layers leave 2.0 to 2.2 times as much (autograd's saved tensors).
KEPT_FACTOR = 137 / 86
EAGER_KEPT_FACTOR = 2.2

# Allowances for what libraries take: CUDA context, cuBLAS and cuDNN workspaces, the allocator's
# rounding; an interpreter with torch and transformers, the CUDA driver's host side included.
DEVICE_RUNTIME_BYTES = 3 * GIB // 2
DEVICE_SLACK = 0.04
HOST_RUNTIME_BYTES = 3 * GIB
CPU_RUNTIME_BYTES = 1 * GIB
# Micro-batches of an offloading layer that are on the device: two on their way, one being made.
_IN_FLIGHT = 3
# Of the host's memory the system, the page cache and data workers need a share.
HOST_SLACK = 0.06

# Block-wise 8-bit: one byte and a float32 scale a block of 256, for each moment.
MOMENT_BYTES: dict[Moments, float] = {"float32": 8, "bfloat16": 4, "8bit": 2 * (1 + 4 / 256)}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One kind of bytes and how they come about."""

    kind: str
    num_bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one choice of settings needs.

    Attributes:
        host: kinds on the host, once for all cards.
        device: kinds on each card (on a CPU: in host memory too).
        disk: kinds on disk.
        spilled: bytes of optimizer state that lie in spare device memory, all cards together.
    """

    host: tuple[Item, ...]
    device: tuple[Item, ...]
    disk: tuple[Item, ...]
    spilled: int = 0

    @property
    def host_bytes(self) -> int:
        """Total on the host."""
        return sum(item.num_bytes for item in self.host)

    @property
    def device_bytes(self) -> int:
        """Total on each card."""
        return sum(item.num_bytes for item in self.device)

    @property
    def disk_bytes(self) -> int:
        """Total on disk."""
        return sum(item.num_bytes for item in self.disk)


def state_bytes(num_parameters: int, moments: Moments = "float32") -> int:
    """Master weights and moments: 4 bytes a parameter, and 8, 4 or 2.03 for the moments."""
    return round(num_parameters * (4 + MOMENT_BYTES[moments]))


def usable_device(machine: Machine) -> int:
    """Bytes of a card that a plan may fill."""
    if machine.is_cpu:
        return int(machine.memory_bytes.value * (1 - HOST_SLACK))
    return int(machine.memory_bytes.value * (1 - DEVICE_SLACK))


def usable_host(machine: Machine) -> int | None:
    """Bytes of the host that a plan may fill, None where its memory is not known."""
    if machine.host_bytes is None:
        return None
    return int(machine.host_bytes.value * (1 - HOST_SLACK))


def _host_items(
    model: Architecture, job: Job, num_gpus: int, *, offloaded: int, cpu: bool
) -> list[Item]:
    trained = trained_part(model, job)
    resident = resident_parameters(model, job)
    # Units on the device have their share of what is trained there.
    count = trained.total - share(trained.total, resident, model)
    gradient = job.gradient_bytes or (4 if job.dtype == "float32" else 2)
    moment = MOMENT_BYTES[job.moments]
    master = "fp32" if job.dtype == "float32" else "bf16 plane + 16-bit remainder"
    runtime = CPU_RUNTIME_BYTES if cpu else HOST_RUNTIME_BYTES
    width = 4 if job.dtype == "float32" else 2
    frozen = []
    untouched = model.num_parameters - trained.own
    if untouched:
        untouched -= share(untouched, resident, model)
        frozen.append(
            Item(
                kind="frozen weights",
                num_bytes=width * untouched,
                formula=f"{width} x {untouched:,} (no remainder, no moments)",
            )
        )
    saves = []
    if job.async_save:
        # A unit that is updated before it was written is copied.
        whole = [model.num_embedding, model.largest_layer, model.num_head]
        parts = [trained.embedding, trained.largest_layer, trained.head]
        if job.trains_all:
            largest = max(whole)
            size, formula = state_bytes(largest, job.moments), f"{4 + moment:g} x {largest:,}"
        else:
            size = max(
                state_bytes(part, job.moments) + width * max(0, unit - part)
                for unit, part in zip(whole, parts, strict=True)
            )
            formula = f"{4 + moment:g} a trained and {width} a frozen parameter"
        if job.save_bytes is not None:
            size, formula = job.save_bytes, "async_save_memory"
        saves.append(
            Item(kind="saves", num_bytes=size, formula=f"{formula}: the state of the largest unit")
            if job.save_bytes is None
            else Item(kind="saves", num_bytes=size, formula=formula)
        )
    if num_gpus > 1:
        largest = max(model.num_embedding, model.largest_layer, model.num_head)
        saves.append(
            Item(
                kind="unit being saved",
                num_bytes=state_bytes(largest, job.moments),
                formula=f"{4 + moment:g} x {largest:,}: gathered from all cards' shares",
            )
        )
    if offloaded:
        saves.append(
            Item(
                kind="offloaded activations",
                num_bytes=offloaded,
                formula="what the layers of a wave that offload leave for backward",
            )
        )
    return [
        *frozen,
        Item(kind="master weights", num_bytes=4 * count, formula=f"4 x {count:,} ({master})"),
        Item(
            kind="optimizer state",
            num_bytes=round(moment * count),
            formula=f"{moment:g} x {count:,} (two {job.moments} moments)",
        ),
        Item(
            kind="returned gradients",
            num_bytes=gradient * count,
            formula=f"{gradient} x {count:,}, held until the norm of all is known",
        ),
        *saves,
        Item(
            kind="process",
            num_bytes=runtime * num_gpus,
            formula="allowance for torch and drivers"
            + (f", {num_gpus} processes" if num_gpus > 1 else ""),
        ),
    ]


def _device_items(
    model: Architecture,
    job: Job,
    features: Features,
    num_gpus: int,
    *,
    activations: Activations,
    waves: int,
    cpu: bool,
) -> list[Item]:
    width = 4 if cpu or job.dtype == "float32" else 2
    ends = model.num_embedding + model.num_head
    trained = trained_part(model, job)
    trained_ends = trained.embedding + trained.head
    resident = job.device_units or 0
    pieces = [layer_pieces(i, x, job) for i, x in enumerate(model.layers)]
    in_slots = [piece for sizes in pieces[max(0, resident - 1) :] for piece in sizes]
    layer = max(in_slots, default=model.largest_layer)
    what = "layers" if len(in_slots) <= len(model.layers) else "parts of layers"
    largest_trained = min(trained.largest_layer, max(max(sizes) for sizes in pieces))
    slots = min(job.weight_slots, len(in_slots) + 1) if in_slots else 0
    sent_ends = (0 if resident else model.num_embedding) + (
        model.num_head if resident < len(model.layers) + 2 else 0
    )
    micro_batches = job.num_micro_batches(num_gpus)
    tokens = -(-micro_batches // waves) * job.micro_batch_tokens
    # The engine compiles layers on CUDA only.
    eager = cpu or not job.compiled
    factor = EAGER_KEPT_FACTOR if eager else 1.0 if features.selective_keep else KEPT_FACTOR
    at_work = EAGER_KEPT_FACTOR if eager else KEPT_FACTOR
    modes = layer_modes(model, job, activations)
    kept = [
        round(x.kept_elements * width * factor)
        for x, mode in zip(model.layers, modes, strict=True)
        if mode == "keep"
    ]
    leaving = max(
        (x.kept_elements for x, mode in zip(model.layers, modes, strict=True) if mode == "offload"),
        default=0,
    )
    working = [
        round(working_elements(i, x, job, at_work) * width) for i, x in enumerate(model.layers)
    ]
    items = [
        Item(
            kind="weight slots",
            num_bytes=width * (slots * max(in_slots, default=0) + sent_ends),
            formula=f"{width} x ({slots} {what} of {layer:,} + both ends {ends:,})"
            if not resident
            else f"{width} x ({slots} {what} and ends that are not on the device)",
        ),
        Item(
            kind="gradients",
            num_bytes=4 * (trained_ends + job.gradient_slots * largest_trained)
            if waves == 1
            else 4 * trained.total,
            formula=f"fp32: 4 x ({job.gradient_slots} {what} + both ends)"
            if waves == 1
            else f"fp32 accumulators of all units over {waves} waves: 4 x what is trained",
        ),
        Item(
            kind="layer inputs",
            num_bytes=width
            * tokens
            * model.hidden_size
            * (len(model.layers) - trained.first_layer + 2),
            formula=f"{width} x {tokens:,} tokens x {model.hidden_size} x layers and ends",
        ),
    ]
    waiting, formula = waiting_bytes(model, job, tokens, width, first=trained.first_layer)
    items += [Item(kind="experts' results", num_bytes=waiting, formula=formula)] if waiting else []
    if kept:
        items.append(
            Item(
                kind="kept activations",
                num_bytes=tokens * sum(kept),
                formula=f"{tokens:,} tokens x {sum(kept):,} bytes over all layers",
            )
        )
    if leaving:
        items.append(
            Item(
                kind="activations on their way",
                num_bytes=width * job.micro_batch_tokens * _IN_FLIGHT * leaving,
                formula=f"{_IN_FLIGHT} micro-batches of a layer that offloads",
            )
        )
    if resident:
        there = resident_parameters(model, job)
        part = share(trained.total, there, model)
        returned = job.gradient_bytes or width
        items.append(
            Item(
                kind="state on the device",
                num_bytes=state_bytes(part, job.moments)
                + width * max(0, there - part)
                + (returned * part if waves == 1 else 0),
                formula=f"{there:,} parameters of {resident} units, and their gradients",
            )
        )
    head_trained = trained.head or (trained.embedding and model.tied)
    logits = min(job.loss_chunk_tokens, job.micro_batch_tokens) * model.vocab_size
    work = job.micro_batch_tokens * max(working) + width * largest_trained
    items += [
        Item(
            kind="layer at work",
            num_bytes=work,
            formula=f"{job.micro_batch_tokens:,} tokens of one layer, and its raw gradient",
        ),
        Item(
            kind="loss",
            num_bytes=logits * (8 + width) + (4 * model.num_embedding if head_trained else 0),
            formula="logits of one chunk, and the head's raw gradient",
        ),
    ]
    if not cpu:
        items.append(
            Item(
                kind="runtime",
                num_bytes=DEVICE_RUNTIME_BYTES,
                formula="allowance for the CUDA context and workspaces",
            )
        )
    return items


def _disk_items(model: Architecture, job: Job) -> list[Item]:
    trained = trained_part(model, job)
    one = state_bytes(trained.total, job.moments)
    if not trained.added:  # a run with adapters saves those alone
        one += (4 if job.dtype == "float32" else 2) * (model.num_parameters - trained.total)
    return [
        Item(
            kind="checkpoints",
            num_bytes=one * job.num_checkpoints,
            formula=f"{job.num_checkpoints} x the state",
        ),
        Item(kind="save in progress", num_bytes=one, formula="the state, before the rename"),
    ]


def footprint(
    model: Architecture,
    job: Job,
    machine: Machine,
    features: Features,
    *,
    activations: Activations,
    waves: int,
) -> Footprint:
    """Bytes by kind for one choice of activation mode and number of waves.

    Optimizer state moves to spare device memory only where ``features`` allow it and the host
    alone does not hold it.
    """
    offloaded = offloaded_bytes(
        model, job, machine.num_gpus, activations=activations, waves=waves, cpu=machine.is_cpu
    )
    cards = machine.num_gpus
    host = _host_items(model, job, cards, offloaded=cards * offloaded, cpu=machine.is_cpu)
    device = _device_items(
        model,
        job,
        features,
        machine.num_gpus,
        activations=activations,
        waves=waves,
        cpu=machine.is_cpu,
    )
    spilled = 0
    limit = usable_host(machine)
    free = job.device_units is None
    if features.state_on_device and free and limit is not None and not machine.is_cpu:
        short = sum(item.num_bytes for item in host) - limit
        if short > 0:
            # State moves with the gradients that belong to it; 64 MiB steps, as chunks do.
            spilled_a_card = -(-short // (machine.num_gpus * 64 * MIB)) * 64 * MIB
            spilled = spilled_a_card * machine.num_gpus
            host.append(
                Item(kind="moved to cards", num_bytes=-spilled, formula="state on the device")
            )
            device.append(
                Item(
                    kind="state moved from the host",
                    num_bytes=spilled_a_card,
                    formula=f"what the host is short of, over {machine.num_gpus} cards",
                )
            )
    return Footprint(
        host=tuple(host),
        device=tuple(device),
        disk=tuple(_disk_items(model, job)),
        spilled=spilled,
    )


def fits(need: Footprint, machine: Machine) -> tuple[bool, list[str]]:
    """Whether a footprint fits, and which memories it overflows."""
    over = []
    host_limit = usable_host(machine)
    host_need = need.host_bytes + (need.device_bytes if machine.is_cpu else 0)
    if host_limit is not None and host_need > host_limit:
        over.append("host")
    if not machine.is_cpu and need.device_bytes > usable_device(machine):
        over.append("device")
    if machine.disk_bytes is not None and need.disk_bytes > machine.disk_bytes.value:
        over.append("disk")
    return not over, over
