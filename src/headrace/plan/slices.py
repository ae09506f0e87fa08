"""Layers whose experts are sent in slices: what is sent at a time, and what that takes.

The rules are the engine's own (docs/models.md); a layer on the device stays whole. Pure.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.plan.architecture import Architecture, Layer
    from headrace.plan.job import Job

_UNEVEN = 2.0  # rows of the busiest slice of experts over the even share


def most_slices(model: Architecture) -> int:
    """As many slices as the experts of a layer can be sent in; 1 where layers have none."""
    counts = [layer.experts.count for layer in model.layers if layer.experts is not None]
    return min(counts, default=1)


def is_sliced(index: int, layer: Layer, job: Job) -> bool:
    """The experts of the ``index``-th layer are sent in slices."""
    resident = job.device_units or 0
    return (job.expert_slices or 1) > 1 and layer.experts is not None and index + 1 >= resident


def layer_pieces(index: int, layer: Layer, job: Job) -> list[int]:
    """Parameters of what a layer is sent in: everything, or the rest and each slice of experts."""
    experts, count = layer.experts, job.expert_slices or 1
    if experts is None or not is_sliced(index, layer, job):
        return [layer.num_parameters]
    bounds = [number * experts.count // count for number in range(count + 1)]
    slices = [(b - a) * experts.size for a, b in itertools.pairwise(bounds)]
    return [layer.num_parameters - sum(slices), *slices]


def working_elements(index: int, layer: Layer, job: Job, factor: float) -> float:
    """Elements a token of a layer at work.

    ``factor`` is what that takes over the outputs of its matmuls and attention. Experts that run by
    themselves hold each result and its gradient, and the busiest slice twice its even share.
    """
    experts = layer.experts
    if experts is None or not is_sliced(index, layer, job):
        return layer.kept_elements * factor
    rest = (layer.kept_elements - experts.chosen * experts.kept_elements) * factor
    share = min(1.0, _UNEVEN / (job.expert_slices or 1))
    return max(rest, 2 * experts.chosen * experts.width * share)


def waiting_bytes(
    model: Architecture, job: Job, tokens: int, width: int, *, first: int
) -> tuple[int, str]:
    """What the tokens of a wave leave beside the inputs of sliced layers, and the formula.

    Layers before ``first`` have no backward.

    Of each such layer what its experts returned and whom each token chose; of the one at work what
    its experts are called with, the gradient of what they return, a float32 sum, and the order.
    """
    sliced = [i >= first and is_sliced(i, x, job) for i, x in enumerate(model.layers)]
    experts = [x.experts for x, is_cut in zip(model.layers, sliced, strict=True) if is_cut]
    chosen = max((found.chosen for found in experts if found is not None), default=0)
    if not experts:
        return 0, ""
    left = width * model.hidden_size + 12 * chosen
    at_once = (2 * width + 4) * model.hidden_size + 32 * chosen
    return (
        tokens * (len(experts) * left + at_once),
        f"{tokens:,} tokens x ({len(experts)} layers of {left:,} + {at_once:,} bytes at work)",
    )
