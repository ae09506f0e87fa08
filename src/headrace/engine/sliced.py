"""Layers whose experts are sent in slices: all micro-batches of a wave, one section at a time.

A pass through such a layer has stages. What is no expert's *opens* it: it runs up to the experts,
which hand out what they were called with. Each slice of experts then runs on the rows that are
routed to it, of every micro-batch of the wave, before the next slice is sent. Given their sum, what
is no expert's runs again and *closes* the pass. Backward takes the same stages: the gradient of the
experts' output, each slice again and back, everything else again and back.

Invariants: every layer here recomputes, from its input, its experts' output and which experts each
token chose; recompute sends no token elsewhere; one section of weights and one of gradients are in
use at a time. It neither sends weights nor returns gradients.

Shape legend: B rows, T positions, D hidden size, N = B * T tokens, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.engine.passes import trainable_leaves
from headrace.models.slices import Routed, SliceOfExperts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.engine.routing import StepRouting
    from headrace.engine.schedule import Use
    from headrace.engine.slots import GradientSlot, Slot
    from headrace.models.capture import LayerArguments
    from headrace.models.routing import RouterOutput
    from headrace.models.slices import StackedExperts
    from headrace.models.spec import ModelSpec
    from headrace.models.templates import Templates
    from headrace.store.layout import UnitLayout
    from headrace.store.sections import Section


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What one sliced layer leaves for its backward, a micro-batch.

    Attributes:
        input_BTD: the layer's input.
        index_NK: the experts of each token.
        weights_NK: how each counts.
        experts_ND: what the experts returned.
        seeds_B: of its dropout, for recompute to drop the same.
    """

    input_BTD: torch.Tensor
    index_NK: torch.Tensor
    weights_NK: torch.Tensor
    experts_ND: torch.Tensor
    seeds_B: torch.Tensor | None


@dataclass(kw_only=True)
class _Forward:
    """A micro-batch between the opening of a layer and its close.

    Attributes:
        given_ND: what the experts are called with.
        index_NK: the experts of each token.
        weights_NK: how each counts.
        routed: which rows are whose.
        sum_ND: float32, of the experts so far.
        seeds_B: of the layer's dropout, None for none.
    """

    given_ND: torch.Tensor
    index_NK: torch.Tensor
    weights_NK: torch.Tensor
    routed: Routed
    sum_ND: torch.Tensor
    seeds_B: torch.Tensor | None


@dataclass(kw_only=True)
class _Backward:
    """The same in backward.

    Attributes:
        given_ND: what the experts were called with.
        weights_NK: how each counts.
        routed: which rows are whose.
        experts_grad_ND: the gradient of what all experts return.
        given_grad_ND: float32, of ``given_ND`` so far.
        weights_grad_NK: of ``weights_NK`` so far.
    """

    given_ND: torch.Tensor
    weights_NK: torch.Tensor
    routed: Routed
    experts_grad_ND: torch.Tensor
    given_grad_ND: torch.Tensor
    weights_grad_NK: torch.Tensor


