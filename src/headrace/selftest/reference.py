"""What the streamed step is compared with: transformers' own model under plain autograd.

Eager attention and eager experts, float32, unmodified. Every document runs by itself, so that no
mask has to be built for packed rows and nothing of headrace's is in the reference.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.batch import IGNORE_INDEX
from headrace.models.anatomy import accepted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from headrace.batch import MicroBatch
    from headrace.models.spec import ModelSpec
    from headrace.store.state import ModelState


def reference_model(spec: ModelSpec, state: ModelState) -> nn.Module:
    """Transformers' model of ``spec`` with copies of the state's master weights."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow; only when needed

    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(spec.config),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    masters = {p.name: unit.master(p) for unit in state.units for p in unit.layout.params}
    missing, unexpected = model.load_state_dict(masters, strict=False)
    assert not unexpected, unexpected
    assert not set(missing) - {f"{spec.parts.head_path}.weight"}, missing
    model.tie_weights()
    model.train()
    found: nn.Module = model
    return found


def documents(batch: MicroBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and targets of every document of a micro-batch, each ``(1, length)``."""
    B, T = batch.input_ids_BT.shape
    if batch.cu_seqlens is None:
        bounds = [row * T for row in range(B + 1)]
    else:
        bounds = batch.cu_seqlens.tolist()
    ids, targets = batch.input_ids_BT.reshape(1, -1), batch.targets_BT.reshape(1, -1)
    for start, stop in itertools.pairwise(bounds):
        yield ids[:, start:stop], targets[:, start:stop]


def logits_of(model: nn.Module, ids_1T: torch.Tensor) -> torch.Tensor:
    """Logits of one document, ``(1, T, V)``."""
    arguments = {
        "input_ids": ids_1T,
        "position_ids": torch.arange(ids_1T.shape[1])[None],
        "use_cache": False,
    }
    logits: torch.Tensor = model(**accepted(model.forward, arguments)).logits
    return logits


def reference_gradients(
    model: nn.Module, batches: Sequence[MicroBatch]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over the global batch and its gradient by parameter name.

    A parameter without a gradient (an idle expert) has a zero one.
    """
    num_supervised = sum(batch.num_supervised_tokens for batch in batches)
    model.zero_grad()
    total = 0.0
    for batch in batches:
        for ids_1T, targets_1T in documents(batch):
            if not bool((targets_1T != IGNORE_INDEX).any()):
                continue
            loss = F.cross_entropy(
                logits_of(model, ids_1T)[0],
                targets_1T[0],
                reduction="sum",
                ignore_index=IGNORE_INDEX,
            )
            loss = loss / num_supervised
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            total += loss.item()
    return total, {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
