"""Forward and backward of one unit for one micro-batch, on weights that are in a slot.

Stateless: every function takes the slot it reads. Shape legend: B rows, T positions, D hidden
size, N = B * T tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from headrace.engine.offload import SavedActivations
from headrace.engine.slots import KeptGraph, Slot
from headrace.models.anatomy import first_tensor
from headrace.models.loss import chunk_loss_with, linear_cross_entropy

if TYPE_CHECKING:
    from collections.abc import Collection

    from headrace.batch import MicroBatch
    from headrace.engine.routing import StepRouting
    from headrace.engine.slots import GradientSlot
    from headrace.models.capture import CallCapture, LayerArguments
    from headrace.models.compiling import Compiler
    from headrace.models.loss import ChunkLoss
    from headrace.models.routing import RouterOutput
    from headrace.models.spec import ModelSpec
    from headrace.models.templates import Templates
    from headrace.store.layout import UnitLayout


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the compute device; ``cu_seqlens`` stays where attention wants it."""

    input_ids_BT: torch.Tensor
    targets_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    cu_seqlens: torch.Tensor | None

    @classmethod
    def moved(cls, batch: MicroBatch, device: torch.device) -> DeviceBatch:
        """``batch`` on ``device``; the copies are queued, not waited for."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return cls(
            input_ids_BT=move(batch.input_ids_BT),
            targets_BT=move(batch.targets_BT),
            position_ids_BT=move(batch.position_ids_BT),
            cu_seqlens=None if batch.cu_seqlens is None else move(batch.cu_seqlens),
        )


@dataclass
class LayerRecord:
    """What one layer leaves for its backward, a micro-batch.

    Attributes:
        input_BTD: the layer's input, a leaf.
        output_BTD: its output with graph, or None when it is to be recomputed.
        graph: where the graph finds its weights.
        leaves: what the graph was built on and gradients are taken of: the trainable parameters,
            and the handles of those that sum in place.
        routers: what the layer's routers said; with graph when it is kept.
        seeds_B: of its dropout, for recompute to drop the same.
    """

    input_BTD: torch.Tensor
    output_BTD: torch.Tensor | None = None
    graph: KeptGraph | None = None
    leaves: list[torch.Tensor] | None = None
    routers: tuple[RouterOutput, ...] = ()
    seeds_B: torch.Tensor | None = None

    @property
    def activations(self) -> SavedActivations | None:
        """What the graph saved, if it is held apart."""
        return None if self.graph is None else self.graph.activations


def trainable_leaves(slot: Slot, layout: UnitLayout) -> list[torch.Tensor]:
    """The trainable parameters in layout order."""
    parameters = slot.parameters(layout)
    return [parameters[p.local_name] for p in layout.params if p.trainable]


class Passes:
    """The unit passes of one model."""

    def __init__(
        self,
        spec: ModelSpec,
        capture: CallCapture,
        templates: Templates,
        *,
        loss_chunk_tokens: int,
        compiler: Compiler | None,
    ) -> None:
        self._spec = spec
        self._capture = capture
        self._templates = templates
        self._loss_chunk_tokens = loss_chunk_tokens
        self._chunk_loss: ChunkLoss = chunk_loss_with(spec.logit_rule)
        # A rule in the model's own code stays as it is.
        if compiler is not None and spec.logit_rule.other is None:
            self._chunk_loss = compiler.compile(self._chunk_loss, "chunk_loss")

    # -- embedding -------------------------------------------------------------------------

    def embed(self, slot: Slot, batch: DeviceBatch) -> tuple[torch.Tensor, list[LayerArguments]]:
        """The first layer's input, without graph, and every layer's arguments."""
        with torch.no_grad():
            return self._embed(slot, batch, {})

    def _embed(
        self, slot: Slot, batch: DeviceBatch, sums: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, list[LayerArguments]]:
        return self._capture(
            slot.parameters(self._spec.units[0]),
            batch.input_ids_BT,
            batch.position_ids_BT,
            batch.cu_seqlens,
            sums,
        )

    def embed_backward(
        self,
        slot: Slot,
        batch: DeviceBatch,
        hidden_grad_BTD: torch.Tensor,
        accumulator: GradientSlot,
    ) -> None:
        """Recompute the embedding (it is a look-up) and add its gradient."""
        layout = self._spec.units[0]
        leaves = trainable_leaves(slot, layout)
        if not leaves:
            return
        sums = self._sums(0, self._capture.summed, accumulator)
        with torch.enable_grad():
            hidden_BTD, _ = self._embed(slot, batch, sums)
        gradients = torch.autograd.grad(
            hidden_BTD,
            [*leaves, *self._capture.handles(sums)],
            hidden_grad_BTD,
            allow_unused=True,
        )
        accumulator.add(layout, gradients[: len(leaves)])

    # -- layers ----------------------------------------------------------------------------

    def layer_forward(
        self,
        index: int,
        slot: Slot,
        hidden_BTD: torch.Tensor,
        arguments: LayerArguments,
        *,
        keep: bool,
        leaves_device: bool = False,
        accumulator: GradientSlot | None = None,
        seeds_B: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LayerRecord]:
        """Run a layer; with ``keep`` its graph stays, without its weights.

        With ``leaves_device`` what the graph saves is held apart, to be sent to the host.
        ``accumulator`` is where backward, if there will be one, sums gradients. A layer that routes
        and is to be recomputed then runs forward as recompute will, with a graph that is dropped,
        so that both choose the same experts. ``seeds_B`` are those of dropout, in training alone.
        """
        layout = self._spec.units[1 + index]
        parameters = slot.parameters(layout)
        graph = keep or (accumulator is not None and self._templates.routes(index))
        sums = None
        if graph and accumulator is not None:
            sums = self._sums(1 + index, self._templates.summed(index), accumulator)
        record = LayerRecord(hidden_BTD.detach().requires_grad_(graph), seeds_B=seeds_B)
        run = functools.partial(
            self._templates.run, index, parameters, record.input_BTD, arguments, sums=sums,
            seeds_B=seeds_B,
        )  # fmt: skip
        if not keep:
            with torch.set_grad_enabled(graph):
                output = run(keep=False)
            record.routers = tuple(router.detached() for router in output.routers)
            return output.hidden_BTD.detach(), record
        activations = None
        if leaves_device and accumulator is not None:
            given = [
                part for part in tree_leaves([arguments, seeds_B]) if isinstance(part, torch.Tensor)
            ]
            activations = SavedActivations([record.input_BTD, accumulator.flat, *given])
        record.graph = KeptGraph(slot, activations)
        with torch.enable_grad(), record.graph.hooks():
            output = run(keep=True)
        record.output_BTD, record.routers = output.hidden_BTD, output.routers
        record.leaves = [*trainable_leaves(slot, layout), *self._templates.handles(sums or ())]
        return record.output_BTD.detach(), record

    def summed(self, unit: int) -> Collection[str]:
        """Local names of a unit's parameters whose gradients are added in place."""
        if unit == 0:
            tied = (self._spec.embedding_name,) if self._spec.tied else ()
            return {*self._capture.summed, *tied}
        if unit == len(self._spec.units) - 1:
            return {param.local_name for param in self._spec.units[unit].params}
        return self._templates.summed(unit - 1)

    def _sums(
        self, unit: int, summed: Collection[str], accumulator: GradientSlot
    ) -> dict[str, torch.Tensor]:
        views = accumulator.views(self._spec.units[unit])
        return {name: views[name] for name in summed if name in views}

    def layer_backward(
        self,
        index: int,
        slot: Slot,
        record: LayerRecord,
        arguments: LayerArguments,
        hidden_grad_BTD: torch.Tensor,
        *,
        accumulator: GradientSlot,
        routing: StepRouting,
        micro_batch: int,
    ) -> torch.Tensor:
        """The gradient of the layer's input; its parameters' are added to ``accumulator``."""
        layout = self._spec.units[1 + index]
        if record.graph is None:
            record.input_BTD.requires_grad_(True)
            sums = self._sums(1 + index, self._templates.summed(index), accumulator)
            with torch.enable_grad():
                output = self._templates.run(
                    index,
                    slot.parameters(layout),
                    record.input_BTD,
                    arguments,
                    keep=False,
                    again=True,
                    sums=sums,
                    seeds_B=record.seeds_B,
                )
            output_BTD, routers = output.hidden_BTD, output.routers
            if routers:
                routing.again(index, micro_batch, routers)
            leaves = [*trainable_leaves(slot, layout), *self._templates.handles(sums)]
        else:
            assert record.output_BTD is not None
            assert record.leaves is not None
            record.graph.rebind(slot)
            output_BTD, leaves, routers = record.output_BTD, record.leaves, record.routers
        balancing = routing.gradients(micro_batch, routers)
        gradients = torch.autograd.grad(
            [output_BTD, *(logits for logits, _ in balancing)],
            [record.input_BTD, *leaves],
            [hidden_grad_BTD, *(gradient for _, gradient in balancing)],
            allow_unused=True,
        )
        record.output_BTD, record.graph, record.routers = None, None, ()
        input_grad_BTD = gradients[0]
        assert input_grad_BTD is not None, "the layer's output does not depend on its input"
        num_trainable = sum(p.trainable for p in layout.params)
        if num_trainable:
            accumulator.add(layout, gradients[1 : 1 + num_trainable])
        return input_grad_BTD

    # -- head ------------------------------------------------------------------------------

    def _head_parts(
        self, head_slot: Slot, embed_slot: Slot
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """The tail's parameters, and matrix and bias of the head."""
        parameters = head_slot.parameters(self._spec.units[-1])
        tail = {name: p for name, p in parameters.items() if name.startswith("tail.")}
        if self._spec.tied:
            weight_VD = embed_slot.parameters(self._spec.units[0])[self._spec.embedding_name]
        else:
            weight_VD = parameters["head.weight"]
        return tail, weight_VD, parameters.get("head.bias")

    def _run_tail(
        self, parameters: dict[str, torch.Tensor], hidden_BTD: torch.Tensor
    ) -> torch.Tensor:
        """The base model's output for its last layer's: the final norm, as a rule."""
        for number, module in enumerate(self._spec.parts.tail):
            prefix = f"tail.{number}."
            bound = {n.removeprefix(prefix): p for n, p in parameters.items() if prefix in n}
            hidden_BTD = first_tensor(torch.func.functional_call(module, bound, (hidden_BTD,)))
        return hidden_BTD

    def _head_input(
        self, parameters: dict[str, torch.Tensor], hidden_BTD: torch.Tensor
    ) -> torch.Tensor:
        """What the head's matrix multiplies, ``(N, D)``."""
        hidden_ND = self._run_tail(parameters, hidden_BTD).flatten(0, 1)
        before = self._spec.before_head
        return hidden_ND if before is None else before(hidden_ND)

    def final_norm(
        self, head_slot: Slot, embed_slot: Slot, hidden_BTD: torch.Tensor
    ) -> torch.Tensor:
        """The base model's output: the last hidden state after the final norm, without graph."""
        tail, _, _ = self._head_parts(head_slot, embed_slot)
        with torch.no_grad():
            return self._run_tail(tail, hidden_BTD)

    def head_loss(
        self,
        head_slot: Slot,
        embed_slot: Slot,
        hidden_BTD: torch.Tensor,
        batch: DeviceBatch,
        chunk_loss: ChunkLoss | None = None,
    ) -> torch.Tensor:
        """Summed cross-entropy (float64 scalar), no gradients; ``chunk_loss`` may look on."""
        tail, weight_VD, bias_V = self._head_parts(head_slot, embed_slot)
        with torch.no_grad():
            hidden_ND = self._head_input(tail, hidden_BTD)
        loss, _ = linear_cross_entropy(
            hidden_ND,
            weight_VD,
            batch.targets_BT.flatten(),
            bias_V=bias_V,
            scale=0.0,
            chunk_tokens=self._loss_chunk_tokens,
            weight_grad_VD=None,
            with_hidden_grad=False,
            chunk_loss=chunk_loss or self._chunk_loss,
        )
        return loss

    def head_forward_backward(
        self,
        head_slot: Slot,
        embed_slot: Slot,
        hidden_BTD: torch.Tensor,
        batch: DeviceBatch,
        *,
        scale: float,
        head_accumulator: GradientSlot,
        embed_accumulator: GradientSlot,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss and the gradient of the last hidden state.

        Both accumulators must hold valid sums (zeros before the first micro-batch): the matrix'
        gradient goes to the embedding's when the head is tied.
        """
        tail, weight_VD, bias_V = self._head_parts(head_slot, embed_slot)
        leaf_BTD = hidden_BTD.detach().requires_grad_(True)
        with torch.enable_grad():
            hidden_ND = self._head_input(tail, leaf_BTD)
        layout = self._spec.units[0 if self._spec.tied else -1]
        name = self._spec.embedding_name if self._spec.tied else "head.weight"
        accumulator = embed_accumulator if self._spec.tied else head_accumulator
        head_layout = self._spec.units[-1]
        loss, hidden_grad_ND = linear_cross_entropy(
            hidden_ND.detach(),
            weight_VD.detach(),
            batch.targets_BT.flatten(),
            bias_V=None if bias_V is None else bias_V.detach(),
            scale=scale,
            chunk_tokens=self._loss_chunk_tokens,
            weight_grad_VD=_gradient_view(accumulator, layout, name),
            bias_grad_V=_gradient_view(head_accumulator, head_layout, "head.bias"),
            chunk_loss=self._chunk_loss,
        )
        assert hidden_grad_ND is not None
        names = [
            p.local_name
            for p in head_layout.params
            if p.trainable and p.local_name.startswith("tail.")
        ]
        gradients = torch.autograd.grad(
            hidden_ND, [leaf_BTD, *(tail[name] for name in names)], hidden_grad_ND
        )
        for name, gradient in zip(names, gradients[1:], strict=True):
            view = _gradient_view(head_accumulator, head_layout, name)
            assert view is not None
            view.add_(gradient)
        return loss, gradients[0]


def _gradient_view(
    accumulator: GradientSlot, layout: UnitLayout, local_name: str
) -> torch.Tensor | None:
    """Where a parameter's gradient is summed; None if it is not trained, or not there."""
    for param in layout.params:
        if param.local_name == local_name and param.trainable:
            return accumulator.flat[param.slice].view(param.shape)
    return None
