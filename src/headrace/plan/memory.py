"""Bytes by kind: what a streamed run keeps on the host, on the device and on disk.

Every figure carries the formula it comes from, so that a reader can check it. The state is exact;
slots, gradients and the loss follow the engine's own allocation; kept activations follow what was
measured (see ``KEPT_FACTOR``); what libraries take is an allowance. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


def num_trained(model: Architecture, job: Job) -> int:
    """Parameters that have gradients and optimizer state."""
    if job.lora_rank is None:
        return model.num_parameters
    return model.num_adapter_parameters(job.lora_rank)


def largest_trained(model: Architecture, job: Job) -> int:
    """Trained parameters of the largest layer."""
    if job.lora_rank is None:
        return model.largest_layer
    return job.lora_rank * max(x.adapted_width for x in model.layers)


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


def _host_items(model: Architecture, job: Job, *, cpu: bool) -> list[Item]:
    count = num_trained(model, job)
    gradient = 4 if job.dtype == "float32" else 2
    moment = MOMENT_BYTES[job.moments]
    master = "fp32" if job.dtype == "float32" else "bf16 plane + 16-bit remainder"
    runtime = CPU_RUNTIME_BYTES if cpu else HOST_RUNTIME_BYTES
    frozen = []
    if job.lora_rank is not None:
        width, whole = 4 if job.dtype == "float32" else 2, model.num_parameters
        frozen.append(
            Item(
                kind="frozen weights",
                num_bytes=width * whole,
                formula=f"{width} x {whole:,} (no remainder, no moments)",
            )
        )
    saves = []
    if job.async_save:
        # A unit that is updated before it was written is copied; adapters save as they are.
        largest = max(largest_trained(model, job), model.num_embedding if not frozen else 0)
        saves.append(
            Item(
                kind="saves",
                num_bytes=state_bytes(largest, job.moments),
                formula=f"{4 + moment:g} x {largest:,}: the state of the largest unit",
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
        Item(kind="process", num_bytes=runtime, formula="allowance for torch and drivers"),
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
    layer, ends = model.largest_layer, model.num_embedding + model.num_head
    trained_ends = ends if job.lora_rank is None else 0
    micro_batches = job.num_micro_batches(num_gpus)
    tokens = -(-micro_batches // waves) * job.micro_batch_tokens
    # The engine compiles layers on CUDA only.
    factor = EAGER_KEPT_FACTOR if cpu else 1.0 if features.selective_keep else KEPT_FACTOR
    at_work = EAGER_KEPT_FACTOR if cpu else KEPT_FACTOR
    kept = [round(x.kept_elements * width * factor) for x in model.layers]
    working = [round(x.kept_elements * width * at_work) for x in model.layers]
    items = [
        Item(
            kind="weight slots",
            num_bytes=width * (job.weight_slots * layer + ends),
            formula=f"{width} x ({job.weight_slots} layers of {layer:,} + both ends {ends:,})",
        ),
        Item(
            kind="gradients",
            num_bytes=4 * (trained_ends + job.gradient_slots * largest_trained(model, job))
            if waves == 1
            else 4 * num_trained(model, job),
            formula=f"fp32: 4 x ({job.gradient_slots} layers + both ends)"
            if waves == 1
            else f"fp32 accumulators of all units over {waves} waves: 4 x what is trained",
        ),
        Item(
            kind="layer inputs",
            num_bytes=width * tokens * model.hidden_size * (len(model.layers) + 2),
            formula=f"{width} x {tokens:,} tokens x {model.hidden_size} x layers and ends",
        ),
    ]
    if activations == "keep":
        items.append(
            Item(
                kind="kept activations",
                num_bytes=tokens * sum(kept),
                formula=f"{tokens:,} tokens x {sum(kept):,} bytes over all layers",
            )
        )
    work = job.micro_batch_tokens * max(working) + width * largest_trained(model, job)
    items += [
        Item(
            kind="layer at work",
            num_bytes=work,
            formula=f"{job.micro_batch_tokens:,} tokens of one layer, and its raw gradient",
        ),
        Item(
            kind="loss",
            num_bytes=min(job.loss_chunk_tokens, job.micro_batch_tokens)
            * model.vocab_size
            * (8 + width)
            + (4 * model.num_embedding if job.lora_rank is None else 0),
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
    one = state_bytes(num_trained(model, job), job.moments)
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
    host = _host_items(model, job, cpu=machine.is_cpu)
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
    if features.state_on_device and limit is not None and not machine.is_cpu:
        short = sum(item.num_bytes for item in host) - limit
        if short > 0:
            # State moves with the gradients that belong to it; 64 MiB steps, as chunks do.
            share = -(-short // machine.num_gpus)
            spilled_a_card = -(-share // (64 * MIB)) * 64 * MIB
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
