"""Low-rank adapters on the experts of a layer, which lie stacked in one parameter a product.

PEFT (``target_parameters``) adds ``scaling * B A`` of every expert to its matrix before the matrix
is used: the sum has the experts' size, and so has its gradient. Here rows pass through A and B
beside the matrix, and neither exists. Invariant: names, shapes and meaning of A and B are PEFT's.

Shape legend: S rows, X experts, R rank, I and O input and output size of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.models.experts import grouped_matmul, run_experts

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIGNMENT = 8  # of sizes, for grouped products; what is filled up with zeros adds nothing


def aligned(rank: int) -> int:
    """The rank that is multiplied."""
    return -(-rank // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class LowRank:
    """The adapters of one parameter, an expert each.

    Attributes:
        a: ``(X * R, I)``, expert by expert.
        b: ``(O, R * X)``, the experts of a column of B side by side.
        num_experts: X.
        scaling: of the product.
    """

    a: torch.Tensor
    b: torch.Tensor
    num_experts: int
    scaling: float

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of every expert, ``(X, R, I)`` and ``(X, O, R)``."""
        a_XRI = self.a.view(self.num_experts, -1, self.a.shape[1])
        b_ORX = self.b.view(self.b.shape[0], -1, self.num_experts)
        return a_XRI, b_ORX.permute(2, 0, 1)

    def of_rows(self, rows_SI: torch.Tensor, ends_X: torch.Tensor) -> torch.Tensor:
        """What the adapters add to a product; rows in the order of their experts, ``(S, O)``."""
        a_XRI, b_XOR = self.factors()
        missing = aligned(a_XRI.shape[1]) - a_XRI.shape[1]
        if missing:  # a copy even of nothing, which a kept layer would hold until its backward
            a_XRI, b_XOR = F.pad(a_XRI, (0, 0, 0, missing)), F.pad(b_XOR, (0, missing))
        a_XIR, b_XRO = a_XRI.transpose(1, 2), b_XOR.contiguous().transpose(1, 2)
        inner_SR = grouped_matmul(rows_SI, a_XIR, ends_X) * self.scaling
        return grouped_matmul(inner_SR, b_XRO, ends_X)


class AdaptedExperts(nn.Module):
    """Experts, or such a module around them, with adapters on one parameter, as PEFT nests them.

    Attributes:
        base_layer: what is adapted.
        lora_A: A by the adapter's name.
        lora_B: B by the adapter's name.
        parameter_name: of the experts.
        num_experts: of the parameter.
        scaling: of B A.
    """

    def __init__(self, wrapper: Any, adapter: str) -> None:
        """Take the place of PEFT's ``ParamWrapper``, with its modules."""
        super().__init__()
        inner = wrapper.base_layer
        self.base_layer = (
            AdaptedExperts(inner, adapter) if isinstance(inner, type(wrapper)) else inner
        )
        self.lora_A, self.lora_B = wrapper.lora_A, wrapper.lora_B
        self.parameter_name: str = wrapper.parameter_name
        self._adapter = adapter
        self.num_experts = int(wrapper.num_experts)
        self.scaling = float(wrapper.scaling[adapter])

    def nested(self) -> Iterator[AdaptedExperts]:
        """This module and those in it, from the outside."""
        module: Any = self
        while isinstance(module, AdaptedExperts):
            yield module
            module = module.base_layer

    @property
    def experts(self) -> nn.Module:
        """The model's own module."""
        innermost: AdaptedExperts = list(self.nested())[-1]
        return innermost.base_layer

    @property
    def is_transposed(self) -> bool:
        """The experts' matrices have input before output."""
        return bool(self.experts.is_transposed)

    def low_rank(self, a: torch.Tensor, b: torch.Tensor) -> LowRank:
        """These adapters with given values."""
        return LowRank(a, b, self.num_experts, self.scaling)

    def forward(
        self, hidden_ND: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As :func:`headrace.models.experts.run_experts`."""
        added = {
            part.parameter_name: part.low_rank(
                part.lora_A[part._adapter].weight,  # noqa: SLF001 - its own class
                part.lora_B[part._adapter].weight,  # noqa: SLF001 - as above
            )
            for part in self.nested()
        }
        return run_experts(self.experts, hidden_ND, top_k_index, top_k_weights, added)
