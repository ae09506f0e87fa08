"""Values of buffers that no checkpoint holds: rotary frequencies, embedding scales, masks.

A model on the meta device has none. They come from the class's own initialisation rule, applied
to copies of the modules whose parameters stay on the meta device, so that nothing large is made.
Invariant: every value that is handed out was written by the rule.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from headrace.errors import ModelRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_UNSET = -(1 << 20)  # no integer buffer holds it


def initial_buffers(
    module: nn.Module, rule: Callable[[nn.Module], None], device: torch.device
) -> dict[str, torch.Tensor]:
    """Values of the buffers below ``module`` by path, bitwise those of a fresh model.

    Buffers that checkpoints hold are not among them: they are part of a unit.

    Args:
        module: on the meta device.
        rule: the model class's initialisation, applied to one module at a time.
        device: where the values go; they are computed on the CPU.

    Raises:
        ModelRefusedError: the rule leaves a buffer unset.
    """
    values: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules():
        # Buffers of this module alone, and which of them no checkpoint holds, have no public name.
        wanted = part._non_persistent_buffers_set & part._buffers.keys()  # noqa: SLF001
        if not wanted:
            continue
        twin = copy.copy(part)
        twin._buffers = {  # noqa: SLF001
            name: None if buffer is None else unset(buffer)
            for name, buffer in part._buffers.items()  # noqa: SLF001 - as above
        }
        with torch.no_grad(), torch.device("cpu"):
            rule(twin)
        for name in sorted(wanted):
            buffer = twin._buffers[name]  # noqa: SLF001 - as above
            if buffer is None:
                continue
            full = f"{path}.{name}" if path else name
            if is_unset(buffer):
                raise ModelRefusedError(
                    f"{type(part).__name__} has a buffer {full!r} that its model's initialisation "
                    "does not set, so that its value is not known without a checkpoint"
                )
            values[full] = buffer.to(device)
    return values


def unset(buffer: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and type that no rule has written to, on the CPU."""
    value = float("nan") if buffer.is_floating_point() else _UNSET
    if buffer.dtype == torch.bool:  # has no value to spare
        return torch.zeros_like(buffer, device="cpu")
    return torch.full_like(buffer, value, device="cpu")


def is_unset(buffer: torch.Tensor) -> bool:
    """Some of its values were never written."""
    if buffer.is_floating_point():
        return bool(torch.isnan(buffer).any())
    return buffer.dtype != torch.bool and bool((buffer == _UNSET).any())
