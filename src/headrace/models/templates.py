"""One stateless layer a structure: parameters are bound at call time.

Layers that agree in class, parameter shapes, buffers and relevant configuration share a template
and, when compiled, one graph. Each template has a code object of its own: the compiler's recompile
limit counts per code object, and sharing one would silently run eager from the ninth shape.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from headrace.models.capture import LayerArguments
    from headrace.models.spec import ModelSpec


def _layer_call(
    module: nn.Module,
    bound: dict[str, torch.Tensor],
    hidden_BTD: torch.Tensor,
    arguments: dict[str, Any],
) -> torch.Tensor:
    output = torch.func.functional_call(module, bound, (hidden_BTD,), arguments)
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


class Templates:
    """The layer templates of one model.

    Attributes:
        num_structures: how many different templates the layers need.
    """

    def __init__(self, spec: ModelSpec, *, compile_layers: bool) -> None:
        self._modules: list[nn.Module] = []
        self._calls: list[Callable[..., torch.Tensor]] = []
        by_structure: dict[Any, tuple[nn.Module, Callable[..., torch.Tensor]]] = {}
        for index in range(spec.num_layers):
            layer = spec.layer(index)
            key = _structure(layer)
            if key not in by_structure:
                call: Callable[..., torch.Tensor] = _layer_call
                if compile_layers:
                    call = _compiled(len(by_structure))
                by_structure[key] = (layer, call)
            module, call = by_structure[key]
            self._modules.append(module)
            self._calls.append(call)
        self.num_structures = len(by_structure)

    def run(
        self,
        index: int,
        parameters: Mapping[str, torch.Tensor],
        hidden_BTD: torch.Tensor,
        arguments: LayerArguments,
    ) -> torch.Tensor:
        """Call layer ``index`` with ``parameters`` (by local name) bound."""
        return self._calls[index](self._modules[index], dict(parameters), hidden_BTD, arguments)


def _compiled(number: int) -> Callable[..., torch.Tensor]:
    code = _layer_call.__code__.replace(co_name=f"layer_structure_{number}")
    function = types.FunctionType(code, _layer_call.__globals__, code.co_name)
    return torch.compile(function, fullgraph=True, dynamic=False)


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    """What must agree for two layers to share a template."""
    settings = []
    for path, module in layer.named_modules():
        plain = {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_")
            and name != "layer_idx"
            and isinstance(value, (bool, int, float, str, type(None)))
        }
        settings.append((path, type(module).__qualname__, tuple(sorted(plain.items(), key=str))))
    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    buffers = tuple((name, tuple(b.shape), b.dtype) for name, b in layer.named_buffers())
    return (tuple(settings), shapes, buffers)
