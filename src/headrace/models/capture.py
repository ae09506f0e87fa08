"""What the decoder layers are called with: captured from the model's own forward, not rebuilt.

The base model runs with its real embedding weights, layers replaced by stubs that record their
arguments and return their input, the final norm by the identity, and rotary modules rebuilt on
the real device. So embedding multipliers, rotary tables per layer type and masks come from the
model's own code. The result carries gradients to the embedding's parameters.

Shape legend: B rows, T positions, D hidden size.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.models.attention import packing_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.models.spec import ModelSpec

LayerArguments = dict[str, Any]


class _Stub(nn.Module):
    """Stands for a decoder layer: records the call, returns the hidden state unchanged."""

    def __init__(self, layer: nn.Module, record: list[LayerArguments]) -> None:
        super().__init__()
        # Attributes that the base model reads off a layer (attention_type, layer_idx, ...).
        for name, value in vars(layer).items():
            if not name.startswith("_") and not isinstance(value, (nn.Module, torch.Tensor)):
                setattr(self, name, value)
        self._record = record

    def forward(self, hidden_BTD: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._record.append(kwargs)
        return hidden_BTD


class CallCapture:
    """Runs the embedding and records every layer's keyword arguments.

    Not safe for concurrent calls: the record is one list.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._record: list[LayerArguments] = []
        self._embed_path = spec.parts.embed_path
        base = copy.copy(spec.parts.base)
        modules = dict(base._modules)  # noqa: SLF001 - a shallow twin that shares its templates
        modules["layers"] = nn.ModuleList(_Stub(layer, self._record) for layer in spec.parts.layers)
        modules["norm"] = nn.Identity()
        for name, module in modules.items():
            if module is not None and "rotary" in name:
                with torch.device(device):
                    modules[name] = type(module)(config=spec.config)
        base._modules = modules  # noqa: SLF001
        self._base = base

    def __call__(
        self,
        embed_parameters: Mapping[str, torch.Tensor],
        input_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[LayerArguments]]:
        """The first layer's input and the arguments of every layer.

        Args:
            embed_parameters: the embedding unit's parameters by local name.
            input_ids_BT: int64.
            position_ids_BT: int64.
            cu_seqlens: document boundaries, or None (see :class:`headrace.batch.MicroBatch`).

        Returns:
            ``hidden_BTD`` and one dictionary a layer.
        """
        self._record.clear()
        bound = {f"{self._embed_path}.{name}": p for name, p in embed_parameters.items()}
        output = torch.func.functional_call(
            self._base,
            bound,
            (),
            {
                "input_ids": input_ids_BT,
                "position_ids": position_ids_BT,
                "use_cache": False,
                **packing_arguments(cu_seqlens, input_ids_BT.shape[1]),
            },
        )
        return output.last_hidden_state, list(self._record)
