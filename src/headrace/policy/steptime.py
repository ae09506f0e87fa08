"""How long a step takes: an analytic model of the lanes.

Forward walks over the units; a unit may start when its weights are there, and a streamed unit's
weights are sent only after the host has updated it (``deferred`` clipping, the slower case). What
compute then waits for is exposed. Moments that are updated after all weights must be done when
their unit's gradient returns. Backward needs each streamed unit that it reaches once more and
returns its gradient. Of several ranks each sends, returns and updates its share, and what they
exchange adds to what is sent. Pure.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.models.flops import flops_per_token, forward_flops_per_token
from headrace.models.left_out import num_left_out
from headrace.policy.budget import (
    activations_of,
    offloaded_bytes,
    rest_parameters,
    sliced_layers,
)

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.policy.budget import Workload

ATTENTION_RATE = 0.6
"""Model FLOPs a second of attention over those of matrices: 374 - 447 against 661 TFLOP/s, forward
and backward of 1 to 8 causal rows of 4096 (one H200, cuDNN)."""


PART_OF_UPDATE = 18 / 26
"""Bytes that an update of the weights alone moves, or of the moments alone, over both together."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of a machine.

    Attributes:
        flops: FLOPs a second that a layer's matrices reach, with what lies between them.
        h2d_bytes: bytes a second to the device.
        d2h_bytes: bytes a second to the host.
        update_parameters: parameters a second that the host updates while DMA runs.
        device_update_parameters: parameters a second that the device updates.
        device_bytes: bytes a second that the device reads and writes.
        attention: model FLOPs a second of attention, as a share of ``flops``.
        exchange_bytes: bytes a second that a rank takes from others.
    """

    flops: float
    h2d_bytes: float
    d2h_bytes: float
    update_parameters: float
    device_update_parameters: float
    device_bytes: float
    attention: float = ATTENTION_RATE
    exchange_bytes: float = 100e9


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A predicted step.

    Attributes:
        seconds: of the whole step.
        compute: forward, backward and recompute.
        exposed: waiting, by lane.
    """

    seconds: float
    compute: float
    exposed: dict[str, float]

    @property
    def binding(self) -> str:
        """What to make faster first: the lane that compute waits for most, or compute."""
        lane = max(self.exposed, key=lambda name: self.exposed[name])
        return lane if self.exposed[lane] > 0.02 * self.seconds else "compute"


