"""Which part of a model is trained, lies on the device, or leaves its activations where.

The rules are the engine's own; what bytes and seconds they come to is :mod:`headrace.plan.memory`
and :mod:`headrace.plan.speed`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.plan.job import Trained
from headrace.plan.slices import is_sliced

if TYPE_CHECKING:
    from headrace.plan.architecture import Architecture
    from headrace.plan.job import Activations, Job, Leaving


def trained_part(model: Architecture, job: Job) -> Trained:
    """Which parameters have gradients and optimizer state."""
    if job.trained is not None:
        return job.trained
    if job.lora_rank is not None:
        total = model.num_adapter_parameters(job.lora_rank)
        largest = job.lora_rank * max(x.adapted_width for x in model.layers)
        return Trained(total=total, added=total, largest_layer=largest, embedding=0, head=0)
    return Trained(
        total=model.num_parameters,
        added=0,
        largest_layer=model.largest_layer,
        embedding=model.num_embedding,
        head=model.num_head,
    )


def resident_parameters(model: Architecture, job: Job) -> int:
    """Parameters of the units that lie on the device by choice."""
    return sum(_unit_sizes(model)[: job.device_units or 0])


def _unit_sizes(model: Architecture) -> list[int]:
    layers = [layer.num_parameters for layer in model.layers]
    return [model.num_embedding, *layers, model.num_head]


def reached_share(model: Architecture, part: Trained) -> float:
    """Of the matmul parameters that a token uses, those that backward reaches."""
    below = sum(x.num_active_matmul for x in model.layers[: part.first_layer])
    return 1 - below / model.num_active_parameters


def layer_modes(model: Architecture, job: Job, activations: Activations) -> list[Leaving]:
    """What each layer leaves for backward, in the engine's order."""
    first = trained_part(model, job).first_layer
    count = len(model.layers) - first
    recompute = count if activations == "recompute" else min(job.recompute_layers, count)
    rest = count - recompute
    offload = rest if activations == "offload" else min(job.offload_layers, rest)
    modes: list[Leaving] = ["nothing"] * first
    modes += ["recompute"] * recompute
    modes += ["offload" if i * offload % rest < offload else "keep" for i in range(rest)]
    return [
        "recompute" if mode != "nothing" and is_sliced(index, layer, job) else mode
        for index, (layer, mode) in enumerate(zip(model.layers, modes, strict=True))
    ]


def offloaded_bytes(
    model: Architecture, job: Job, num_gpus: int, *, activations: Activations, waves: int, cpu: bool
) -> int:
    """What the layers of a wave send to host memory: what they keep, less their input."""
    width = 4 if cpu or job.dtype == "float32" else 2
    modes = zip(model.layers, layer_modes(model, job, activations), strict=True)
    sent = [x.kept_elements - model.hidden_size for x, mode in modes if mode == "offload"]
    tokens = -(-job.num_micro_batches(num_gpus) // waves) * job.micro_batch_tokens
    return width * tokens * sum(sent)


def share(count: int, resident: int, model: Architecture) -> int:
    """What of ``count`` parameters lies in units of ``resident`` ones, spread evenly."""
    return round(count * resident / model.num_parameters)
