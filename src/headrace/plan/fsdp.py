"""What the same run needs under FSDP with everything resident on the cards.

Source of the accounting: the memory arithmetic of a published 35B run on eight H100 (bf16 weights
and gradients, fp32 master weights and two moments: 16 bytes a parameter, all sharded), and the
trap that ended its first attempt: under ``no_sync`` every card holds the *unsharded* gradient.
FSDP2 with fp32 parameters needs the same 16 bytes (fp32 shard and gradient 4 + 4, moments 8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.plan.memory import (
    DEVICE_RUNTIME_BYTES,
    KEPT_FACTOR,
    Item,
    usable_device,
)
from headrace.plan.parts import reached_share, trained_part
from headrace.plan.speed import compute_seconds

if TYPE_CHECKING:
    from headrace.plan.architecture import Architecture
    from headrace.plan.job import Activations, Job
    from headrace.plan.machine import Machine

NO_SYNC_QUOTE = (
    "FSDP will accumulate the full model gradients (instead of gradient shards) until the "
    "eventual sync"
)


@dataclass(frozen=True, kw_only=True)
class OptimizerNote:
    """Whether an optimizer works with FSDP2, and why.

    Attributes:
        names: as ``TrainingArguments.optim`` spells them.
        works: with parameters sharded as DTensors and everything on the cards.
        bytes_per_parameter: master weights and state, beside the bf16 weights.
        reason: what happens.
        source: where it was reported.
    """

    names: tuple[str, ...]
    works: bool
    bytes_per_parameter: float | None
    reason: str
    source: str


OPTIMIZERS = (
    OptimizerNote(
        names=("adamw_torch", "adamw_torch_fused"),
        works=True,
        bytes_per_parameter=12,
        reason="handles DTensors; the fused form needs a torch whose kernel does (2024 or later)",
        source="pytorch/pytorch#126670 (closed)",
    ),
    OptimizerNote(
        names=("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_8bit", "paged_adamw_32bit"),
        works=False,
        bytes_per_parameter=None,
        reason="bitsandbytes kernels take plain tensors: the first optimizer.step() fails "
        "('mixed torch.Tensor and DTensor', or an illegal memory access); the state is "
        "allocated in that step, so nothing fails before it",
        source="bitsandbytes-foundation/bitsandbytes#1633 (open)",
    ),
    OptimizerNote(
        names=("adamw_torch_8bit", "adamw_torch_4bit"),
        works=True,
        bytes_per_parameter=None,
        reason="torchao's low-bit state is a DTensor; with CPU offload it fails to compile",
        source="pytorch/ao#484 (merged), pytorch/ao#1931",
    ),
    OptimizerNote(
        names=("muon",),
        works=False,
        bytes_per_parameter=None,
        reason="orthogonalises whole matrices: a shard is not one; torch.optim.Muon also refuses "
        "the three-dimensional tensors of stacked experts",
        source="NVIDIA/Megatron-LM#5961, pytorch/torchtitan#4051",
    ),
    OptimizerNote(
        names=("galore_adamw_layerwise", "apollo_adamw_layerwise", "lomo", "adalomo"),
        works=False,
        bytes_per_parameter=None,
        reason="update inside backward: no gradient accumulation and no clipping by the global "
        "norm",
        source="hiyouga/LLaMA-Factory refuses the combination",
    ),
)


@dataclass(frozen=True, kw_only=True)
class FsdpNeed:
    """FSDP on the machine's cards.

    Attributes:
        items: bytes by kind on each card, without accumulation.
        activations: mode in which it fits, ``"recompute"`` if neither does.
        fits: without accumulation.
        accumulation: steps asked for.
        unsharded_gradient_bytes: on each card while gradients accumulate under ``no_sync``.
        fits_accumulating: with that on top of the shards.
        min_gpus: fewest cards of this kind that hold it without accumulation, None beyond 1,024.
        tokens_per_second: if compute binds and links are hidden, the upper bound.
    """

    items: tuple[Item, ...]
    activations: Activations
    fits: bool
    accumulation: int
    unsharded_gradient_bytes: int
    fits_accumulating: bool
    min_gpus: int | None
    tokens_per_second: float

    @property
    def card_bytes(self) -> int:
        """Total on each card, without accumulation."""
        return sum(item.num_bytes for item in self.items)


def per_card_gigabytes(num_parameters: int, num_gpus: int) -> dict[str, float]:
    """The source's arithmetic, in decimal GB: 16 bytes a parameter, sharded.

    >>> per_card_gigabytes(35_000_000_000, 8)["optimizer_gb_per_card"]
    52.5
    """
    giga = 1e9
    return {
        "num_parameters": num_parameters,
        "weights_gb": 2 * num_parameters / giga,
        "gradients_gb": 2 * num_parameters / giga,
        "optimizer_gb": 12 * num_parameters / giga,
        "weights_gb_per_card": 2 * num_parameters / giga / num_gpus,
        "gradients_gb_per_card": 2 * num_parameters / giga / num_gpus,
        "optimizer_gb_per_card": 12 * num_parameters / giga / num_gpus,
        "sharded_gb_per_card": 16 * num_parameters / giga / num_gpus,
        "unsharded_gradient_gb_per_card": 2 * num_parameters / giga,
    }


def _items(model: Architecture, job: Job, cards: int, activations: Activations) -> list[Item]:
    part, tokens = trained_part(model, job), job.micro_batch_tokens
    trained, weights = part.total, model.num_parameters + part.added
    kept = [round(2 * x.kept_elements * KEPT_FACTOR) for x in model.layers]
    held = sum(kept) if activations == "keep" else max(kept)
    inputs = 2 * model.hidden_size * (len(model.layers) + 2)
    return [
        Item(kind="weights", num_bytes=2 * weights // cards, formula=f"2 x {weights:,} / {cards}"),
        Item(
            kind="gradients", num_bytes=2 * trained // cards, formula=f"2 x {trained:,} / {cards}"
        ),
        Item(
            kind="optimizer state",
            num_bytes=12 * trained // cards,
            formula=f"12 x {trained:,} / {cards} (fp32 master weights, two fp32 moments)",
        ),
        Item(
            kind="gathered layers",
            num_bytes=2 * (2 * model.largest_layer + part.largest_layer),
            formula="bf16: the layer at work, the next one, a gradient to be scattered",
        ),
        Item(
            kind="activations",
            num_bytes=tokens * (inputs + held),
            formula=f"{tokens:,} tokens x {inputs + held:,} bytes ({activations})",
        ),
        Item(
            kind="loss",
            num_bytes=min(tokens, job.loss_chunk_tokens) * model.vocab_size * 10,
            formula="chunked logits",
        ),
        Item(kind="runtime", num_bytes=DEVICE_RUNTIME_BYTES, formula="CUDA context, workspaces"),
    ]


def _total(items: list[Item]) -> int:
    return sum(item.num_bytes for item in items)


def plan_fsdp(model: Architecture, job: Job, machine: Machine) -> FsdpNeed:
    """FSDP on ``machine``'s cards, with its accumulation trap."""
    limit, cards = usable_device(machine), machine.num_gpus
    activations: Activations = "keep"
    items = _items(model, job, cards, activations)
    if job.activations == "recompute" or _total(items) > limit:
        activations = "recompute"
        items = _items(model, job, cards, activations)
    part = trained_part(model, job)
    trained = part.total
    unsharded = 2 * trained
    sharded = _total(items)
    least = next(
        (k for k in range(1, 1025) if _total(_items(model, job, k, "recompute")) <= limit), None
    )
    seconds = compute_seconds(
        model, job.max_length, job.micro_batch_tokens, machine.matmul_tflops.value
    )
    # Shares of forward and backward: a third each for the forward, for gradients of inputs and for
    # those of weights, which parameters that stay as they are do not have.
    reached = reached_share(model, part)
    thirds = 1 + reached + part.own / model.num_parameters
    thirds += reached * (activations == "recompute")
    seconds *= thirds / 3
    # A micro-batch gathers all weights twice and scatters one gradient, hidden behind compute
    # at best.
    link = machine.nvlink.value * 1e9
    moved = 2 * (2 * model.num_parameters + trained) * (cards - 1) / cards / link
    return FsdpNeed(
        items=tuple(items),
        activations=activations,
        fits=sharded <= limit,
        accumulation=job.accumulation,
        unsharded_gradient_bytes=unsharded,
        # Before the first optimizer step the state is not allocated yet, but it is in the second.
        fits_accumulating=sharded - 2 * trained // cards + unsharded <= limit,
        min_gpus=least,
        tokens_per_second=cards * job.micro_batch_tokens / max(seconds, moved),
    )


def optimizer_notes(num_parameters: int, num_gpus: int) -> list[dict[str, Any]]:
    """The table of optimizers with their bytes on each card."""
    return [
        {
            "optimizers": list(note.names),
            "works_with_fsdp2": note.works,
            "state_bytes_per_card": None
            if note.bytes_per_parameter is None
            else round(note.bytes_per_parameter * num_parameters / num_gpus),
            "reason": note.reason,
            "source": note.source,
        }
        for note in OPTIMIZERS
    ]