def predict_step(
    spec: ModelSpec,
    config: EngineConfig,
    workload: Workload,
    rates: Rates,
    *,
    num_ranks: int = 1,
) -> StepTime:
    """Predict a step with bf16 weights on a CUDA device.

    Args:
        spec: the model.
        config: with ``device_units`` and ``recompute_layers`` chosen.
        workload: the tokens of a step.
        rates: the speeds of one rank.
        num_ranks: that share the state.
    """
    layouts = spec.units
    share, others = 1 / num_ranks, (num_ranks - 1) / num_ranks
    num_resident = config.device_units or 0
    tokens = workload.tokens * workload.micro_batches
    work = _work(spec, workload.sequence_length)
    first, reached = work.first, spec.num_layers - work.first
    layer_flops = work.matrices + work.attention / rates.attention
    forward_flops = work.forward_matrices + work.forward_attention / rates.attention
    layer_forward = tokens * forward_flops / rates.flops / spec.num_layers
    head = tokens * work.head / rates.flops  # forward and backward in one pass
    again = [i for i, how in enumerate(activations_of(spec, config)) if how == "recompute"]
    recompute = len(again) * layer_forward
    # What is no expert's runs twice in a forward pass of a sliced layer, and in its recompute.
    sliced = sliced_layers(spec, config)
    if config.compile is not False:
        left_out = sum(work.left_out[i] for i in again if i not in sliced)
        recompute -= tokens * 2.0 * left_out / rates.flops
    attended = work.forward_attention / rates.attention / spec.num_layers
    twice, again_twice = (
        tokens * (2 * rest_parameters(spec, layers) + attended * len(layers)) / rates.flops
        for layers in (sliced, frozenset(layer for layer in sliced if layer >= first))
    )
    waves = workload.num_waves(config)

    weights_first = config.update_order == "weights_first"
    part = PART_OF_UPDATE if weights_first else 1.0

    # The first wave meets the updates.
    clock = updated = sent = waited_update = waited_h2d = 0.0
    for index, layout in enumerate(layouts):
        if index >= num_resident:
            updated += part * share * layout.num_trainable / rates.update_parameters
            waited_update += max(0.0, updated - clock)
            clock = max(clock, updated)
            sent = max(sent, updated) + 2 * layout.size * share / rates.h2d_bytes
            waited_h2d += max(0.0, sent - clock)
            clock = max(clock, sent)
        if 0 < index < len(layouts) - 1:
            clock += (layer_forward + twice / spec.num_layers) / waves
    forward = spec.num_layers * layer_forward + twice
    backward = tokens * (layer_flops - forward_flops) / rates.flops + recompute + again_twice
    if weights_first:
        last_wave = clock + forward * (waves - 1) / waves
        last_wave += (head + backward) * (waves - 1) / waves + head / waves
        waited_update += _wait_for_moments(
            [share * part * layout.num_trainable / rates.update_parameters for layout in layouts],
            num_resident=num_resident,
            begun=updated,
            returning=last_wave,
            between=backward / waves / max(1, reached),
        )
    streamed = layouts[max(1, num_resident) : -1]
    moved = (waves - 1) * sum(layout.size for layout in streamed)
    moved += waves * sum(layout.size for layout in layouts[max(1 + first, num_resident) : -1])
    if len(streamed) <= config.weight_slots and not sliced:
        moved = 0
    between = backward + forward * (waves - 1) / waves
    waited_h2d += max(0.0, 2 * moved * share / rates.h2d_bytes - between)
    returned = sum(layout.num_trainable for layout in streamed)
    waited_d2h = max(0.0, 2 * returned * share / rates.d2h_bytes - backward / waves)
    # Weights twice a wave in two bytes, sums of gradients once in four.
    whole = sum(layout.size for layout in layouts)
    exchanged = others * whole * (2 * 2 * waves + 4) / rates.exchange_bytes
    waited_exchange = max(0.0, exchanged - between - forward / waves)
    resident = sum(layout.num_trainable for layout in layouts[:num_resident])
    trained = sum(layout.num_trainable for layout in layouts)
    compute = forward + backward + head
    # Every micro-batch reads and writes the float32 sums.
    compute += 2 * 4 * trained * workload.micro_batches / rates.device_bytes
    compute += share * resident / rates.device_update_parameters
    away = offloaded_bytes(spec, config, workload)
    compute += 2 * away * waves / rates.device_bytes  # copies take the memory's time, too
    meanwhile = (reached - len(again)) * layer_forward / waves
    waited_offload = waves * max(0.0, away / rates.d2h_bytes - meanwhile)
    waited_offload += waves * max(0.0, away / rates.h2d_bytes - 2 * meanwhile)
    exposed = {
        "update": waited_update,
        "h2d": waited_h2d,
        "d2h": waited_d2h,
        "offload": waited_offload,
    }
    if num_ranks > 1:
        exposed["exchange"] = waited_exchange
    return StepTime(seconds=compute + sum(exposed.values()), compute=compute, exposed=exposed)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """FLOPs a token; ``forward_`` is forward alone, ``head`` all of it.

    Attributes:
        first: the first layer that backward reaches.
        left_out: elements of the matrices that recompute does not multiply, by layer.
    """

    first: int
    matrices: float
    attention: float
    forward_matrices: float
    forward_attention: float
    head: float
    left_out: tuple[int, ...]


@functools.lru_cache(maxsize=8)  # a search asks for one model thousands of times
def _work(spec: ModelSpec, sequence_length: int) -> _Work:
    head = 6.0 * spec.vocab_size * spec.hidden_size
    matrices = flops_per_token(spec, 1)
    forward_matrices, forward_attention = forward_flops_per_token(spec, sequence_length)
    return _Work(
        first=spec.first_trained_layer,
        matrices=matrices - head,
        attention=flops_per_token(spec, sequence_length) - matrices,
        forward_matrices=forward_matrices,
        forward_attention=forward_attention,
        head=head,
        left_out=tuple(num_left_out(spec, index) for index in range(spec.num_layers)),
    )


def _wait_for_moments(
    seconds: list[float], *, num_resident: int, begun: float, returning: float, between: float
) -> float:
    """Seconds that returning gradients wait for moments, which are updated in their order.

    Args:
        seconds: that each unit's moments take.
        num_resident: units, from the first on, whose moments the device updates.
        begun: when the first moments are begun.
        returning: when the first gradient, the last unit's, may return.
        between: two returns.
    """
    waited, done = 0.0, begun
    for number, unit in enumerate(reversed(seconds[num_resident:])):
        done += unit
        waited = max(waited, done - (returning + number * between))
    return waited
