"""FSDP2 on one device, resident or offloaded, as PyTorch's own training code sets it up.

``mixed`` precision is float32 masters and moments with bfloat16 compute and float32 reduction: the
work that headrace does. ``bfloat16`` keeps bfloat16 parameters and moments only: less memory, less
work, updates that small learning rates lose; a row with it says so.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import distributed as dist

from benchmarks.cases.common import LEARNING_RATE, MAX_GRAD_NORM
from benchmarks.cases.rival_model import ModelWithLoss, RivalOptions, build_model
from headrace.models.attention import pinned_backend

Precision = Literal["mixed", "bfloat16", "float32"]


class Fsdp2:
    """One process that owns every shard."""

    def __init__(
        self,
        config: Any,
        options: RivalOptions,
        *,
        device: torch.device,
        offload: bool = False,
        precision: Precision = "mixed",
        learning_rate: float = LEARNING_RATE,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._device = device
        open_group(device)
        pure = precision == "bfloat16"
        self.module = build_model(
            config, options, torch.bfloat16 if pure else torch.float32, device, seed
        )
        self._shard(offload=offload, mixed=precision == "mixed")
        matrices = [p for p in self.module.parameters() if p.ndim >= 2]
        others = [p for p in self.module.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
            lr=learning_rate,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=weight_decay,
            fused=True,
        )
        self.parameters = matrices + others

    def _shard(self, *, offload: bool, mixed: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        settings: dict[str, Any] = {"mesh": init_device_mesh(self._device.type, (1,))}
        if mixed:
            settings["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        if offload:
            pinned = self._device.type == "cuda"
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
        base = self.module.model.model
        for layer in base.layers:
            fully_shard(layer, **settings)
        if base.embed_tokens.weight is not self.module.model.lm_head.weight:
            fully_shard(base.embed_tokens, **settings)
        fully_shard(self.module, **settings)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Overwrite every parameter with the one of its Hugging Face name."""
        left = dict(weights)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.to_local().copy_(left.pop(plain_name(name)))
        if left:
            raise ValueError(f"no parameter takes {', '.join(sorted(left)[:3])}")

    def set_learning_rate(self, rate: float) -> None:
        """Of the steps from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(
        self, ids_NT: torch.Tensor, targets_NT: torch.Tensor, rows: int
    ) -> tuple[float, float]:
        """One optimizer step in micro-batches of ``rows``; the loss and the gradient's norm."""
        loss = accumulate(self.module, ids_NT, targets_NT, rows, self._device)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        norm = getattr(norm, "full_tensor", lambda: norm)()
        return loss, float(norm)


def accumulate(
    module: ModelWithLoss,
    ids_NT: torch.Tensor,
    targets_NT: torch.Tensor,
    rows: int,
    device: torch.device,
) -> float:
    """Forward and backward of a step; gradients are of the mean over all supervised tokens."""
    scale = 1.0 / int((targets_NT != -100).sum())
    total = torch.zeros((), device=device)
    with pinned_backend(deterministic=False):
        for ids_BT, targets_BT in zip(ids_NT.split(rows), targets_NT.split(rows), strict=True):
            loss = module(ids_BT.to(device, non_blocking=True), targets_BT.to(device), scale)
            loss.backward()
            total += loss.detach()
    return float(total)


def plain_name(name: str) -> str:
    """A parameter's Hugging Face name: without what wrappers put into it."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name.removeprefix("model.")


def open_group(device: torch.device) -> None:
    """A process group of one; offloaded tensors are reduced by gloo."""
    if dist.is_initialized():
        return
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )


def offloaded_host_bytes(sizes: list[int]) -> int:
    """Host bytes that ``CPUOffloadPolicy`` takes for float32 parameters of ``sizes`` elements.

    Parameters and gradients are pinned one by one, and torch rounds a pinned block up to a power
    of two; the two moments are ordinary memory.
    """
    pinned = sum(1 << (4 * size - 1).bit_length() for size in sizes)
    return 2 * pinned + 8 * sum(sizes)
