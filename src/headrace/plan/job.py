"""What is to be run, and what this version of the engine can do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError

Moments = Literal["float32", "bfloat16", "8bit"]
Activations = Literal["keep", "offload", "recompute"]
Leaving = Literal["keep", "offload", "recompute", "nothing"]
Dtype = Literal["bfloat16", "float32"]
Clipping = Literal["auto", "deferred", "optimistic", "off"]


@dataclass(frozen=True, kw_only=True)
class Features:
    """Capabilities a plan may count on; ``THIS_VERSION`` says what is installed.

    Attributes:
        moments: types that the optimizer state can have.
        state_on_device: optimizer state may lie in spare device memory.
        selective_keep: a kept layer saves matmul and attention outputs only.
    """

    moments: tuple[Moments, ...]
    state_on_device: bool
    selective_keep: bool


THIS_VERSION = Features(moments=("float32",), state_on_device=True, selective_keep=True)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Which parameters have gradients and optimizer state.

    Attributes:
        total: all of them.
        added: those of them that are adapters, which the model has not.
        largest_layer: the most of a decoder layer.
        embedding: of the embedding.
        head: of the head.
        first_layer: where backward ends: nothing is trained below it.
        adapts_experts: experts have adapters, with which their layers are sent whole.
    """

    total: int
    added: int
    largest_layer: int
    embedding: int
    head: int
    first_layer: int = 0
    adapts_experts: bool = False

    @property
    def own(self) -> int:
        """Trained parameters of the model itself."""
        return self.total - self.added


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job, in tokens and bytes.

    Attributes:
        max_length: tokens of a sequence.
        micro_batch: sequences that pass through a layer together.
        tokens_per_step: of the global batch, all cards together.
        dtype: of the model.
        moments: type of the optimizer state.
        clipping: how the global norm is clipped: ``"deferred"`` updates when it is known,
            ``"optimistic"`` as gradients land, to be corrected; ``"auto"`` is the faster of both
            (deferred on a CPU); ``"off"`` does not clip.
        activations: what layers leave for backward; None lets the plan choose.
        recompute_layers: with activations kept or offloaded, how many recompute all the same.
        offload_layers: with activations kept, how many of the others offload to the host.
        device_units: units, from the embedding on, whose weights and state lie on the device; None
            puts there what the host has no room for.
        expert_slices: that the experts of a layer are sent in; 1 sends layers whole, None lets the
            plan choose.
        gradient_bytes: of an element that returns to the host; None is the model's width.
        compiled: layers are compiled, and keep less.
        waves: passes over the layers a step; None lets the plan choose.
        accumulation: ``gradient_accumulation_steps`` of an FSDP run of the same batch.
        num_checkpoints: complete checkpoints kept on disk.
        num_tokens: to train on, None where only the speed is asked for.
        price: of one card, an hour, in any currency.
        weight_slots: layer windows on the device.
        gradient_slots: gradient buffers of a layer on the device.
        loss_chunk_tokens: tokens whose logits exist at a time.
        async_save: checkpoints are written while training goes on.
        save_bytes: host memory that saves may take; None is the state of the largest unit.
        lora_rank: train adapters of this rank on every linear layer, and the model not; None
            trains the model.
        trained: which parameters are trained, where that is neither all nor those of lora_rank.
    """

    max_length: int = 4096
    micro_batch: int = 1
    tokens_per_step: int = 32768
    dtype: Dtype = "bfloat16"
    moments: Moments = "float32"
    clipping: Clipping = "auto"
    activations: Activations | None = None
    recompute_layers: int = 0
    offload_layers: int = 0
    device_units: int | None = None
    expert_slices: int | None = None
    gradient_bytes: int | None = None
    compiled: bool = True
    waves: int | None = None
    accumulation: int = 1
    num_checkpoints: int = 1
    num_tokens: int | None = None
    price: float | None = None
    weight_slots: int = 3
    gradient_slots: int = 2
    loss_chunk_tokens: int = 1024
    async_save: bool = True
    save_bytes: int | None = None
    lora_rank: int | None = None
    trained: Trained | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive."""
        for name in ("max_length", "micro_batch", "tokens_per_step", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at least 1",
                    remedy=f"a positive number, or leave {name} out",
                )
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ConfigError(
                f"the price is {self.price}; it must be finite and not negative",
                remedy="of one card and hour, or leave --price out",
            )

    @property
    def trains_all(self) -> bool:
        """Whether every parameter of the model is trained, and nothing besides."""
        return self.lora_rank is None and self.trained is None

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.max_length * self.micro_batch

    def num_micro_batches(self, num_gpus: int) -> int:
        """Micro-batches of a step on each card."""
        return max(1, math.ceil(self.tokens_per_step / (self.micro_batch_tokens * num_gpus)))

    def card_tokens(self, num_gpus: int) -> int:
        """Tokens of a step that one card computes."""
        return self.num_micro_batches(num_gpus) * self.micro_batch_tokens
