"""Settings of the streamed step and of its optimizer."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from headrace.engine.clipping import ClippingMode
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
        least = {
            "weight_slots": 2,  # one computes while the next is sent
            "gradient_slots": 1,
            "loss_chunk_tokens": 1,
            "chunk_bytes": 4096,
            "recompute_layers": 0,
            "offload_layers": 0,
            "device_units": 0,
            "rows_per_micro_batch": 1,
            "micro_batches_per_wave": 1,
            "update_threads": 1,
            "expert_slices": 1,
            "lane_jitter_seconds": 0,
        }
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and not value >= limit:
                raise self._refused(name, f"it must be at least {limit}")
        if (self.update_threads or 1) > MAX_UPDATE_THREADS:
            raise self._refused("update_threads", f"a pool has at most {MAX_UPDATE_THREADS}")
        if not 0 < self.lane_timeout_seconds < math.inf:
            raise self._refused("lane_timeout_seconds", "it must be above 0, and finite")
        if not self.lane_jitter_seconds < math.inf:
            raise self._refused("lane_jitter_seconds", "it must be finite")
        words = {"clipping": ClippingMode, "update_order": UpdateOrder, "activations": Activations}
        for name, kind in words.items():
            if getattr(self, name) not in (getattr(type(self), name), *get_args(kind)):
                raise self._refused(name, f"it must be {' or '.join(get_args(kind))}")

    def _refused(self, name: str, limit: str) -> ConfigError:
        return _refused(f"engine.{name}", getattr(self, name), limit, getattr(type(self), name))

    def compiles_on(self, device_type: str) -> bool:
        """Layer templates are compiled on a device of this type."""
        return device_type == "cuda" if self.compile is None else self.compile

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
            raise ConfigError(
                f"param_groups: the pattern {self.pattern!r} is no regular expression: {error}",
                remedy="escape what is meant literally: \\. for a dot, \\[ for a bracket",
            ) from error
        for name in ("learning_rate_scale", "weight_decay"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise _refused(
                    f"param_groups: {self.pattern!r}: {name}",
                    getattr(self, name),
                    "it must be finite and not negative",
                    getattr(type(self), name),
                    unset="the optimizer's counts",
                )


# As a training file calls them.
_NAMES = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}


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
        limits = {
            "beta1": (0 <= self.beta1 < 1, "it must lie in [0, 1)"),
            "beta2": (0 <= self.beta2 < 1, "it must lie in [0, 1)"),
            "eps": (
                SMALLEST_EPS <= self.eps < math.inf,
                f"it must be finite and at least {SMALLEST_EPS:.3g}, the smallest normal float32",
            ),
            "weight_decay": (
                0 <= self.weight_decay < math.inf,
                "it must be finite and not negative",
            ),
        }
        for name, (holds, limit) in limits.items():
            if not holds:
                default = getattr(type(self), name)
                raise _refused(_NAMES.get(name, name), getattr(self, name), limit, default)


def _refused(
    name: str, value: object, limit: str, default: object, *, unset: str = "what fits is chosen"
) -> ConfigError:
    """That a setting is outside its limit, and what holds where it is not set."""
    rest = unset if default is None else f"its default is {default!r}"
    return ConfigError(
        f"{name} is {value!r}; {limit}", remedy=f"correct it, or leave it out: {rest}"
    )
