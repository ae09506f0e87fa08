"""One stateless layer a structure: parameters are bound at call time.

Layers that agree in class, parameter shapes, buffers and relevant configuration share a template
and, when compiled, one graph (:mod:`headrace.models.compiling`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from headrace.models import families
from headrace.models.anatomy import first_tensor
from headrace.models.attention import DOCUMENTS, document_names
from headrace.models.buffers import initial_buffers
from headrace.models.dropout import seed_names
from headrace.models.routing import RouterOutput, watch_routers
from headrace.models.slices import OUTPUT, without_experts
from headrace.models.structure import structure
from headrace.models.summing import bindings, handles_for, sum_in_place
from headrace.models.unread import unread

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from headrace.models.capture import LayerArguments
    from headrace.models.compiling import Compiler
    from headrace.models.slices import ExpertsStub, StackedExperts
    from headrace.models.spec import ModelSpec


class LayerOutput(NamedTuple):
    """What a layer returns.

    Attributes:
        hidden_BTD: the hidden state.
        routers: what its routers said, in order of their calls; empty for a dense layer.
        experts: what its experts were called with (hidden state, choices and weights of each
            token), if it runs without them.
    """

    hidden_BTD: torch.Tensor
    routers: tuple[RouterOutput, ...]
    experts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


def _layer_call(
    module: nn.Module,
    box: list[tuple[torch.Tensor, ...]] | None,
    bound: dict[str, torch.Tensor],
    hidden_BTD: torch.Tensor,
    arguments: dict[str, Any],
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The hidden state alone in a tuple, and a tuple for each router."""
    if box is not None:
        box.clear()
    output = torch.func.functional_call(module, bound, (hidden_BTD,), arguments)
    seen: tuple[tuple[torch.Tensor, ...], ...] = ()
    if box is not None:
        seen = tuple(box)
        box.clear()
    return ((first_tensor(output),), *seen)


def _call_without_experts(stub: ExpertsStub, *args: Any) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The same; what the experts were called with comes behind the hidden state."""
    stub.begin()
    output, *seen = _layer_call(*args)
    return (output, stub.take(), *seen)


_Call = Callable[..., tuple[tuple[torch.Tensor, ...], ...]]


class _Calls(NamedTuple):
    """One structure's layer call: for a graph that is kept, for recompute, for everything else."""

    kept: _Call
    again: _Call
    plain: _Call


class _Template(NamedTuple):
    """A layer that others of its structure are called through."""

    module: nn.Module
    box: list[tuple[torch.Tensor, ...]] | None
    calls: _Calls
    summed: tuple[str, ...]
    seeds: tuple[str, ...]
    documents: tuple[str, ...]
    output_name: str | None  # what stands for the experts' output, of a layer without them