class SlicedLayers:
    """The stages of all sliced layers of one model, and what they leave for backward."""

    def __init__(
        self, spec: ModelSpec, templates: Templates, sections: Sequence[tuple[Section, ...]]
    ) -> None:
        """Take the templates without experts, and the sections of every unit."""
        self._templates = templates
        self._sections = sections
        self._experts: Mapping[int, StackedExperts] = spec.experts
        self._forward: list[_Forward] = []
        self._backward: list[_Backward] = []
        self._records: list[list[_Record]] = []  # of each layer, a micro-batch

    def restart(self) -> None:
        """Forget a pass that failed."""
        self._forward, self._backward, self._records = [], [], []

    def forward(
        self,
        use: Use,
        slot: Slot,
        hidden: list[torch.Tensor],
        arguments: Sequence[Sequence[LayerArguments]],
        *,
        accumulator: GradientSlot | None = None,
        seen: Callable[[int, tuple[RouterOutput, ...]], None] | None = None,
        seeds: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """One stage of every micro-batch.

        Args:
            use: which stage of which layer.
            slot: its section.
            hidden: of each micro-batch; the close changes it.
            arguments: of each micro-batch, by layer.
            accumulator: where backward, if there will be one, sums the section's gradient.
            seen: told by the opening what the routers of each micro-batch said.
            seeds: of dropout in each micro-batch, by layer and row.
        """
        if use.stage == "open":
            for m, hidden_BTD in enumerate(hidden):
                given = arguments[m][use.layer]
                seeds_B = seeds[m][use.layer] if seeds else None
                opened, routers = self._open(
                    use.layer, slot, hidden_BTD, given, accumulator=accumulator, seeds_B=seeds_B
                )
                self._forward.append(opened)
                if seen is not None:
                    seen(m, routers)
        elif use.stage == "slice":
            for opened in self._forward:
                self._slice(use, slot, opened.routed).add_output(
                    opened.given_ND, opened.weights_NK, opened.sum_ND
                )
        else:
            records = [
                self._close(use.layer, slot, m, hidden, arguments[m][use.layer])
                for m in range(len(hidden))
            ]
            self._forward = []
            if accumulator is not None:
                self._records.append(records)

    def backward(
        self,
        use: Use,
        slot: Slot,
        arguments: Sequence[Sequence[LayerArguments]],
        gradients: list[torch.Tensor],
        *,
        accumulator: GradientSlot,
        routing: StepRouting,
        wave: range,
    ) -> None:
        """One stage of every micro-batch; slices and the close add to ``accumulator``.

        Args:
            use: which stage of which layer.
            slot: its section.
            arguments: of each micro-batch, by layer.
            gradients: of the layer's output; the close makes them those of its input.
            accumulator: sums the section's gradient.
            routing: of the step.
            wave: numbers of the micro-batches.
        """
        for m, record in enumerate(self._records[-1]):
            given = arguments[m][use.layer]
            if use.stage == "open":
                opened = self._open_backward(use.layer, slot, record, given, gradients[m])
                self._backward.append(opened)
            elif use.stage == "slice":
                self._slice_backward(use, slot, self._backward[m], accumulator)
            else:
                opened = self._backward[m]
                gradients[m] = self._close_backward(
                    use.layer,
                    slot,
                    record,
                    given,
                    [gradients[m], opened.given_grad_ND, opened.weights_grad_NK],
                    accumulator=accumulator,
                    routing=routing,
                    micro_batch=wave[m],
                )
        if use.stage == "close":
            self._backward = []
            self._records.pop()

    # -- stages ----------------------------------------------------------------------------

    def _layout(self, layer: int, section: int = 0) -> UnitLayout:
        return self._sections[1 + layer][section].layout

    def _slice(self, use: Use, slot: Slot, routed: Routed) -> SliceOfExperts:
        section = self._sections[1 + use.layer][use.section]
        assert section.experts is not None
        parameters = slot.parameters(section.layout)
        return SliceOfExperts(self._experts[use.layer], section.experts, parameters, routed)

    def _sums(self, layer: int, accumulator: GradientSlot) -> dict[str, torch.Tensor]:
        views = accumulator.views(self._layout(layer))
        return {name: views[name] for name in self._templates.summed(layer) if name in views}

    def _open(
        self,
        layer: int,
        slot: Slot,
        hidden_BTD: torch.Tensor,
        arguments: LayerArguments,
        *,
        accumulator: GradientSlot | None,
        seeds_B: torch.Tensor | None,
    ) -> tuple[_Forward, tuple[RouterOutput, ...]]:
        """What the experts are called with; the layer's output is not the true one."""
        experts = self._experts[layer]
        # With a graph that is dropped, so that recompute, which has one, chooses the same experts.
        graph = accumulator is not None
        shape = (hidden_BTD.shape[:-1].numel(), experts.output_size)
        with torch.set_grad_enabled(graph):
            output = self._templates.run(
                layer,
                slot.parameters(self._layout(layer)),
                hidden_BTD.detach().requires_grad_(graph),
                arguments,
                keep=False,
                sums=None if accumulator is None else self._sums(layer, accumulator),
                seeds_B=seeds_B,
                experts_ND=hidden_BTD.new_zeros(shape),
            )
        assert output.experts is not None
        given_ND, index_NK, weights_NK = (part.detach() for part in output.experts)
        opened = _Forward(
            given_ND=given_ND,
            index_NK=index_NK,
            weights_NK=weights_NK,
            routed=Routed.of(index_NK, experts.num_experts),
            sum_ND=given_ND.new_zeros(shape, dtype=_sum_dtype(given_ND)),
            seeds_B=seeds_B,
        )
        return opened, tuple(router.detached() for router in output.routers)

    def _close(
        self,
        layer: int,
        slot: Slot,
        m: int,
        hidden: list[torch.Tensor],
        arguments: LayerArguments,
    ) -> _Record:
        """Put the layer's output in place of its input."""
        opened = self._forward[m]
        record = _Record(
            input_BTD=hidden[m].detach(),
            index_NK=opened.index_NK,
            weights_NK=opened.weights_NK,
            experts_ND=opened.sum_ND.to(opened.given_ND.dtype),
            seeds_B=opened.seeds_B,
        )
        with torch.no_grad():
            output = self._templates.run(
                layer, slot.parameters(self._layout(layer)), record.input_BTD, arguments,
                keep=False, seeds_B=record.seeds_B, experts_ND=record.experts_ND,
            )  # fmt: skip
        hidden[m] = output.hidden_BTD.detach()
        return record

    def _open_backward(
        self,
        layer: int,
        slot: Slot,
        record: _Record,
        arguments: LayerArguments,
        hidden_grad_BTD: torch.Tensor,
    ) -> _Backward:
        """The gradient of the experts' output, and what they are called with, again."""
        parameters = slot.parameters(self._layout(layer))
        experts_ND = record.experts_ND.detach().requires_grad_()
        with torch.enable_grad():
            output = self._templates.run(
                layer,
                {name: parameter.detach() for name, parameter in parameters.items()},
                record.input_BTD,
                arguments,
                keep=False,
                seeds_B=record.seeds_B,
                experts_ND=experts_ND,
            )
        (experts_grad_ND,) = torch.autograd.grad(output.hidden_BTD, experts_ND, hidden_grad_BTD)
        assert output.experts is not None
        given_ND = output.experts[0].detach()
        return _Backward(
            given_ND=given_ND,
            weights_NK=record.weights_NK,
            routed=Routed.of(record.index_NK, self._experts[layer].num_experts),
            experts_grad_ND=experts_grad_ND,
            given_grad_ND=torch.zeros_like(given_ND, dtype=_sum_dtype(given_ND)),
            weights_grad_NK=torch.zeros(
                record.weights_NK.shape, dtype=record.weights_NK.dtype, device=given_ND.device
            ),
        )

    def _slice_backward(
        self, use: Use, slot: Slot, opened: _Backward, accumulator: GradientSlot
    ) -> None:
        layout = self._layout(use.layer, use.section)
        gradients = self._slice(use, slot, opened.routed).add_gradients(
            opened.given_ND,
            opened.weights_NK,
            opened.experts_grad_ND,
            hidden_grad_ND=opened.given_grad_ND,
            weights_grad_NK=opened.weights_grad_NK,
            leaves=trainable_leaves(slot, layout),
        )
        if gradients:
            accumulator.add(layout, gradients)

    def _close_backward(
        self,
        layer: int,
        slot: Slot,
        record: _Record,
        arguments: LayerArguments,
        given: Sequence[torch.Tensor],
        *,
        accumulator: GradientSlot,
        routing: StepRouting,
        micro_batch: int,
    ) -> torch.Tensor:
        """The gradient of the layer's input.

        Args:
            layer: which.
            slot: what is no expert's.
            record: of the micro-batch.
            arguments: of the layer.
            given: gradients of the layer's output, of the experts' input, and of their weights.
            accumulator: sums the section's gradient.
            routing: of the step.
            micro_batch: its number.
        """
        layout = self._layout(layer)
        sums = self._sums(layer, accumulator)
        input_BTD = record.input_BTD.detach().requires_grad_()
        with torch.enable_grad():
            output = self._templates.run(
                layer, slot.parameters(layout), input_BTD, arguments,
                keep=False, sums=sums, seeds_B=record.seeds_B, experts_ND=record.experts_ND,
            )  # fmt: skip
        assert output.experts is not None
        if output.routers:
            routing.again(layer, micro_batch, output.routers)
        given_ND, _, weights_NK = output.experts
        pairs = list(zip([output.hidden_BTD, given_ND, weights_NK], given, strict=True))
        pairs += routing.gradients(micro_batch, output.routers)
        pairs = [(value, gradient) for value, gradient in pairs if value.requires_grad]
        leaves = trainable_leaves(slot, layout)
        gradients = torch.autograd.grad(
            [value for value, _ in pairs],
            [input_BTD, *leaves, *self._templates.handles(sums)],
            [gradient.to(value.dtype) for value, gradient in pairs],
            allow_unused=True,
        )
        input_grad_BTD = gradients[0]
        assert input_grad_BTD is not None, "the layer's output does not depend on its input"
        if leaves:
            accumulator.add(layout, gradients[1 : 1 + len(leaves)])
        return input_grad_BTD


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What many of its like are summed in."""
    return torch.promote_types(tensor.dtype, torch.float32)
