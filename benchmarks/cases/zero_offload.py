"""DeepSpeed ZeRO-Offload on one device: bfloat16 weights there, fp32 masters and Adam on the host.

The configuration is the one its documentation gives for ZeRO-2 (or 3) with a CPU optimizer. Its
host kernel is compiled on first use, by the C++ compiler alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.cases.common import LEARNING_RATE, MAX_GRAD_NORM
from benchmarks.cases.rival_model import RivalOptions, build_model
from headrace.models.attention import pinned_backend

HOST_BYTES_A_PARAMETER = 18
"""fp32 master, two moments, fp32 gradient (16), and buffers; 19.5 were measured at 4B."""


class ZeroOffload:
    """A DeepSpeed engine; its micro-batch size is fixed when it is built."""

    def __init__(
        self,
        config: Any,
        options: RivalOptions,
        *,
        device: torch.device,
        rows: int,
        num_micro_batches: int,
        stage: int = 2,
        learning_rate: float = LEARNING_RATE,
    ) -> None:
        cuda = device.type == "cuda"
        if not cuda:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}  # fmt: skip
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        deepspeed.init_distributed("nccl" if cuda else "gloo", auto_mpi_discovery=False)
        self._device, self._rows, self._count = device, rows, num_micro_batches
        module = build_model(config, options, torch.bfloat16, device)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=zero_config(
                rows=rows, num_micro_batches=num_micro_batches, stage=stage, pinned=cuda,
                learning_rate=learning_rate,
            ),
        )  # fmt: skip

    def step(
        self, ids_NT: torch.Tensor, targets_NT: torch.Tensor, rows: int
    ) -> tuple[float, float]:
        """One optimizer step; the loss and the gradient's norm."""
        assert rows == self._rows
        # DeepSpeed divides each loss by the number of micro-batches.
        scale = self._count / int((targets_NT != -100).sum())
        total = torch.zeros((), device=self._device)
        with pinned_backend(deterministic=False):
            for ids_BT, targets_BT in zip(ids_NT.split(rows), targets_NT.split(rows), strict=True):
                loss = self._engine(ids_BT.to(self._device), targets_BT.to(self._device), scale)
                self._engine.backward(loss)
                self._engine.step()
                total += loss.detach() / self._count
        return float(total), float(self._engine.get_global_grad_norm())


def zero_config(
    *, rows: int, num_micro_batches: int, stage: int, pinned: bool, learning_rate: float
) -> dict[str, Any]:
    """What a user writes into ``ds_config.json``."""
    offload = {"device": "cpu", "pin_memory": pinned}
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": offload,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if stage == 3:
        zero["offload_param"] = offload
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": num_micro_batches,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_GRAD_NORM,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": learning_rate, "betas": [0.9, 0.999], "eps": 1e-8,
                       "weight_decay": 0.0},
        },
        "zero_optimization": zero,
    }  # fmt: skip
