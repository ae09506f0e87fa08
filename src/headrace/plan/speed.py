"""How long a streamed step takes: the demand of every lane, and which one binds.

A step is a forward and a backward phase. In each, lanes run side by side, so a phase lasts as long
as its longest lane; what the first unit must wait for is added once. A deferred update waits for
the norm of all gradients and runs under the next forward; an optimistic one, or one without
clipping, runs under backward (correcting it, when the norm exceeds the limit, is not counted).
FLOPs are model FLOPs; a recompute costs time and is not counted as work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.plan.parts import (
    layer_modes,
    offloaded_bytes,
    reached_share,
    resident_parameters,
    trained_part,
)
from headrace.plan.slices import is_sliced

if TYPE_CHECKING:
    from headrace.plan.architecture import Architecture
    from headrace.plan.job import Activations, Job
    from headrace.plan.machine import Machine

# Share of a card's matmul rate that whole compiled layers reached, forward and backward, on the
# H200 (783 TFLOP/s): dense 621, mixture of experts 435; attention alone with cuDNN 549.
DENSE_SHARE, SPARSE_SHARE, ATTENTION_SHARE = 0.79, 0.556, 0.70


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A predicted step.

    Attributes:
        step_seconds: of one optimizer step.
        tokens_per_second: all cards together.
        tflops: model TFLOP/s a card.
        mfu: of the data sheet's peak, None where there is none.
        mfu_matmul: of the matmul rate that the card reaches.
        binding: the lane that the step waits for longest.
        forward: seconds of each lane in the forward phase.
        backward: seconds of each lane in the backward phase.
        ramp_seconds: before the first layer can start and after the last gradient.
        update_under: the phase that the host update runs under.
        origin: the weakest origin among the rates that were used.
    """

    step_seconds: float
    tokens_per_second: float
    tflops: float
    mfu: float | None
    mfu_matmul: float
    binding: str
    forward: dict[str, float]
    backward: dict[str, float]
    ramp_seconds: float
    update_under: str
    origin: str


def matmul_seconds(model: Architecture, flops: float, tflops: float) -> float:
    """Products of so many FLOPs in whole layers, on one card that reaches ``tflops`` alone."""
    share = SPARSE_SHARE if model.sparse else DENSE_SHARE
    return flops / (share * tflops * 1e12)


def compute_seconds(model: Architecture, length: int, tokens: float, tflops: float) -> float:
    """Forward and backward of ``tokens`` on one card that reaches ``tflops`` in matmuls."""
    share = SPARSE_SHARE if model.sparse else DENSE_SHARE
    matmul = matmul_seconds(model, model.matmul_flops(), tflops)
    attention = model.attention_flops(length) / (min(share, ATTENTION_SHARE) * tflops * 1e12)
    return tokens * (matmul + attention)


def _rest_seconds(
    model: Architecture, job: Job, tokens: float, tflops: float, *, first: int
) -> float:
    """Forward of what is no expert's, in layers from ``first`` on that are sent in slices."""
    matmul = attention = 0.0
    for index, layer in enumerate(model.layers):
        if index >= first and layer.experts is not None and is_sliced(index, layer, job):
            own = layer.num_active_matmul - layer.experts.chosen * layer.experts.matmul
            matmul += 2.0 * own
            attention += layer.attention_flops(job.max_length)
    seconds = matmul / SPARSE_SHARE + attention / min(SPARSE_SHARE, ATTENTION_SHARE)
    return tokens * seconds / (tflops * 1e12)


def predict_speed(
    model: Architecture, job: Job, machine: Machine, *, activations: Activations, waves: int
) -> Speed:
    """Time of one streamed step with everything but windows on the host."""

    def under(phase: str) -> Speed:
        return _speed(model, job, machine, activations, waves, update_under=phase)

    if job.clipping == "deferred" or (job.clipping == "auto" and machine.is_cpu):
        return under("forward")
    if job.clipping == "auto":
        return min(under("forward"), under("backward"), key=lambda speed: speed.step_seconds)
    return under("backward")


