"""One stateless layer a structure: parameters are bound at call time.

Layers that agree in class, parameter shapes, buffers and relevant configuration share a template
and, when compiled, one graph. Each template has a code object of its own: the compiler's recompile
limit counts per code object, and sharing one would silently run eager from the ninth shape.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable  # noqa: TC003 - the NamedTuple's fields are evaluated
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from headrace.models.anatomy import first_tensor
from headrace.models.buffers import initial_buffers
from headrace.models.structure import structure

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    hidden: torch.Tensor = first_tensor(output)
    return hidden


class _Calls(NamedTuple):
    """One structure's layer call: for a graph that is kept, and for everything else."""

    kept: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]


class Templates:
    """The layer templates of one model.

    Attributes:
        num_structures: how many different templates the layers need.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        compile_layers: bool,
        backend: str = "inductor",
        device: torch.device | None = None,
    ) -> None:
        self._modules: list[nn.Module] = []
        self._calls: list[_Calls] = []
        self._buffers: list[dict[str, torch.Tensor]] = []
        rule: Any = spec.model._init_weights  # noqa: SLF001 - the class's own rule has no public name
        by_structure: dict[Any, tuple[nn.Module, _Calls]] = {}
        for index in range(spec.num_layers):
            layer = spec.layer(index)
            key = structure(layer)
            if key not in by_structure:
                calls = _Calls(_layer_call, _layer_call)
                if compile_layers:
                    calls = _compiled(len(by_structure), backend)
                by_structure[key] = (layer, calls)
            module, calls = by_structure[key]
            self._modules.append(module)
            self._calls.append(calls)
            self._buffers.append(initial_buffers(layer, rule, device or torch.device("cpu")))
        self.num_structures = len(by_structure)

    def run(
        self,
        index: int,
        parameters: Mapping[str, torch.Tensor],
        hidden_BTD: torch.Tensor,
        arguments: LayerArguments,
        *,
        keep: bool,
    ) -> torch.Tensor:
        """Call layer ``index`` with ``parameters`` (by local name) bound, and its buffers.

        ``keep`` says that the graph will wait for its backward: it then saves less.
        """
        calls = self._calls[index]
        call = calls.kept if keep else calls.plain
        bound = {**self._buffers[index], **parameters}
        return call(self._modules[index], bound, hidden_BTD, arguments)


def _selective_layer_call(
    module: nn.Module,
    bound: dict[str, torch.Tensor],
    hidden_BTD: torch.Tensor,
    arguments: dict[str, Any],
) -> torch.Tensor:
    """The layer, saving what is dear to compute and recomputing the rest.

    Only ever compiled: the partitioner then decides what the graph saves. Run eagerly it would
    recompute in backward from whatever weights the slot holds by then.
    """
    output = checkpoint(
        functools.partial(_layer_call, module),
        bound,
        hidden_BTD,
        arguments,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, _policy),
    )
    assert isinstance(output, torch.Tensor)
    return output


# Matmul, grouped matmul, attention, top-k and sort results: what costs more to recompute than to
# hold. 86 kB a token and layer at 8B instead of the 137 kB of everything that backward reads.
_SAVED_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
    "aten::topk",
    "aten::sort",
)


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operator.name().split(".")[0] in _SAVED_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _own_code(function: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__)


def _compiled(number: int, backend: str) -> _Calls:
    keep = _own_code(_selective_layer_call, f"layer_structure_{number}_kept")
    plain = _own_code(_layer_call, f"layer_structure_{number}")
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
    return _Calls(torch.compile(keep, **options), torch.compile(plain, **options))
