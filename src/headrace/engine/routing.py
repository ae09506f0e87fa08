"""Routers during one step: their balancing loss, their load, and that recompute repeats them.

Assignments of a micro-batch are summed over all layers in forward; only then the slope of the
balancing loss is known, and backward adds each router's gradient in its own layer. A micro-batch
counts by its supervised tokens, so that the result does not depend on waves.

Shape legend: X experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from headrace.errors import NumericsError
from headrace.models.routing import (
    assignments,
    auxiliary_gradient,
    count,
    fingerprint,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.models.routing import AuxiliaryLoss, RouterOutput
    from headrace.parallel.ranks import Ranks


@dataclass
class _Balance:
    """Sums of one micro-batch over its layers."""

    weight: float
    counts_X: torch.Tensor | None = None
    probabilities_X: torch.Tensor | None = None
    num_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """What routers did in a step.

    Attributes:
        auxiliary_loss: the balancing loss, not yet multiplied by its coefficient.
        busiest: by layer, rows of the busiest expert over the even share; 1 is balanced.
        num_idle: by layer, experts without a row.
    """

    auxiliary_loss: float | None = None
    busiest: dict[int, float] = field(default_factory=dict)
    num_idle: dict[int, int] = field(default_factory=dict)


class StepRouting:
    """Collects router outputs of one step."""

    def __init__(
        self, loss: AuxiliaryLoss | None, weights: Sequence[float], num_counted: int | None = None
    ) -> None:
        """Begin a step.

        Args:
            loss: the model's balancing loss, None or coefficient 0 for none.
            weights: each micro-batch's share of the global batch.
            num_counted: micro-batches whose load is reported; all by default.
        """
        self._num_counted = len(weights) if num_counted is None else num_counted
        self._loss = loss if loss is not None and loss.coefficient else None
        self._balances = [_Balance(weight) for weight in weights]
        self._load: dict[int, torch.Tensor] = {}
        self._prints: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._differs: torch.Tensor | None = None

    @torch.no_grad()
    def seen(
        self, layer: int, micro_batch: int, outputs: Sequence[RouterOutput], *, repeats: bool
    ) -> None:
        """A layer's routers in forward; with ``repeats`` recompute will run them :meth:`again`."""
        for output in outputs:
            if self._loss is not None:
                self._add(self._balances[micro_batch], output, self._loss.top_k)
            if output.chosen_NK is not None:
                load_X = count(output.chosen_NK, output.logits_NX.shape[1])
                if micro_batch >= self._num_counted:
                    load_X = torch.zeros_like(load_X)  # a rank without any reports zeros, too
                self._load[layer] = self._load[layer] + load_X if layer in self._load else load_X
        if repeats:
            self._prints[layer, micro_batch] = _prints(outputs)

    @staticmethod
    def _add(balance: _Balance, output: RouterOutput, top_k: int) -> None:
        counts_X, probabilities_X = assignments(output.logits_NX, top_k)
        if balance.counts_X is None or balance.probabilities_X is None:
            balance.counts_X, balance.probabilities_X = counts_X, probabilities_X
        else:
            balance.counts_X += counts_X
            balance.probabilities_X += probabilities_X
        balance.num_rows += output.logits_NX.shape[0]

    @torch.no_grad()
    def again(self, layer: int, micro_batch: int, outputs: Sequence[RouterOutput]) -> None:
        """The same routers in recompute: they must choose as they did."""
        before = self._prints[layer, micro_batch]
        for first, second in zip(before, _prints(outputs), strict=True):
            differs = first != second
            self._differs = differs if self._differs is None else self._differs | differs

    @torch.no_grad()
    def gradients(
        self, micro_batch: int, outputs: Sequence[RouterOutput]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Router logits with the balancing loss's gradient; empty when there is none."""
        if self._loss is None or not outputs:
            return []
        balance = self._balances[micro_batch]
        assert balance.counts_X is not None
        share_X = balance.counts_X / balance.num_rows
        factor = self._loss.coefficient * balance.weight * self._loss.num_experts
        slope_X = share_X * (factor / balance.num_rows)
        return [(o.logits_NX, auxiliary_gradient(o.logits_NX, slope_X)) for o in outputs]

    def report(self, ranks: Ranks) -> RoutingReport:
        """Sums of the step over all ranks, read from the device.

        Raises:
            NumericsError: recompute routed a token elsewhere than forward did.
        """
        if self._differs is not None and bool(self._differs):
            raise NumericsError(
                "a layer's recompute sent tokens to other experts than its forward did, so the "
                "gradient is not that of the loss",
                remedy="engine.activations: keep, and engine.expert_slices: 1 if layers are sliced",
            )
        loss = None
        if self._loss is not None:
            (loss,) = ranks.sums([sum(self._value(balance) for balance in self._balances)])
        busiest, idle = {}, {}
        loads = {layer: load_X.cpu().double() for layer, load_X in sorted(self._load.items())}
        if loads:
            counts = ranks.sums(torch.cat(list(loads.values())).tolist())
            parts = torch.split(torch.tensor(counts), [len(load) for load in loads.values()])
            loads = dict(zip(loads, parts, strict=True))
        for layer, rows in loads.items():
            busiest[layer] = float(rows.max() / rows.mean())
            idle[layer] = int((rows == 0).sum())
        return RoutingReport(auxiliary_loss=loss, busiest=busiest, num_idle=idle)

    def _value(self, balance: _Balance) -> float:
        if balance.counts_X is None or balance.probabilities_X is None or self._loss is None:
            return 0.0
        rows = balance.num_rows
        product = (balance.counts_X / rows * (balance.probabilities_X / rows)).sum()
        return balance.weight * self._loss.num_experts * float(product)


def _prints(outputs: Sequence[RouterOutput]) -> list[torch.Tensor]:
    return [fingerprint(o.chosen_NK) for o in outputs if o.chosen_NK is not None]