def _speed(
    model: Architecture,
    job: Job,
    machine: Machine,
    activations: Activations,
    waves: int,
    *,
    update_under: str,
) -> Speed:
    cards = machine.num_gpus
    tokens = job.card_tokens(cards)
    width = 4 if machine.is_cpu or job.dtype == "float32" else 2
    layers = sum(x.num_parameters for x in model.layers)
    ends = model.num_embedding + model.num_head
    giga = 1e9
    whole = compute_seconds(model, job.max_length, tokens, machine.matmul_tflops.value)
    # Each card fetches and returns its share; the rest comes over the link between cards.
    shared = (cards - 1) / cards
    streamed = 1 - min(1.0, resident_parameters(model, job) / model.num_parameters)
    down = width * (layers + ends) * waves * streamed
    part = trained_part(model, job)
    reached = sum(x.num_parameters for x in model.layers[part.first_layer :])
    up_again = width * reached * waves * streamed
    trained = part.total * streamed
    back = (job.gradient_bytes or width) * trained
    # Frozen weights have no gradient: where backward comes by it is as much work as forward.
    backward_share = reached_share(model, part) + part.own / model.num_parameters
    modes = layer_modes(model, job, activations)
    again = whole / 3 * modes.count("recompute") / len(modes)
    if job.compiled and not machine.is_cpu:
        pairs = zip(model.layers, modes, strict=True)
        left_out = sum(x.num_left_out for x, mode in pairs if mode == "recompute")
        again -= tokens * matmul_seconds(model, 2.0 * left_out, machine.matmul_tflops.value)
    sent = offloaded_bytes(
        model, job, cards, activations=activations, waves=waves, cpu=machine.is_cpu
    )
    # What is no expert's runs twice in a forward pass of a sliced layer, and in its recompute.
    twice, again_twice = (
        _rest_seconds(model, job, tokens, machine.matmul_tflops.value, first=first)
        for first in (0, part.first_layer)
    )
    forward = {
        "compute": whole / 3 + twice,
        "h2d": down / cards / (machine.h2d.value * giga),
    }
    backward = {
        "compute": whole / 3 * backward_share + again + again_twice,
        "h2d": up_again / cards / (machine.duplex.value * giga),
        "d2h": back / cards / (machine.duplex.value * giga),
    }
    if sent:  # every wave leaves in forward and returns in backward
        forward["d2h"] = sent * waves / (machine.d2h.value * giga)
        backward["h2d"] += sent * waves / (machine.duplex.value * giga)
    if cards > 1:
        link = machine.nvlink.value * giga
        forward["nvlink"] = down * shared / link
        backward["nvlink"] = (up_again + 4 * trained) * shared / link  # summed in float32
    update = trained / (machine.update.value * giga)
    (forward if update_under == "forward" else backward)["update"] = update
    first = model.num_embedding + model.largest_layer
    ramp = width * first / cards / (machine.h2d.value * giga)
    if part.embedding and not job.device_units:
        ramp += width * model.num_embedding / cards / (machine.d2h.value * giga)
        ramp += first / (machine.update.value * giga)
    phases = [max(forward.values()), max(backward.values())]
    step = sum(phases) + ramp
    longest: dict[str, float] = {}
    for phase, seconds in zip((forward, backward), phases, strict=True):
        name = max(phase, key=phase.__getitem__)
        longest[name] = longest.get(name, 0.0) + seconds
    work = model.flops_per_token(job.max_length) * (1 + backward_share) / 3
    rate = tokens * work / step / 1e12
    used = (machine.matmul_tflops, machine.h2d, machine.duplex, machine.update)
    order = ("measured", "detected", "given", "data sheet", "derived", "assumed")
    return Speed(
        step_seconds=step,
        tokens_per_second=tokens * cards / step,
        tflops=rate,
        mfu=None if machine.peak_tflops is None else rate / machine.peak_tflops.value,
        mfu_matmul=rate / machine.matmul_tflops.value,
        binding=max(longest, key=longest.__getitem__),
        forward=forward,
        backward=backward,
        ramp_seconds=ramp,
        update_under=update_under,
        origin=max((r.origin for r in used), key=order.index),
    )
