"""What the decoder layers are called with: captured from the model's own forward, not rebuilt.

The base model runs with its real embedding weights and buffers, layers replaced by stubs that
record their arguments; the last one ends the pass. So embedding multipliers, rotary tables per
layer type and masks come from the model's own code. The result carries gradients to the embedding
unit's parameters.

Shape legend: B rows, T positions, D hidden size.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.models.anatomy import accepted, bind
from headrace.models.attention import DOCUMENTS, packing_arguments, padded_boundaries
from headrace.models.buffers import initial_buffers
from headrace.models.summing import bindings, handles_for, sum_in_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.models.spec import ModelSpec

LayerArguments = dict[str, Any]


class _LastLayer(Exception):  # noqa: N818 - ends a forward pass; no error
    """All layers were called."""


class _Stub(nn.Module):
    """Stands for a decoder layer: records the call, returns the hidden state unchanged."""

    def __init__(
        self, layer: nn.Module, record: list[tuple[Any, LayerArguments]], last: bool
    ) -> None:
        super().__init__()
        # Attributes that the base model reads off a layer (attention_type, layer_idx, ...).
        for name, value in vars(layer).items():
            if not name.startswith("_") and not isinstance(value, (nn.Module, torch.Tensor)):
                setattr(self, name, value)
        self._original = (layer,)  # in a tuple: it is no part of this module
        self._record = record
        self._last = last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._record.append(bind(self._original[0], args, kwargs))
        if self._last:
            raise _LastLayer
        return self._record[0][0]


class CallCapture:
    """Runs the embedding and records every layer's arguments.

    Attributes:
        summed: parameters whose gradients can be added in place.

    Not safe for concurrent calls: the record is one list.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._record: list[tuple[Any, LayerArguments]] = []
        parts = spec.parts
        stubs = nn.ModuleList(
            _Stub(layer, self._record, last=index == spec.num_layers - 1)
            for index, layer in enumerate(parts.layers)
        )
        rule: Any = spec.model._init_weights  # noqa: SLF001 - the class's own rule has no public name
        self._base = _twin(parts.base, parts.layers_path, stubs, rule, device)
        self.summed = sum_in_place(self._base)
        self._handles = handles_for(self.summed, device)

    def handles(self, names: Iterable[str]) -> list[torch.Tensor]:
        """What to take gradients of so that those of ``names`` are summed."""
        return [self._handles[name] for name in names]

    def __call__(
        self,
        embed_parameters: Mapping[str, torch.Tensor],
        input_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        sums: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, list[LayerArguments]]:
        """The first layer's input and the arguments of every layer.

        Args:
            embed_parameters: the embedding unit's parameters by their path in the base model.
            input_ids_BT: int64.
            position_ids_BT: int64.
            cu_seqlens: document boundaries, or None (see :class:`headrace.batch.MicroBatch`).
            sums: where backward adds the gradients of parameters named in :attr:`summed`.

        Returns:
            ``hidden_BTD`` and one dictionary a layer, of which :data:`DOCUMENTS` is no argument
            but what :class:`headrace.models.templates.Templates` binds.
        """
        self._record.clear()
        boundaries = padded_boundaries(cu_seqlens, input_ids_BT.numel())
        arguments = {
            "input_ids": input_ids_BT,
            "position_ids": position_ids_BT,
            "use_cache": False,
            **packing_arguments(boundaries, input_ids_BT.shape[1]),
        }
        with contextlib.suppress(_LastLayer):
            bound = {**embed_parameters, **bindings(sums or {}, self._handles)}
            torch.func.functional_call(
                self._base, bound, (), accepted(self._base.forward, arguments)
            )
        hidden_BTD = self._record[0][0]
        calls = [named for _, named in self._record]
        if boundaries is not None:
            calls = [{**named, DOCUMENTS: boundaries} for named in calls]
        self._record.clear()
        return hidden_BTD, calls


def _twin(
    module: nn.Module, layers_path: str, stubs: nn.ModuleList, rule: Any, device: torch.device
) -> nn.Module:
    """A copy with stubs for its layers and real buffers, that shares the parameters' templates."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)  # noqa: SLF001 - a twin that shares the other modules
    name, _, rest = layers_path.partition(".")
    for child_name, child in module._modules.items():  # noqa: SLF001 - as above
        if child is None:
            continue
        if child_name != name:
            twin._modules[child_name] = _with_buffers(child, rule, device)  # noqa: SLF001
        else:
            twin._modules[name] = _twin(child, rest, stubs, rule, device) if rest else stubs  # noqa: SLF001
    return twin


def _with_buffers(module: nn.Module, rule: Any, device: torch.device) -> nn.Module:
    values = initial_buffers(module, rule, device)
    twin = copy.deepcopy(module)
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        twin.get_submodule(owner)._buffers[name] = value  # noqa: SLF001 - keeps them non-persistent
    return twin
