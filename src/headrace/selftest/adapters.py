"""The checks of a self-test with low-rank adapters: against PEFT's own model under autograd.

The adapters' values are written to files and loaded by PEFT, so that format, scaling and targets
are part of what is compared. An adapter whose module is never called trains nothing, and refuses.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.models import families
from headrace.models.spec import ModelSpec
from headrace.selftest.checks import (
    CheckFailedError,
    GradientCheck,
    check_gradients,
    streamed_gradients,
)
from headrace.selftest.reference import documents, logits_of, plain, with_adapters
from headrace.selftest.twin import filled_state, make_batches
from headrace.store.checkpoint import export_pretrained

if TYPE_CHECKING:
    from torch import nn

    from headrace.models.adapters import Adapters
    from headrace.models.lora import LoraSettings
    from headrace.store.state import ModelState

MAX_RANK = 4
MAX_MERGED_ERROR = 1e-4  # of the largest logit: one rounding of each weight, through all layers


def tiny_settings(adapters: Adapters) -> LoraSettings:
    """The same adapters on a tiny twin, which has fewer layers and drops nothing."""
    return replace(
        adapters.settings,
        rank=min(adapters.settings.rank, MAX_RANK),
        rank_pattern=tuple((k, min(r, MAX_RANK + 1)) for k, r in adapters.settings.rank_pattern),
        dropout=0.0,  # PEFT would draw another mask
        target_modules=adapters.relative_targets,
        target_parameters=adapters.relative_parameters,
        layers=None,
    )


def check_adapters(tiny: Any, settings: LoraSettings, *, compiled: bool = False) -> GradientCheck:
    """Gradients, files and merging of adapters on a tiny twin.

    Args:
        tiny: the tiny configuration.
        settings: as the run has them.
        compiled: through traced layers, too.

    Raises:
        CheckFailedError: something differs from PEFT, or an adapter does nothing.
        ModelRefusedError: a target can have no adapter.
    """
    spec = ModelSpec.from_config(tiny, lora=settings)
    state = filled_state(spec)
    try:
        model = with_adapters(spec, state)
        _check_loaded(state, model)
        found = check_gradients(spec, state, model, compiled=compiled)
        _check_alive(spec, state)
        _check_merged(spec, state, model)
    finally:
        state.close()
    return found


def _check_loaded(state: ModelState, model: nn.Module) -> None:
    """PEFT passes over what it cannot place in its own file, and leaves fresh adapters there."""
    loaded = {plain(name): value for name, value in model.named_parameters()}
    for unit in state.units:
        for param in unit.layout.params:
            if not param.trainable or torch.equal(loaded[param.name].cpu(), unit.master(param)):
                continue
            raise CheckFailedError(
                f"PEFT does not load {param.name} from the file it belongs in: transformers gives "
                "that name another meaning when it reads weights of this class. Leave its module "
                "out of lora_target_modules"
            )


def _check_alive(spec: ModelSpec, state: ModelState) -> None:
    batches = make_batches(2, vocab_size=spec.vocab_size)
    _, gradients = streamed_gradients(spec, state, batches)
    for unit in spec.units:
        for param in unit.params:
            if param.adapter and not bool(gradients[param.name].any()):
                raise CheckFailedError(
                    f"the adapter {param.name} has no gradient: its module is never called, the "
                    "model reads its weight directly"
                )


def _check_merged(spec: ModelSpec, state: ModelState, model: nn.Module) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow; only when needed

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        out = export_pretrained(spec, state, Path(folder) / "merged")
        alone = AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).train()
        families.restore(alone)
        (batch,) = make_batches(1, vocab_size=spec.vocab_size, seed=5)
        for ids_1T, _ in documents(batch):
            wanted, got = logits_of(model, ids_1T), logits_of(alone, ids_1T)
            error = float((got - wanted).abs().max() / wanted.abs().max())
            if not error <= MAX_MERGED_ERROR:
                raise CheckFailedError(
                    f"logits of the merged model differ from the adapter's by {error:.2g} relative"
                )