class Templates:
    """The layer templates of one model.

    Attributes:
        leaves_out: compiled recompute leaves out what no gradient needs; turned off by who
            compares with it.
        num_structures: how many different templates the layers need.
    """

    leaves_out: ClassVar[bool] = True

    def __init__(
        self,
        spec: ModelSpec,
        *,
        compiler: Compiler | None,
        device: torch.device | None = None,
        sliced: Mapping[int, StackedExperts] | None = None,
    ) -> None:
        """Take the layers' structures.

        Args:
            spec: the model.
            compiler: compiles them; None leaves them eager.
            device: of their buffers.
            sliced: by layer, experts that run by themselves.
        """
        families.prepare(spec.model, device or torch.device("cpu"))
        self._templates: list[_Template] = []
        self._buffers: list[dict[str, torch.Tensor]] = []
        rule: Any = spec.model._init_weights  # noqa: SLF001 - the class's own rule has no public name
        by_structure: dict[Any, _Template] = {}
        self._handles: dict[str, torch.Tensor] = {}
        for index in range(spec.num_layers):
            layer, stub, output_name = spec.layer(index), None, None
            if sliced and index in sliced:
                layer, stub = without_experts(layer, sliced[index].path)
                output_name = f"{sliced[index].path}.{OUTPUT}"
            summed = sum_in_place(layer)
            key = structure(layer)
            if key not in by_structure:
                # Before anything is traced.
                box = watch_routers(spec.layer(index), spec.model)
                calls = _Calls(_layer_call, _layer_call, _layer_call)
                name = f"layer_structure_{len(by_structure)}"
                if stub is not None:
                    call: _Call = functools.partial(_call_without_experts, stub)
                    if compiler is not None:
                        call = compiler.compile(call, name)
                    calls = _Calls(call, call, call)
                elif compiler is not None:
                    calls = _compiled(
                        compiler, name, routes=box is not None, leaves_out=self.leaves_out
                    )
                by_structure[key] = _Template(
                    layer,
                    box,
                    calls,
                    summed,
                    seed_names(layer),
                    document_names(layer),
                    output_name,
                )
                self._handles.update(handles_for(summed, device))
            self._templates.append(by_structure[key])
            self._buffers.append(initial_buffers(layer, rule, device or torch.device("cpu")))
        self.num_structures = len(by_structure)

    def routes(self, index: int) -> bool:
        """Layer ``index`` has routers."""
        return self._templates[index].box is not None

    def summed(self, index: int) -> tuple[str, ...]:
        """Local names of the weights of layer ``index`` whose gradients can be added in place."""
        return self._templates[index].summed

    def handles(self, names: Iterable[str]) -> list[torch.Tensor]:
        """What to take gradients of so that those of ``names`` are summed."""
        return [self._handles[name] for name in names]

    def run(
        self,
        index: int,
        parameters: Mapping[str, torch.Tensor],
        hidden_BTD: torch.Tensor,
        arguments: LayerArguments,
        *,
        keep: bool,
        again: bool = False,
        sums: Mapping[str, torch.Tensor] | None = None,
        seeds_B: torch.Tensor | None = None,
        experts_ND: torch.Tensor | None = None,
    ) -> LayerOutput:
        """Call layer ``index`` with ``parameters`` (by local name) bound, and its buffers.

        Args:
            index: of the layer.
            parameters: by local name.
            hidden_BTD: its input.
            arguments: what else it is called with.
            keep: the graph will wait for its backward: it then saves less.
            again: for its gradients alone: the hidden state may hold anything.
            sums: where backward adds the gradients of weights named in :meth:`summed`.
            seeds_B: int64, of the dropout in each row; None for none.
            experts_ND: what its experts return, of a layer that runs without them.
        """
        template = self._templates[index]
        bound = {**self._buffers[index], **parameters}
        if sums:
            bound.update(bindings(sums, self._handles))
        if seeds_B is not None:
            bound.update(dict.fromkeys(template.seeds, seeds_B))
        if template.output_name is not None:
            assert experts_ND is not None
            bound[template.output_name] = experts_ND
        if DOCUMENTS in arguments:
            bound.update((name, arguments[DOCUMENTS]) for name in template.documents)
            arguments = {k: v for k, v in arguments.items() if k != DOCUMENTS}
        calls = template.calls
        call = calls.kept if keep else calls.again if again else calls.plain
        (hidden,), *routers = call(template.module, template.box, bound, hidden_BTD, arguments)
        experts = None
        if template.output_name is not None:
            (given_ND, index_NK, weights_NK), *routers = routers
            experts = given_ND, index_NK, weights_NK
        return LayerOutput(
            hidden,
            tuple(
                RouterOutput(logits_NX=seen[0], chosen_NK=seen[1] if len(seen) > 1 else None)
                for seen in routers
            ),
            experts,
        )


def _unread_layer_call(
    module: nn.Module,
    box: list[tuple[torch.Tensor, ...]] | None,
    bound: dict[str, torch.Tensor],
    hidden_BTD: torch.Tensor,
    arguments: dict[str, Any],
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The layer without the value of its hidden state."""
    (hidden_BTD,), *routers = _layer_call(module, box, bound, hidden_BTD, arguments)
    return ((unread(hidden_BTD),), *routers)


def _selective_layer_call(
    module: nn.Module,
    box: list[tuple[torch.Tensor, ...]] | None,
    bound: dict[str, torch.Tensor],
    hidden_BTD: torch.Tensor,
    arguments: dict[str, Any],
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The layer, saving what is dear to compute and recomputing the rest.

    Only ever compiled: the partitioner then decides what the graph saves. Run eagerly it would
    recompute in backward from whatever weights the slot holds by then.
    """
    output: tuple[tuple[torch.Tensor, ...], ...] = checkpoint(
        functools.partial(_layer_call, module, box),
        bound,
        hidden_BTD,
        arguments,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, _policy),
    )
    return output


# Matmul, grouped matmul, attention, top-k and sort results: what costs more to recompute than to
# hold. 86 kB a token and layer at 8B instead of the 137 kB of everything that backward reads.
# Batched products are those of gated DeltaNet's chunks: cheap, and more than all else together.
_SAVED_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "headrace::grouped_matmul_v1",
    "headrace::gated_delta_v1",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
    "flex_attention",
    "headrace::written_v1",
    "aten::topk",
    "aten::sort",
    "aten::scatter",
)


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operator.name().split(".")[0] in _SAVED_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _compiled(compiler: Compiler, name: str, *, routes: bool, leaves_out: bool) -> _Calls:
    # Routers write to a list inside the checkpointed region, which backward must not repeat. That
    # has to be said when the layer is traced.
    once = {"skip_fwd_side_effects_in_bwd_under_checkpoint": True} if routes else {}
    # Among the experts' kernels is a reduction that the compiler's own guess runs a third slower.
    kept = compiler.compile(
        _selective_layer_call, f"{name}_kept", eager=_layer_call, tune=routes, **once
    )
    plain = compiler.compile(_layer_call, name, tune=routes)
    # In one graph with forward, for another could round a router's logits otherwise and choose
    # other experts than forward did.
    if routes or not leaves_out:
        return _Calls(kept, plain, plain)
    return _Calls(kept, compiler.compile(_unread_layer_call, f"{name}_again", eager=plain), plain)
