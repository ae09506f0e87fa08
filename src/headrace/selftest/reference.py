"""What the streamed step is compared with: transformers' own model under plain autograd.

Eager attention and eager experts, float32, unmodified. Every document runs by itself, so that no
mask has to be built for packed rows and nothing of headrace's is in the reference.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.batch import IGNORE_INDEX
from headrace.models import families
from headrace.models.adapters import plain_name
from headrace.models.anatomy import accepted
from headrace.store.adapter_files import write_adapter

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
    masters = {
        p.name: unit.master(p) for unit in state.units for p in unit.layout.params if not p.adapter
    }
    missing, unexpected = model.load_state_dict(masters, strict=False)
    assert not unexpected, unexpected
    assert not set(missing) - {f"{spec.parts.head_path}.weight"}, missing
    model.tie_weights()
    model.train()
    families.restore(model)
    found: nn.Module = model
    return found


def with_adapters(spec: ModelSpec, state: ModelState) -> nn.Module:
    """The same with the state's adapters, as PEFT loads them from their files."""
    from peft import PeftModel  # noqa: PLC0415 - optional, slow

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of transformers' deprecated names
        write_adapter(Path(folder), spec, state)
        loaded = PeftModel.from_pretrained(reference_model(spec, state), folder, is_trainable=True)
    loaded.train()
    model: nn.Module = loaded.base_model.model  # transformers' own class, with PEFT's layers
    return model


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


def output_of(model: nn.Module, ids_1T: torch.Tensor, **options: Any) -> Any:
    """What transformers' model returns for one document."""
    arguments = {
        "input_ids": ids_1T,
        "position_ids": torch.arange(ids_1T.shape[1])[None],
        "use_cache": False,
    }
    return model(**accepted(model.forward, arguments), **options)


def logits_of(model: nn.Module, ids_1T: torch.Tensor) -> torch.Tensor:
    """Logits of one document, ``(1, T, V)``."""
    logits: torch.Tensor = output_of(model, ids_1T).logits
    return logits


def reference_gradients(
    model: nn.Module, batches: Sequence[MicroBatch]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over the global batch and its gradient by name of the trained parameters.

    A parameter without a gradient (an idle expert) has a zero one. Where the configuration asks
    for router logits, the class's own balancing loss is part of the gradient, not of the loss: of
    every micro-batch by itself, over all its layers, weighted by its supervised tokens.
    """
    balances = bool(getattr(model.config, "output_router_logits", False))
    num_supervised = sum(batch.num_supervised_tokens for batch in batches)
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss_sum: torch.Tensor = torch.zeros(())
        routers: list[tuple[torch.Tensor, ...]] = []
        for ids_1T, targets_1T in documents(batch):
            output = output_of(model, ids_1T)
            loss_sum = loss_sum + F.cross_entropy(
                output.logits[0], targets_1T[0], reduction="sum", ignore_index=IGNORE_INDEX
            )
            if balances:
                routers.append(output.router_logits)
        loss = loss_sum / num_supervised
        total += loss.item()
        if balances:
            weight = batch.num_supervised_tokens / num_supervised
            loss = loss + weight * _balancing_loss(model, routers)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    return total, {
        plain(name): torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def plain(name: str) -> str:
    """A parameter's name without what PEFT's wrappers add."""
    return plain_name(name.replace(".modules_to_save.", "."))


def _balancing_loss(model: Any, routers: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """The class's own auxiliary loss over the documents of one micro-batch, with coefficient."""
    by_layer = tuple(torch.cat(parts) for parts in zip(*routers, strict=True))
    function: Any = vars(sys.modules[type(model).__module__])["load_balancing_loss_func"]
    value: torch.Tensor = function(by_layer, model.num_experts, model.num_experts_per_tok)
    return float(model.router_aux_loss_coef) * value
