"""The model that rivals train, as their users set it up: loss, checkpointing, compilation, kernels.

Every rival trains the same Hugging Face model with the loss inside its forward, so that a sharded
head is gathered when the loss reads it. Nothing here knows how a rival keeps its state.

Shape legend: B rows, T positions, N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class RivalOptions:
    """How a rival's user would run it.

    Attributes:
        checkpointing: what a layer keeps for backward: everything, the results of matrix products
            and attention, or its input.
        compiled: compile each layer, ``fullgraph`` and static shapes.
        loss: ``liger`` fused linear + cross-entropy, ``chunked`` over checkpointed chunks, or
            ``auto``: the first on CUDA where it is installed.
        liger_kernels: also Liger's norm, rotary and SwiGLU kernels; None is where Liger is
            installed and layers are not compiled.
        chunk_tokens: of the chunked loss.
    """

    checkpointing: Checkpointing = "full"
    compiled: bool = False
    loss: Literal["auto", "liger", "chunked"] = "auto"
    liger_kernels: bool | None = None
    chunk_tokens: int = 4096

    def chosen_loss(self, device: torch.device) -> str:
        """What ``auto`` comes to."""
        if self.loss != "auto":
            return self.loss
        return "liger" if device.type == "cuda" and liger_problem(device) is None else "chunked"

    def uses_liger_kernels(self, device: torch.device) -> bool:
        """What None comes to."""
        if self.liger_kernels is not None:
            return self.liger_kernels
        return not self.compiled and device.type == "cuda" and liger_problem(device) is None

    def described(self, device: torch.device) -> dict[str, Any]:
        """For the result: what this run really used, and why not Liger where it is left out."""
        return {
            "checkpointing": self.checkpointing,
            "compiled": self.compiled,
            "loss_kernel": self.chosen_loss(device),
            "liger_kernels": self.uses_liger_kernels(device),
            "liger_problem": liger_problem(device) if device.type == "cuda" else "no GPU",
        }


@functools.cache
def liger_problem(device: torch.device) -> str | None:
    """Why Liger's kernels do not work here, seen on a tiny model; None if they do."""
    from transformers.models.qwen3 import modeling_qwen3

    from benchmarks.cases.common import qwen3_config

    replaced = ("apply_rotary_pos_emb", "Qwen3RMSNorm", "Qwen3MLP")
    before = {name: getattr(modeling_qwen3, name) for name in replaced}
    options = RivalOptions(loss="liger", liger_kernels=True)
    ids_BT = torch.zeros((1, 64), dtype=torch.long, device=device)
    try:
        module = build_model(qwen3_config("smoke"), options, torch.bfloat16, device)
        module(ids_BT, ids_BT, 1.0).backward()
    except Exception as error:  # noqa: BLE001 - whatever it is, the rival goes on without
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        for name, value in before.items():
            setattr(modeling_qwen3, name, value)
    return None


class ModelWithLoss(nn.Module):
    """A causal LM whose forward is the scaled sum of its cross-entropy."""

    def __init__(self, model: Any, *, loss: str, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._chunk_tokens = chunk_tokens
        self._fused: Any = None
        if loss == "liger":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            self._fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def forward(
        self, input_ids_BT: torch.Tensor, targets_BT: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """``scale`` times the loss summed over supervised tokens, float32."""
        hidden_BTD = self.model.model(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        weight_VD = self.model.lm_head.weight
        if self._fused is not None:
            return self._fused(weight_VD, hidden_ND, targets_N).float() * scale
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], self._chunk_tokens):
            rows = slice(start, start + self._chunk_tokens)
            loss = loss + checkpoint(
                _summed_loss, hidden_ND[rows], weight_VD, targets_N[rows], use_reentrant=False
            )
        return loss * scale


def _summed_loss(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor
) -> torch.Tensor:
    logits_NV = F.linear(hidden_ND, weight_VD).float()
    return F.cross_entropy(logits_NV, targets_N, reduction="sum")


def build_model(
    config: Any, options: RivalOptions, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ModelWithLoss:
    """A randomly initialised model on ``device``, layers checkpointed and compiled as asked."""
    from transformers import AutoModelForCausalLM

    if options.uses_liger_kernels(device):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = _prepared(layer, options)
    return ModelWithLoss(model, loss=options.chosen_loss(device), chunk_tokens=options.chunk_tokens)


def _prepared(layer: nn.Module, options: RivalOptions) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if options.checkpointing == "full":
        layer = checkpoint_wrapper(layer, preserve_rng_state=False)
    elif options.checkpointing == "selective":
        layer = checkpoint_wrapper(layer, context_fn=_keep_dear_results(), preserve_rng_state=False)
    if options.compiled:
        # A layer that silently ran eager past the recompile limit would make a rival slow.
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # noqa: SLF001 - its public switch
        layer = torch.compile(layer, fullgraph=True, dynamic=False)
    return layer


def _keep_dear_results() -> Callable[[], Any]:
    """Selective checkpointing by operator: products and attention are kept, the rest recomputed."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    dear = {
        aten.mm.default,
        aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001 - operator names
        aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
    }

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keep = operator in dear
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)
