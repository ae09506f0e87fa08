"""What routers of mixture-of-experts layers say, and the auxiliary loss that balances them.

Router logits leave a layer beside its hidden state: hooks on the routers, registered before a
template is ever traced, hand them out. The auxiliary loss is transformers'
(``load_balancing_loss_func``: Switch Transformers, arXiv:2101.03961, equations 4 to 6, with
assignments and probabilities averaged over the rows of all layers): with X experts, share f_e of
rows assigned to expert e (it sums to the experts a token) and mean probability P_e,
``loss = X * sum_e f_e * P_e``. No gradient flows through f.

Shape legend: N tokens, K experts a token, X experts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

_BOX = "_headrace_routers"  # begins with an underscore: no setting of the layer


@dataclass(frozen=True, kw_only=True)
class RouterOutput:
    """What one router gave for one micro-batch.

    Attributes:
        logits_NX: scores before any softmax.
        chosen_NK: the experts of each token, or None when the router does not return them.
    """

    logits_NX: torch.Tensor
    chosen_NK: torch.Tensor | None

    def detached(self) -> RouterOutput:
        """Without graph."""
        return RouterOutput(logits_NX=self.logits_NX.detach(), chosen_NK=self.chosen_NK)


@dataclass(frozen=True, kw_only=True)
class AuxiliaryLoss:
    """The balancing loss of a model.

    Attributes:
        num_experts: X.
        top_k: experts a token, as the loss counts them.
        coefficient: what the loss is multiplied by; 0 when the configuration does not ask for it
            (``output_router_logits``).
    """

    num_experts: int
    top_k: int
    coefficient: float


def find_auxiliary_loss(model: nn.Module, config: Any) -> AuxiliaryLoss | None:
    """The balancing loss that transformers defines for a class, or None."""
    module = sys.modules[type(model).__module__]
    num_experts, top_k = (
        getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok")
    )
    coefficient = getattr(model, "router_aux_loss_coef", None)
    known = hasattr(module, "load_balancing_loss_func")
    if not known or num_experts is None or top_k is None or coefficient is None:
        return None
    if not _routers(model, model):  # every layer is dense by its configuration
        return None
    asked = bool(getattr(config, "output_router_logits", False))
    return AuxiliaryLoss(
        num_experts=int(num_experts),
        top_k=int(top_k),
        coefficient=float(coefficient) if asked else 0.0,
    )


def watch_routers(layer: nn.Module, model: nn.Module) -> list[tuple[torch.Tensor, ...]] | None:
    """Hook the routers of a layer template, once; None when it has none.

    Args:
        layer: a template.
        model: its causal LM, whose class says which modules are routers.

    Returns:
        The list to which each call of a router appends its logits and, if it returns them, its
        choices. Whoever calls the layer empties it.
    """
    found = getattr(layer, _BOX, None)
    if found is not None:  # registered by an earlier engine of this spec
        hooked: list[tuple[torch.Tensor, ...]] = found
        return hooked
    routers = _routers(layer, model)
    if not routers:
        return None
    box: list[tuple[torch.Tensor, ...]] = []
    object.__setattr__(layer, _BOX, box)
    for router, index in routers:

        def record(_module: Any, _args: Any, output: Any, index: int = index) -> None:
            values = output if isinstance(output, (tuple, list)) else (output,)
            chosen = [v for v in values if _is_choice(v, values[index])]
            box.append((values[index], *chosen[:1]))

        router.register_forward_hook(record)
    return box


def _is_choice(value: Any, logits_NX: torch.Tensor) -> bool:
    """Experts by number, a row for each of logits."""
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and value.dim() == 2
        and value.shape[0] == logits_NX.shape[0]
    )


def _routers(layer: nn.Module, model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The routers of a layer with the place of the logits in what they return."""
    recorders: Any = {}
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        if "router_logits" in recorders:
            break
    wanted = recorders.get("router_logits")
    wanted = wanted if isinstance(wanted, list) else [wanted]
    found = []
    for path, module in layer.named_modules():
        for recorder in wanted:
            target = getattr(recorder, "target_class", recorder)
            if not isinstance(target, type) or not isinstance(module, target):
                continue
            name = getattr(recorder, "layer_name", None)
            if name is None or f".{name.strip('.')}." in f".{path}.":
                found.append((module, int(getattr(recorder, "index", 0) or 0)))
    return found


def assignments(logits_NX: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many rows the loss assigns to each expert, and the sum of their probabilities.

    Returns:
        Two float32 tensors ``(X,)``.
    """
    probabilities_NX = torch.softmax(logits_NX, dim=-1)
    chosen_NK = torch.topk(probabilities_NX, top_k, dim=-1).indices
    return count(chosen_NK, logits_NX.shape[1]), probabilities_NX.float().sum(dim=0)


def count(chosen_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Rows of each expert, float32 ``(X,)``."""
    flat = chosen_NK.reshape(-1).long()
    # Whole numbers below 2 ** 24: float sums are exact in any order.
    return torch.zeros(num_experts, device=flat.device).index_add_(
        0, flat, torch.ones_like(flat, dtype=torch.float32)
    )


def auxiliary_gradient(logits_NX: torch.Tensor, slope_X: torch.Tensor) -> torch.Tensor:
    """The gradient of ``sum_e slope_e * sum_n softmax(logits)_ne``, in the logits' dtype."""
    probabilities_NX = torch.softmax(logits_NX.detach().float(), dim=-1)
    mean_N1 = (probabilities_NX * slope_X).sum(dim=-1, keepdim=True)
    return (probabilities_NX * (slope_X - mean_N1)).to(logits_NX.dtype)


def fingerprint(chosen_NK: torch.Tensor) -> torch.Tensor:
    """An int64 scalar that differs when any token is routed elsewhere."""
    flat = chosen_NK.reshape(-1).long()
    place = torch.arange(1, flat.numel() + 1, device=flat.device)
    # Products wrap around; the square keeps exchanged tokens from cancelling.
    weights = place * 2_654_435_761 ^ place * place * 40_503
    return ((flat + 1) * weights).sum()
