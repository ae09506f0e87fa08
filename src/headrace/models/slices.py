"""Layers whose experts are sent in slices: where a layer is cut, and its template without experts.

The layer's experts are replaced by a stub that hands out what they are called with and returns what
it was given. So the rest of the layer runs by itself, before the experts and again after them, and
each slice of experts runs on the rows that are routed to it. Invariant: each row, and each expert's
gradient, is computed as :func:`headrace.models.experts.run_experts` computes it; only sums over a
token's experts in different slices have another order.

Shape legend: N tokens, K experts a token, S = N * K assignments, R those of a slice, X experts, D
hidden size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.models.expert_adapters import AdaptedExperts
from headrace.models.experts import run_rows, runs_as_ours, sort_assignments, sum_of_experts
from headrace.store.sections import Section, cut_unit, whole_unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.models.spec import ModelSpec

OUTPUT = "given_output"
_PRODUCTS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """The experts of a layer that can be cut.

    Attributes:
        path: of their module in the layer.
        module: says how they compute.
        num_experts: of the layer.
        output_size: width of what they return.
    """

    path: str
    module: nn.Module
    num_experts: int
    output_size: int

    @property
    def local_names(self) -> tuple[str, ...]:
        """Of their parameters in the layer."""
        return tuple(f"{self.path}.{name}" for name, _ in self.module.named_parameters())


def find_experts(layer: nn.Module) -> StackedExperts | None:
    """The experts of a layer if there is one set of them, and every parameter is stacked."""
    found = [(path, part) for path, part in layer.named_modules() if runs_as_ours(part)]
    adapted = any(isinstance(part, AdaptedExperts) for part in layer.modules())
    if len(found) != 1 or adapted:
        return None
    path, module = found[0]
    settings: Any = module
    parameters = dict(module.named_parameters())
    known = {name for product in _PRODUCTS for name in (product, f"{product}_bias")}
    stacked = all(p.shape[0] == settings.num_experts for p in parameters.values())
    if not stacked or not parameters.keys() <= known or dict(module.named_buffers()):
        return None
    return StackedExperts(
        path=path,
        module=module,
        num_experts=int(settings.num_experts),
        output_size=parameters["down_proj"].shape[2 if settings.is_transposed else 1],
    )


def plan_sections(
    spec: ModelSpec, num_slices: int, num_resident: int = 0
) -> tuple[tuple[Section, ...], ...]:
    """The sections of every unit, in order of use.

    Args:
        spec: the model.
        num_slices: that the experts of a layer are sent in; 1 leaves layers whole.
        num_resident: units, from the first on, that are not sent and stay whole.
    """
    sections = []
    for unit, layout in enumerate(spec.units):
        experts = spec.experts.get(unit - 1) if unit >= num_resident else None
        if experts is None or num_slices == 1:
            sections.append(whole_unit(unit, layout))
        else:
            names, count = experts.local_names, experts.num_experts
            sections.append(cut_unit(unit, layout, names, count, num_slices))
    return tuple(sections)


def most_slices(spec: ModelSpec) -> int:
    """As many slices as the experts of a layer can be sent in; 1 where none can be cut."""
    return min((experts.num_experts for experts in spec.experts.values()), default=1)


def check_slices(spec: ModelSpec, num_slices: int) -> None:
    """Refuse what cannot be cut.

    Raises:
        ConfigError: the model has no experts that can be, or fewer.
    """
    if num_slices == 1:
        return
    given = f"engine.expert_slices is {num_slices}, but "
    if not spec.experts:
        if spec.adapters is not None and spec.adapters.parameters:
            raise ConfigError(
                f"{given}{spec.adapters.relative_parameters[0]} has adapters, which are sent with "
                "their layer",
                remedy="leave it out, or lora_target_parameters",
            )
        raise ConfigError(
            f"{given}no layer of {type(spec.model).__name__} has experts that lie stacked in one "
            "parameter and run as grouped products",
            remedy="leave it out",
        )
    if num_slices > most_slices(spec):
        raise ConfigError(
            f"{given}a layer has {most_slices(spec)} experts",
            remedy=f"at most {most_slices(spec)}",
        )


class ExpertsStub(nn.Module):
    """Stands for the experts of a layer: records the call, returns what was bound to it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def forward(
        self, hidden_ND: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the experts are called; what is returned is a copy, which may be written to."""
        self._calls.append((hidden_ND, top_k_index, top_k_weights))
        given: torch.Tensor = getattr(self, OUTPUT)  # bound for a call
        return given.clone()

    def begin(self) -> None:
        """Forget the call of a layer that failed behind it."""
        self._calls.clear()

    def take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the one call since :meth:`begin` was given."""
        (call,) = self._calls
        self._calls.clear()
        return call


def without_experts(layer: nn.Module, path: str) -> tuple[nn.Module, ExpertsStub]:
    """A template that shares all modules of ``layer`` but its experts."""
    stub = ExpertsStub()
    twin = copy.copy(layer)
    inner = twin
    *parents, name = path.split(".")
    for parent in parents:
        inner._modules = dict(inner._modules)  # noqa: SLF001 - a twin that shares the other modules
        child = copy.copy(inner.get_submodule(parent))
        inner._modules[parent] = child  # noqa: SLF001
        inner = child
    inner._modules = dict(inner._modules)  # noqa: SLF001
    inner._modules[name] = stub  # noqa: SLF001
    return twin, stub


@dataclass(frozen=True, kw_only=True)
class Routed:
    """A micro-batch's assignments in order of their experts.

    Attributes:
        order_S: which assignment comes at each place.
        inverse_NK: the place of each assignment.
        expert_S: the expert at each place.
        ends_X: where each expert's stretch ends.
        ends: the same on the host.
    """

    order_S: torch.Tensor
    inverse_NK: torch.Tensor
    expert_S: torch.Tensor
    ends_X: torch.Tensor
    ends: tuple[int, ...]

    @classmethod
    def of(cls, index_NK: torch.Tensor, num_experts: int) -> Routed:
        """Sort; waits until the device has counted."""
        order_S, inverse_NK, expert_S, ends_X = sort_assignments(index_NK, num_experts)
        return cls(
            order_S=order_S,
            inverse_NK=inverse_NK,
            expert_S=expert_S,
            ends_X=ends_X,
            ends=tuple(ends_X.tolist()),
        )

    def rows(self, experts: range) -> range:
        """The places of consecutive experts."""
        return range(self.ends[experts.start - 1] if experts.start else 0, self.ends[experts[-1]])


class SliceOfExperts:
    """Consecutive experts on the rows of one micro-batch that are routed to them."""

    def __init__(
        self,
        experts: StackedExperts,
        part: range,
        parameters: Mapping[str, torch.Tensor],
        routed: Routed,
    ) -> None:
        """Nothing is computed yet.

        Args:
            experts: of the layer.
            part: which of them.
            parameters: theirs, by local name in the layer.
            routed: the micro-batch.
        """
        self._module, self._parameters = experts.module, parameters
        self._prefix = f"{experts.path}."
        rows = routed.rows(part)
        self.num_rows = len(rows)
        self._order_R = routed.order_S[rows.start : rows.stop]
        self._expert_R = routed.expert_S[rows.start : rows.stop] - part.start
        ends_X = routed.ends_X[part.start : part.stop]
        self._ends_X = ends_X - rows.start
        inverse_NK = routed.inverse_NK - rows.start
        inside = (inverse_NK >= 0) & (inverse_NK < self.num_rows)
        self._inverse_NK = torch.where(inside, inverse_NK, self.num_rows)

    def _run(self, rows_RD: torch.Tensor, weight_R: torch.Tensor) -> torch.Tensor:
        def weight_of(name: str) -> torch.Tensor:
            return self._parameters[self._prefix + name]

        return run_rows(
            self._module,
            weight_of,
            rows_RD,
            weight_R,
            expert_S=self._expert_R,
            ends_X=self._ends_X,
        )

    def _spread(self, values_ND: torch.Tensor) -> torch.Tensor:
        return values_ND[self._order_R // self._inverse_NK.shape[1]]

    def _collect(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Each token's sum over its experts of this slice; the row behind the last is zero."""
        return sum_of_experts(nn.functional.pad(rows_RD, (0, 0, 0, 1)), self._inverse_NK)

    @torch.no_grad()
    def add_output(
        self, hidden_ND: torch.Tensor, weights_NK: torch.Tensor, total_ND: torch.Tensor
    ) -> None:
        """Add the weighted sum over these experts to ``total_ND``."""
        if self.num_rows:
            weight_R = weights_NK.reshape(-1)[self._order_R]
            total_ND += self._collect(self._run(self._spread(hidden_ND), weight_R))

    def add_gradients(
        self,
        hidden_ND: torch.Tensor,
        weights_NK: torch.Tensor,
        output_grad_ND: torch.Tensor,
        *,
        hidden_grad_ND: torch.Tensor,
        weights_grad_NK: torch.Tensor,
        leaves: list[torch.Tensor],
    ) -> Sequence[torch.Tensor | None]:
        """Run again, and back.

        Args:
            hidden_ND: as in forward.
            weights_NK: as in forward.
            output_grad_ND: the gradient of what all experts return.
            hidden_grad_ND: is added to.
            weights_grad_NK: contiguous; gets the gradients of these experts' weights.
            leaves: parameters to take gradients of.

        Returns:
            Those gradients.
        """
        if not self.num_rows:
            return [None] * len(leaves)
        rows_RD = self._spread(hidden_ND.detach()).requires_grad_()
        weight_R = weights_NK.detach().reshape(-1)[self._order_R].requires_grad_()
        with torch.enable_grad():
            out_RD = self._run(rows_RD, weight_R)
        rows_grad_RD, weight_grad_R, *gradients = torch.autograd.grad(
            out_RD,
            [rows_RD, weight_R, *leaves],
            self._spread(output_grad_ND).to(out_RD.dtype),
            allow_unused=True,
        )
        assert rows_grad_RD is not None
        assert weight_grad_R is not None
        with torch.no_grad():
            hidden_grad_ND += self._collect(rows_grad_RD)
            weights_grad_NK.view(-1)[self._order_R] = weight_grad_R
        return gradients
