"""Waves of micro-batches through the whole model: forward, head, backward.

Within a wave every micro-batch passes through a layer before the next layer is sent. Invariants:
what a layer leaves for its backward is kept, offloaded or recomputed by its index alone; backward
ends with the first layer that anything is trained in; gradients of all waves are summed before a
unit's gradient returns, in the last one.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from headrace.engine.offload import ActivationOffload
from headrace.engine.passes import DeviceBatch, LayerRecord, Passes
from headrace.engine.schedule import split_waves
from headrace.models.attention import pinned_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.batch import MicroBatch
    from headrace.engine.accumulators import Accumulators
    from headrace.engine.config import EngineConfig
    from headrace.engine.exposure import Exposure
    from headrace.engine.host_optimizer import UpdateSettings
    from headrace.engine.routing import StepRouting
    from headrace.engine.sliced import SlicedLayers
    from headrace.engine.update import Updater
    from headrace.engine.windows import Walk, Windows
    from headrace.models.capture import LayerArguments
    from headrace.models.routing import RouterOutput
    from headrace.models.spec import ModelSpec
    from headrace.store.sections import Section


class Waves:
    """Runs the micro-batches of a step through one model on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        config: EngineConfig,
        passes: Passes,
        sliced: SlicedLayers,
        *,
        sections: Sequence[tuple[Section, ...]],
        windows: Windows,
        accumulators: Accumulators,
        updater: Updater,
        device: torch.device,
        exposure: Exposure,
        jitter: Callable[[], float] | None,
    ) -> None:
        """Start the lanes of offloaded activations, if there will be any."""
        self._spec = spec
        self._config = config
        self._passes = passes
        self._sliced = sliced
        self._sections = sections
        self._windows = windows
        self._accumulators = accumulators
        self._updater = updater
        self._device = device
        self._exposure = exposure
        self._first = spec.first_trained_layer
        self._plan = config.activation_plan(spec.num_layers, self._first)
        self._offload: ActivationOffload | None = None
        if "offload" in self._plan:
            self._offload = ActivationOffload(
                device,
                timeout_seconds=config.lane_timeout_seconds,
                jitter=jitter,
                tracer=exposure.tracer,
            )

    def size(self, num_micro_batches: int) -> int:
        """Micro-batches of a wave."""
        return min(num_micro_batches, self._config.micro_batches_per_wave or num_micro_batches)

    def restart(self, *, per_wave: int) -> None:
        """Forget a step that failed; the next ones have ``per_wave`` micro-batches a wave."""
        if self._offload is not None:
            self._offload.begin()
        self._windows.restart()
        self._config = replace(self._config, micro_batches_per_wave=per_wave)

    def close(self) -> None:
        """End the lanes."""
        if self._offload is not None:
            self._offload.close()

    def forward_only(
        self, micro_batches: Sequence[MicroBatch], num_layers: int | None = None
    ) -> Iterator[tuple[list[DeviceBatch], list[torch.Tensor]]]:
        """The hidden states after ``num_layers`` layers (all by default), wave by wave."""
        waves = split_waves(len(micro_batches), self._config.micro_batches_per_wave)
        layers = self._spec.num_layers if num_layers is None else num_layers
        self._sliced.restart()  # whatever the pass before, which may have failed, left
        with pinned_backend(deterministic=self._config.deterministic):
            self._windows.fetch_embed()
            walk = self._windows.walk(layers, len(waves), backward=False)
            for wave in waves:
                batches = [DeviceBatch.moved(micro_batches[m], self._device) for m in wave]
                hidden, arguments = self._embed_all(batches)
                for use, slot in walk.layers("forward"):
                    if use.stage != "whole":
                        self._sliced.forward(use, slot, hidden, arguments)
                        continue
                    for m in range(len(batches)):
                        hidden[m], _ = self._passes.layer_forward(
                            use.layer, slot, hidden[m], arguments[m][use.layer], keep=False
                        )
                self._windows.wait(self._windows.head)
                yield batches, hidden

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        scale: float,
        early: UpdateSettings | None,
        routing: StepRouting,
        dropout_seeds: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The summed loss (float64 scalar); gradients are on their way when this returns.

        Args:
            micro_batches: of the step.
            scale: what gradients are multiplied by.
            early: settings of updates before the norm is known, if any may be.
            routing: what the routers of this step said.
            dropout_seeds: of each micro-batch, by layer and row.
        """
        waves = split_waves(len(micro_batches), self._config.micro_batches_per_wave)
        windows, accumulators = self._windows, self._accumulators
        accumulators.prepare(num_waves=len(waves))
        self._sliced.restart()
        num_layers = self._spec.num_layers
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        with pinned_backend(deterministic=self._config.deterministic):
            windows.fetch_embed()
            walk = windows.walk(num_layers, len(waves), backward=True, first=self._first)
            for number, wave in enumerate(waves):
                first, last = number == 0, number == len(waves) - 1
                batches = [DeviceBatch.moved(micro_batches[m], self._device) for m in wave]
                hidden, arguments = self._embed_all(batches)
                seeds = [dropout_seeds[m] for m in wave] if dropout_seeds else None
                records = self._forward_layers(
                    walk, hidden, arguments, wave, routing=routing, dropout_seeds=seeds
                )
                if first:
                    for unit in (0, num_layers + 1):
                        accumulators.begin(unit, self._passes.summed(unit))
                gradients = self._head(batches, hidden, scale, loss_sum)
                del hidden
                if self._offload is not None:
                    self._offload.turn(
                        saved
                        for row in reversed(records)
                        for record in row
                        if (saved := record.activations) is not None
                    )
                if last:
                    self._updater.return_gradient(num_layers + 1, accumulators.head, early)
                self._backward_layers(
                    walk, gradients, arguments, records, wave, routing=routing, first=first,
                    last=last, early=early,
                )  # fmt: skip
                for m, batch in enumerate(batches):
                    self._passes.embed_backward(
                        windows.embed, batch, gradients[m], accumulators.embed
                    )
            self._updater.return_gradient(0, accumulators.embed, early)
            windows.release_ends()
        return loss_sum

    def _embed_all(
        self, batches: list[DeviceBatch]
    ) -> tuple[list[torch.Tensor], list[list[LayerArguments]]]:
        slot = self._windows.wait(self._windows.embed)
        pairs = [self._passes.embed(slot, batch) for batch in batches]
        return [hidden for hidden, _ in pairs], [arguments for _, arguments in pairs]

    def _forward_layers(
        self,
        walk: Walk,
        hidden: list[torch.Tensor],
        arguments: list[list[LayerArguments]],
        wave: range,
        *,
        routing: StepRouting,
        dropout_seeds: list[torch.Tensor] | None,
    ) -> list[list[LayerRecord]]:
        if self._offload is not None:
            self._offload.begin()
        records: list[list[LayerRecord]] = []
        for use, slot in walk.layers("forward"):
            leaving = self._plan[use.layer]
            keep, reached = leaving in ("keep", "offload"), leaving != "nothing"
            if use.stage != "whole":
                self._sliced.forward(
                    use,
                    slot,
                    hidden,
                    arguments,
                    accumulator=self._accumulators.layer(use.layer) if reached else None,
                    seen=functools.partial(_seen, routing, use.layer, wave),
                    seeds=dropout_seeds,
                )
                continue
            row = []
            for m in range(len(hidden)):
                hidden[m], record = self._passes.layer_forward(
                    use.layer,
                    slot,
                    hidden[m],
                    arguments[m][use.layer],
                    keep=keep,
                    leaves_device=leaving == "offload",
                    accumulator=self._accumulators.layer(use.layer) if reached else None,
                    seeds_B=dropout_seeds[m][use.layer] if dropout_seeds else None,
                )
                if record.routers:
                    routing.seen(use.layer, wave[m], record.routers, repeats=leaving == "recompute")
                if not keep:
                    record.routers = ()
                if reached:
                    row.append(record)
                if self._offload is not None and record.activations is not None:
                    with self._exposure.waiting("offload"):
                        self._offload.send(use.layer, m, record.activations)
            records.append(row)
        return records

    def _backward_layers(
        self,
        walk: Walk,
        gradients: list[torch.Tensor],
        arguments: list[list[LayerArguments]],
        records: list[list[LayerRecord]],
        wave: range,
        *,
        routing: StepRouting,
        first: bool,
        last: bool,
        early: UpdateSettings | None,
    ) -> None:
        for use, slot in walk.layers("backward"):
            unit, section = 1 + use.layer, use.section
            accumulator = self._accumulators.layer(use.layer, section)
            if first and use.stage != "open":
                summed = self._passes.summed(unit) if section == 0 else ()
                self._accumulators.begin(unit, summed, section)
            if use.stage == "whole":
                for m, record in enumerate(records.pop()):
                    self._bring_back(record)
                    gradients[m] = self._passes.layer_backward(
                        use.layer,
                        slot,
                        record,
                        arguments[m][use.layer],
                        gradients[m],
                        accumulator=accumulator,
                        routing=routing,
                        micro_batch=wave[m],
                    )
                if last:
                    self._updater.return_gradient(unit, accumulator, early)
                continue
            self._sliced.backward(
                use,
                slot,
                arguments,
                gradients,
                accumulator=accumulator,
                routing=routing,
                wave=wave,
            )
            if last and use.stage != "open":
                self._updater.return_gradient(unit, accumulator, early, section)

    def _bring_back(self, record: LayerRecord) -> None:
        if self._offload is not None and record.activations is not None:
            with self._exposure.waiting("offload"):
                self._offload.arrive(record.activations)

    def _head(
        self,
        batches: list[DeviceBatch],
        hidden: list[torch.Tensor],
        scale: float,
        loss_sum: torch.Tensor,
    ) -> list[torch.Tensor]:
        windows = self._windows
        windows.wait(windows.head)
        gradients = []
        for m, batch in enumerate(batches):
            loss, gradient_BTD = self._passes.head_forward_backward(
                windows.head,
                windows.embed,
                hidden[m],
                batch,
                scale=scale,
                head_accumulator=self._accumulators.head,
                embed_accumulator=self._accumulators.embed,
            )
            loss_sum += loss
            gradients.append(gradient_BTD)
        return gradients


def _seen(
    routing: StepRouting, layer: int, wave: range, m: int, routers: tuple[RouterOutput, ...]
) -> None:
    """What the routers of a layer said of the ``m``-th micro-batch of a wave."""
    if routers:
        routing.seen(layer, wave[m], routers, repeats=True)
