"""The matrices that a compiled recompute does not multiply, found without running it.

Each layer structure runs once on the meta device, forward and backward, while every operator is
written down; what no gradient depends on, followed back from the gradients, is left out. Nothing
relies on it but predictions and what is reported: the compiler finds the same for itself
(:mod:`headrace.models.unread`).
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.models.capture import CallCapture
from headrace.models.structure import structure
from headrace.models.templates import Templates

if TYPE_CHECKING:
    from headrace.models.capture import LayerArguments
    from headrace.models.spec import ModelSpec

_META = torch.device("meta")
_TOKENS = 8

_logger = logging.getLogger(__name__)


def left_out(spec: ModelSpec, index: int) -> tuple[str, ...]:
    """Local names of the matrices of layer ``index`` that its compiled recompute leaves out.

    None of a layer that routes, which recomputes whole, so that it chooses the same experts; none
    where a layer cannot be followed.
    """
    return _by_layer(spec)[index] if Templates.leaves_out else ()


def num_left_out(spec: ModelSpec, index: int) -> int:
    """Elements of the matrices that :func:`left_out` names."""
    names = left_out(spec, index)
    return sum(param.numel for param in spec.units[1 + index].params if param.local_name in names)


@functools.lru_cache(maxsize=8)
def _by_layer(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    found: dict[Any, tuple[str, ...]] = {}
    layers = []
    ids_BT = torch.zeros(1, _TOKENS, dtype=torch.int64, device=_META)
    templates = Templates(spec, compiler=None, device=_META)
    try:
        with torch.no_grad():
            hidden_BTD, arguments = CallCapture(spec, _META)(
                _parameters(spec, 0), ids_BT, ids_BT, cu_seqlens=None
            )
        for index in range(spec.num_layers):
            key = structure(spec.layer(index))
            if key not in found:
                found[key] = ()
                if not templates.routes(index):
                    found[key] = _unread(spec, templates, index, hidden_BTD, arguments[index])
            layers.append(found[key])
    except Exception as error:  # noqa: BLE001 - of a model's own code: nothing depends on it
        _logger.info("what recompute leaves out is not known: %s", error)
        return ((),) * spec.num_layers
    return tuple(layers)


def _parameters(spec: ModelSpec, unit: int) -> dict[str, torch.Tensor]:
    return {
        param.local_name: torch.empty(param.shape, device=_META).requires_grad_(param.trainable)
        for param in spec.units[unit].params
    }


def _unread(
    spec: ModelSpec,
    templates: Templates,
    index: int,
    hidden_BTD: torch.Tensor,
    arguments: LayerArguments,
) -> tuple[str, ...]:
    parameters = _parameters(spec, 1 + index)
    leaves = [hidden_BTD.detach().requires_grad_(True)]
    leaves += [parameter for parameter in parameters.values() if parameter.requires_grad]
    gradient_BTD = torch.empty(hidden_BTD.shape, device=_META)
    with torch.enable_grad(), _Operators() as operators:
        output = templates.run(index, parameters, leaves[0], arguments, keep=False)
        num_forward = len(operators.calls)
        gradients = torch.autograd.grad(output.hidden_BTD, leaves, gradient_BTD, allow_unused=True)
    wanted = {_storage(gradient) for gradient in gradients if gradient is not None}
    used: set[int] = set()
    for number in reversed(range(len(operators.calls))):
        read, written = operators.calls[number]
        if written & wanted:
            wanted |= read
            if number < num_forward and not written <= read:  # a view computes nothing
                used |= read
    return tuple(
        name
        for name, parameter in parameters.items()
        if parameter.dim() >= 2 and _storage(parameter) not in used
    )


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is called: the storages that each call reads, and those it gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[set[int], set[int]]] = []
        self._held: list[torch.Tensor] = []  # the address of one that is gone would come again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        read, written = (
            [part for part in tree_leaves(tree) if isinstance(part, torch.Tensor)]
            for tree in ((args, kwargs), result)
        )
        self._held += [*read, *written]
        self.calls.append(({_storage(t) for t in read}, {_storage(t) for t in written}))
        return result


def _storage(tensor: torch.Tensor) -> int:
    reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(reference.cdata)
