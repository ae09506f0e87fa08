"""What single families need beyond the model's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.models.families import gated_delta

if TYPE_CHECKING:
    import torch
    from torch import nn


def prepare(model: nn.Module, device: torch.device) -> None:
    """Decide which extra kernels the layers of a model use on a device."""
    gated_delta.prepare(model, device)


def adapt(model: nn.Module) -> None:
    """Give the mixers of a model, in place, what packed documents need of them."""
    gated_delta.adapt(model)


def restore(model: nn.Module) -> None:
    """Let a model of transformers' own call its torch functions, no other package's, in place."""
    gated_delta.restore(model)
