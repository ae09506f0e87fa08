"""Device and host bytes of a step, before anything is allocated.

Counts what the engine allocates (slots, accumulators, resident state) and what a step holds at its
peak, the end of forward, when the activations of a wave, the head's chunk and a layer's temporaries
exist together. Of several ranks it counts one: its shard of state and gradients, and slots that
hold whole units. Pure.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.offload import IN_FLIGHT
from headrace.store.ranges import Share, unit_shard
from headrace.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine.config import EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.store.layout import ParamSpec, UnitLayout
    from headrace.store.ranges import UnitShard
    from headrace.store.state import StateDtype

_BF16, _FP32 = 2, 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The tokens of a step.

    Attributes:
        tokens: positions of one micro-batch.
        micro_batches: micro-batches of a step.
        sequence_length: tokens that attend to each other at most.
        rows: of one micro-batch, which can be cut between them.
    """

    tokens: int
    micro_batches: int
    sequence_length: int
    rows: int = 1

    def cut(self, rows: int) -> Workload:
        """The same tokens in micro-batches of at most ``rows`` rows."""
        rows = min(rows, self.rows)
        pieces = -(-self.rows // rows)
        return Workload(
            tokens=self.tokens // self.rows * rows,
            micro_batches=self.micro_batches * pieces,
            sequence_length=self.sequence_length,
            rows=rows,
        )

    def per_wave(self, config: EngineConfig) -> int:
        """Micro-batches of the largest wave."""
        return min(config.micro_batches_per_wave or self.micro_batches, self.micro_batches)

    def num_waves(self, config: EngineConfig) -> int:
        """Waves of a step."""
        return -(-self.micro_batches // self.per_wave(config))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes by kind.

    Attributes:
        device: on the compute device.
        host: in host memory.
    """

    device: dict[str, int]
    host: dict[str, int]

    @property
    def device_bytes(self) -> int:
        """All device bytes."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """All host bytes."""
        return sum(self.host.values())

    def explain(self, where: str) -> str:
        """The arithmetic of ``"device"`` or ``"host"`` in one line."""
        items = self.device if where == "device" else self.host
        total = sum(items.values())
        terms = " + ".join(f"{name} {format_bytes(size)}" for name, size in items.items() if size)
        return f"{terms or 'nothing'} = {format_bytes(total)}"


def step_budget(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: StateDtype,
    workload: Workload,
    *,
    cpu: bool = False,
    num_ranks: int = 1,
) -> Budget:
    """What a run with these settings needs on a CUDA device and its host.

    On the CPU (``cpu``) device and host are one memory, compute is float32, and the figure is a
    lower bound: layers that are not compiled keep more than their dearest results.

    Args:
        spec: the model.
        config: with ``device_units`` and ``recompute_layers`` chosen.
        dtype: of the state.
        workload: the tokens of a step.
        cpu: the model runs on the host.
        num_ranks: that share the state; the figures are those of one.
    """
    shards = _shards(spec, num_ranks)
    resident = shards[: config.device_units or 0]
    streamed = shards[len(resident) :]
    compute = _BF16 if dtype == "bfloat16" and not cpu else _FP32
    returned = _FP32 if config.gradient_dtype == "float32" or dtype == "float32" else _BF16
    device = {
        "state on the device": sum(_state_bytes(shard, dtype) for shard in resident),
        "gradients kept on the device": returned * _retained_elements(shards, config, workload),
        "weight slots": compute * _slot_elements(shards, len(resident), config),
        "gradient accumulators": _FP32 * _accumulator_elements(shards, config, workload),
        "activations": _activation_bytes(spec, config, workload, compute),
        "temporaries": _temporary_bytes(spec, config, workload, compute, cpu=cpu),
    }
    host = {
        "state": sum(_state_bytes(shard, dtype) for shard in streamed),
        "returned gradients": sum(returned * shard.trained.numel for shard in streamed),
        "offloaded activations": offloaded_bytes(spec, config, workload, compute),
    }
    return Budget(device=device, host=host)


@functools.lru_cache(maxsize=4)  # a search asks for one model thousands of times
def _shards(spec: ModelSpec, num_ranks: int) -> tuple[UnitShard, ...]:
    share = Share(num_ranks=num_ranks)
    return tuple(unit_shard(layout, share) for layout in spec.units)


def kept_elements_per_token(spec: ModelSpec, layer: UnitLayout) -> int:
    """What a kept layer saves a token: its input, matmul results and the attention result.

    The result of the last matrix (the one that is added to the residual) is not read by backward.
    Experts save for as many as a token uses.
    """
    outputs = sum(_outputs(spec, layer, p) for p in layer.params if len(p.shape) >= 2)
    config = spec.config
    head_size = getattr(config, "head_dim", None) or spec.hidden_size // config.num_attention_heads
    return outputs + int(config.num_attention_heads * head_size)


def _outputs(spec: ModelSpec, layer: UnitLayout, param: ParamSpec) -> int:
    """Elements a token of what a matrix gives; experts lie in one parameter, (X, O, I) or not."""
    if len(param.shape) != 3 or ".experts." not in param.name:
        return param.shape[0]
    chosen = int(getattr(spec.config, "num_experts_per_tok", None) or 1)
    if not param.local_name.endswith("down_proj"):
        _, one, other = param.shape
        return chosen * (other if one == spec.hidden_size else one)
    # Weighted after a bias, else before the matrix (:mod:`headrace.models.experts`).
    biased = any(p.local_name == f"{param.local_name}_bias" for p in layer.params)
    return chosen * spec.hidden_size if biased else 0


def _state_bytes(shard: UnitShard, dtype: StateDtype) -> int:
    weights = _BF16 if dtype == "bfloat16" else _FP32
    return weights * shard.numel + (12 - weights) * shard.trained.numel


def _slot_elements(shards: Sequence[UnitShard], num_resident: int, config: EngineConfig) -> int:
    if not shards[0].is_whole:  # what is on the device is gathered in a slot, too
        num_resident = 0
    streamed_layers = [shard for i, shard in enumerate(shards[1:-1], 1) if i >= num_resident]
    num_slots = min(config.weight_slots, len(streamed_layers) + 1) if streamed_layers else 0
    elements = num_slots * max((shard.slot_size for shard in streamed_layers), default=0)
    elements += 0 if num_resident > 0 else shards[0].slot_size
    return elements + (0 if num_resident >= len(shards) else shards[-1].slot_size)


def _accumulator_elements(
    shards: Sequence[UnitShard], config: EngineConfig, workload: Workload
) -> int:
    layers = shards[1:-1]
    ends = shards[0].gradient_size + shards[-1].gradient_size
    if workload.num_waves(config) > 1:
        return ends + sum(shard.gradient_size for shard in layers)
    count = min(config.gradient_slots, len(layers))
    return ends + count * max(shard.gradient_size for shard in layers)


def _retained_elements(
    shards: Sequence[UnitShard], config: EngineConfig, workload: Workload
) -> int:
    """Gradients that must leave an accumulator in which layers, or ranks, take turns."""
    num_resident = config.device_units or 0
    if not shards[0].is_whole:
        return sum(shard.trained.numel for shard in shards[:num_resident])
    if workload.num_waves(config) > 1:
        return 0
    return sum(s.trained.numel for s in shards[1 : min(num_resident, len(shards) - 1)])


def _activation_bytes(
    spec: ModelSpec, config: EngineConfig, workload: Workload, compute: int
) -> int:
    plan = config.activation_plan(spec.num_layers, spec.first_trained_layer)
    tokens = workload.tokens * workload.per_wave(config)
    kept = sum(size for size, what in zip(_kept(spec), plan, strict=True) if what == "keep")
    inputs = (plan.count("offload") + plan.count("recompute")) * spec.hidden_size
    # On its way, and being made: so many micro-batches of a layer, not of a wave.
    leaving = workload.tokens * (IN_FLIGHT + 1) * max(_leaving(spec, config), default=0)
    # The wave's hidden state and its gradient.
    return compute * (tokens * (kept + inputs + 2 * spec.hidden_size) + leaving)


def offloaded_bytes(
    spec: ModelSpec, config: EngineConfig, workload: Workload, compute: int = _BF16
) -> int:
    """What a wave sends to host memory: what layers save, less their input."""
    return compute * workload.tokens * workload.per_wave(config) * sum(_leaving(spec, config))


def _leaving(spec: ModelSpec, config: EngineConfig) -> list[int]:
    """Elements a token of each layer that offloads."""
    hidden = spec.hidden_size
    plan = config.activation_plan(spec.num_layers, spec.first_trained_layer)
    sizes = zip(_kept(spec), plan, strict=True)
    return [size - hidden for size, what in sizes if what == "offload"]


@functools.lru_cache(maxsize=4)  # as above
def _kept(spec: ModelSpec) -> tuple[int, ...]:
    return tuple(kept_elements_per_token(spec, layer) for layer in spec.units[1:-1])


@functools.lru_cache(maxsize=4)
def _largest_layer(spec: ModelSpec) -> tuple[int, int]:
    """What it keeps a token, and its trainable elements."""
    layer = max(spec.units[1:-1], key=lambda unit: unit.size)
    return kept_elements_per_token(spec, layer), layer.num_trainable


def _temporary_bytes(
    spec: ModelSpec, config: EngineConfig, workload: Workload, compute: int, *, cpu: bool
) -> int:
    chunk = min(config.loss_chunk_tokens, workload.tokens)
    matrix = 0 if cpu else spec.vocab_size * spec.hidden_size  # the CPU adds in place
    head = 2 * compute * chunk * spec.vocab_size + _FP32 * matrix
    head += 2 * compute * workload.tokens * spec.hidden_size
    outputs, num_trainable = _largest_layer(spec)
    backward = compute * (2 * workload.tokens * outputs + num_trainable)
    return max(head, backward)
