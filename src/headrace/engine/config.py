"""Settings of the streamed step and of its optimizer."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.engine.clipping import ClippingMode  # noqa: TC001 - read by pydantic at run time
from headrace.errors import ConfigError
from headrace.units import MIB

MAX_UPDATE_THREADS = 1024  # of a pool of the native kernels
Activations: TypeAlias = Literal["keep", "offload", "recompute"]
Leaving: TypeAlias = Literal["keep", "offload", "recompute", "nothing"]
UpdateOrder: TypeAlias = Literal["together", "weights_first"]
SMALLEST_EPS = 2.0**-126  # the smallest normal float32; the kernels take none below


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a step runs; none of these changes its result beyond rounding.

    Attributes:
        activations: what a layer leaves for its backward: ``"keep"`` its graph, ``"offload"`` what
            the graph saved to host memory, or ``"recompute"`` it from the layer's input.
        recompute_layers: with ``"keep"`` or ``"offload"``, how many layers, from the first that
            backward reaches, recompute all the same; None lets the trainer choose by what fits (on
            the CPU none).
        offload_layers: with ``"keep"``, how many of the layers that do not recompute offload,
            evenly among them; None lets the trainer choose (on the CPU none).
        device_units: how many units, from the embedding on, have weights, moments and gradient on
            the device instead of in host memory; None lets the trainer choose (on the CPU none).
        expert_slices: send the experts of a layer in so many slices, one after another, so that
            windows hold a slice and not a layer; such a layer recomputes. 1 sends layers whole;
            None lets the trainer choose on CUDA: as few as fit.
        rows_per_micro_batch: cut micro-batches of more rows; None takes them as they come, or lets
            the trainer choose on CUDA. Not for models with a balancing loss: it is a mean over the
            tokens of a micro-batch.
        micro_batches_per_wave: micro-batches that pass through a layer before the next layer is
            sent; None puts the whole step in one wave. Several waves accumulate gradients of all
            units in float32 on the device.
        weight_slots: layer windows on the device; two overlap transfer and compute.
        gradient_slots: gradient buffers of a layer on the device.
        chunk_bytes: piece of a gradient that returns, and is updated, on its own.
        update_threads: host threads of the optimizer; None takes the cores of this process.
        clipping: ``"deferred"`` updates once the gradient's norm is known, ``"optimistic"`` as
            gradients land and corrects, ``"auto"`` chooses by measuring (deferred on the CPU).
        update_order: ``"weights_first"`` updates every weight on the host before any moment, so
            that the next forward waits less and the host reads more in all; ``"together"`` does
            not; bitwise the same. None lets the trainer choose (together on the CPU).
        loss_chunk_tokens: tokens whose logits exist at a time.
        gradient_dtype: what returns to the host; None is bfloat16 for bfloat16 models, else
            float32.
        compile: compile the layer templates; None compiles on CUDA only.
        compile_backend: what ``torch.compile`` lowers to.
        deterministic: bitwise equal runs on CUDA (on the CPU they always are).
        lane_timeout_seconds: the longest a step waits for a transfer or update before it fails.
        poison_slots: overwrite freed slots with NaN and never reuse a sent layer: the check that
            no stale weight is read, used by the self-test and ``headrace doctor``.
        trace: file for a Chrome trace of the last steps, what every lane did when; None for none.
        lane_jitter_seconds: random delay before every transfer and update, for the same check.
    """

    activations: Activations = "keep"
    recompute_layers: int | None = None
    offload_layers: int | None = None
    device_units: int | None = None
    expert_slices: int | None = None
    rows_per_micro_batch: int | None = None
    micro_batches_per_wave: int | None = None
    weight_slots: int = 3
    gradient_slots: int = 2
    chunk_bytes: int = 64 * MIB
    update_threads: int | None = None
    clipping: ClippingMode = "auto"
    update_order: UpdateOrder | None = None
    loss_chunk_tokens: int = 1024
    gradient_dtype: Literal["bfloat16", "float32"] | None = None
    compile: bool | None = None
    compile_backend: str = "inductor"
    deterministic: bool = False
    lane_timeout_seconds: float = 600.0
    poison_slots: bool = False
    lane_jitter_seconds: float = 0.0
    trace: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that no step could run with."""
        limits = {
            "weight_slots": (self.weight_slots, 2),
            "gradient_slots": (self.gradient_slots, 1),
            "loss_chunk_tokens": (self.loss_chunk_tokens, 1),
            "chunk_bytes": (self.chunk_bytes, 4096),
            "recompute_layers": (self.recompute_layers or 0, 0),
            "offload_layers": (self.offload_layers or 0, 0),
            "device_units": (self.device_units or 0, 0),
        }
        for name, (value, least) in limits.items():
            if value < least:
                raise ConfigError(f"engine.{name} is {value}; it must be at least {least}")
        for name in (
            "rows_per_micro_batch",
            "micro_batches_per_wave",
            "update_threads",
            "expert_slices",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"engine.{name} is {value}; it must be at least 1, or absent")
        if (self.update_threads or 1) > MAX_UPDATE_THREADS:
            raise ConfigError(
                f"engine.update_threads is {self.update_threads}; a pool has at most "
                f"{MAX_UPDATE_THREADS}"
            )
        if not 0 < self.lane_timeout_seconds < math.inf:
            raise ConfigError(
                f"engine.lane_timeout_seconds is {self.lane_timeout_seconds}; it must be above 0"
            )
        if not 0 <= self.lane_jitter_seconds < math.inf:
            raise ConfigError(
                f"engine.lane_jitter_seconds is {self.lane_jitter_seconds}; it must not be negative"
            )
        if self.clipping not in ("auto", "deferred", "optimistic"):
            raise ConfigError(f"engine.clipping is {self.clipping!r}: auto, deferred or optimistic")
        if self.update_order not in (None, "together", "weights_first"):
            raise ConfigError(
                f"engine.update_order is {self.update_order!r}: together or weights_first"
            )
        if self.activations not in ("keep", "offload", "recompute"):
            raise ConfigError(
                f"engine.activations is {self.activations!r}: keep, offload or recompute"
            )

    def activation_plan(self, num_layers: int, first: int = 0) -> tuple[Leaving, ...]:
        """What each layer that is sent whole leaves for its backward.

        Those before ``first`` have none.
        """
        return _activation_plan(
            self.activations,
            self.recompute_layers or 0,
            self.offload_layers or 0,
            num_layers,
            first,
        )


@functools.lru_cache(maxsize=4096)
def _activation_plan(
    activations: Activations, recompute: int, offload: int, num_layers: int, first: int
) -> tuple[Leaving, ...]:
    reached = num_layers - first
    recompute = reached if activations == "recompute" else min(recompute, reached)
    rest = reached - recompute
    offload = rest if activations == "offload" else min(offload, rest)
    plan: list[Leaving] = ["nothing"] * first
    plan += ["recompute"] * recompute
    # Evenly among the others: copies of neighbours would queue up behind each other.
    plan += ["offload" if i * offload % rest < offload else "keep" for i in range(rest)]
    return tuple(plan)


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Overrides for the parameters whose name matches ``pattern`` (a regular expression).

    Attributes:
        pattern: searched in the Hugging Face parameter name; the first group that matches counts.
        learning_rate_scale: multiplies the step's learning rate.
        weight_decay: None keeps the optimizer's.
    """

    pattern: str
    learning_rate_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        """Refuse a pattern that is not a regular expression, and values outside their range."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"parameter group pattern {self.pattern!r}: {error}") from error
        if not 0 <= self.learning_rate_scale < math.inf:
            raise ConfigError(
                f"parameter group {self.pattern!r}: learning_rate_scale is "
                f"{self.learning_rate_scale}; it must be finite and not negative"
            )
        if not 0 <= (self.weight_decay or 0) < math.inf:
            raise ConfigError(
                f"parameter group {self.pattern!r}: weight_decay is {self.weight_decay}; it must "
                "be finite and not negative"
            )


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW with decoupled decay (Loshchilov & Hutter 2019), as ``torch.optim.AdamW``.

    Attributes:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: applied to matrices only, as transformers' Trainer does.
        groups: overrides by parameter name.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: tuple[ParamGroup, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must lie in [0, 1)")
        if not SMALLEST_EPS <= self.eps < math.inf:
            raise ConfigError(
                f"eps is {self.eps}; it must be finite and at least {SMALLEST_EPS:.3g}, the "
                "smallest normal float32"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(
                f"weight_decay is {self.weight_decay}; it must be finite and not negative"
            )
