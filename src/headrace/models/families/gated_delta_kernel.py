"""The gated delta rule through flash-linear-attention's kernel, where it can be trusted.

The kernel is used on a device only if the versions at hand have no known fault and a check on that
device found its results and gradients to be those of the torch path; else the torch path stays,
and the reason is logged once. The kernel runs inside one operator, so that compiled layers stay one
graph; backward runs it again, with gradients. Invariant: what is computed is the rule of
:mod:`headrace.models.families.gated_delta`, documents apart.

Shape legend: B rows, T positions, H heads, K key size, V value size.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.models.recording import recording

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = "flash-linear-attention"
HOPPER = (9, 0)
# Gradients of its kernel are wrong there: flash-linear-attention's own notes on Triton, and
# `headrace doctor`.
BAD_TRITON = ((3, 4, 0), (3, 7, 0))
MAX_ERROR = 2e-2  # of a whole tensor, relative: bfloat16 through some hundred products

_logger = logging.getLogger(__name__)
_verdicts: dict[str, str | None] = {}  # by device: why the kernel is not used, None if it is


def known_fault(capability: tuple[int, int], triton: str) -> str | None:
    """What is known against the kernel with these versions.

    Args:
        capability: the card's compute capability.
        triton: Triton's version.
    """
    numbers = [int(part) for part in re.findall(r"\d+", triton)[:3]]
    version = tuple(numbers + [0] * (3 - len(numbers)))
    if capability == HOPPER and BAD_TRITON[0] <= version <= BAD_TRITON[1]:
        return f"its gradients are wrong on Hopper with Triton {triton}"
    return None


def prepare(device: torch.device, *, compare: Callable[..., torch.Tensor]) -> None:
    """Decide once for a device whether the kernel is used there; costs a second.

    Args:
        device: where layers run.
        compare: the torch path, for the check.
    """
    name = str(device)
    if device.type != "cuda" or name in _verdicts:
        return
    _verdicts[name] = reason = _find_reason(device, compare)
    if reason is None:
        _logger.info("gated DeltaNet runs on %s's kernel", PACKAGE)
    else:
        _logger.info("gated DeltaNet runs on torch operators: %s", reason)


def is_used(device: torch.device) -> bool:
    """The kernel was found good on this device."""
    return reason_against(device) is None


def reason_against(device: torch.device) -> str | None:
    """Why the kernel is not used on a device, as :func:`prepare` found; None if it is."""
    return _verdicts.get(str(device), "not asked")


def _find_reason(device: torch.device, compare: Callable[..., torch.Tensor]) -> str | None:
    if importlib.util.find_spec("fla") is None:
        return f"{PACKAGE} is not installed"
    capability = torch.cuda.get_device_capability(device)
    fault = known_fault(capability, importlib.metadata.version("triton"))
    if fault is not None:
        return fault
    return check(device, compare)


def check(device: torch.device, compare: Callable[..., torch.Tensor]) -> str | None:
    """Results and gradients of the kernel on ``device`` against the torch path; None if equal."""
    generator = torch.Generator().manual_seed(0)
    B, T, H, K, V = 2, 200, 2, 64, 64

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(B, T, *shape, generator=generator).to(device)

    inputs = [
        draw(H, K).bfloat16(),
        draw(H, K).bfloat16(),
        draw(H, V).bfloat16(),
        -0.3 * F.softplus(draw(H)),
        torch.sigmoid(draw(H)).bfloat16(),
    ]
    bounds = [0, 70, 71, 200, 330, 400, 400]  # across chunks, of one token, and padding
    weights = draw(H, V)
    try:
        for cu_seqlens in (None, torch.tensor(bounds, dtype=torch.int32, device=device)):
            found, wanted = (
                _with_gradients(function, inputs, cu_seqlens, weights)
                for function in (run, compare)
            )
            names = ("result", "query", "key", "value", "decay", "strength")
            for name, one, other in zip(names, found, wanted, strict=True):
                error = float((one.float() - other.float()).norm() / other.float().norm())
                if not error <= MAX_ERROR:
                    return f"the kernel's {name} differs by {error:.2g} on this device"
    except Exception as error:  # noqa: BLE001 - whatever a foreign kernel raises
        # A kernel that does not run here must not end a run that can go on without it.
        return f"the kernel does not run here: {type(error).__name__}: {error}"
    return None


def _with_gradients(
    function: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    weights: torch.Tensor,
) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves, cu_seqlens)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)]


def run(  # noqa: PLR0917 - as the rule has them
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """The rule with normalised queries and keys; shapes as in the torch path, heads repeated.

    Returns:
        ``(B, T, H, V)``.
    """
    out: torch.Tensor = torch.ops.headrace.gated_delta_v1(query, key, value, g, beta, cu_seqlens)
    return out


def _call(  # noqa: PLR0917 - as the rule has them
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    tensors = [query, key, value, g, beta]
    bounds = None
    if cu_seqlens is not None:  # the kernel takes packed tokens as one row
        tensors = [tensor.flatten(0, 1)[None] for tensor in tensors]
        # Boundaries are padded by repeating the last one; a document of no tokens is none.
        bounds = torch.unique_consecutive(cu_seqlens).long()
    q, k, v, decay, strength = tensors
    out: torch.Tensor
    out, _ = _kernel()(
        q, k, v, g=decay, beta=strength, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True
    )
    return out.reshape(value.shape).contiguous()


def _kernel() -> Callable[..., Any]:
    from fla.ops.gated_delta_rule import (  # noqa: PLC0415 - optional, slow
        chunk_gated_delta_rule,
    )

    kernel: Callable[..., Any] = chunk_gated_delta_rule
    return kernel


# The version is part of the name: a compiled graph may outlive the code that made it.
@torch.library.custom_op("headrace::gated_delta_v1", mutates_args=())
def _forward(  # noqa: PLR0917 - an operator takes no keywords
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    with torch.no_grad():
        return _call(query, key, value, g, beta, cu_seqlens)


@torch.library.custom_op("headrace::gated_delta_backward_v1", mutates_args=())
def _backward(  # noqa: PLR0917 - an operator takes no keywords
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (query, key, value, g, beta)]
    with recording():
        q, k, v, decay, strength = leaves
        out = _call(q, k, v, decay, strength, cu_seqlens)
        found = torch.autograd.grad(out, leaves, grad)
    dq, dk, dv, dg, dbeta = (gradient.contiguous() for gradient in found)
    return dq, dk, dv, dg, dbeta


@_forward.register_fake
def _(
    _query: torch.Tensor,
    _key: torch.Tensor,
    value: torch.Tensor,
    _g: torch.Tensor,
    _beta: torch.Tensor,
    _cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    return value.new_empty(value.shape)


@_backward.register_fake
def _(
    _grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    _cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        g.new_empty(g.shape),
        beta.new_empty(beta.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    *tensors, cu_seqlens = inputs
    ctx.save_for_backward(*tensors, cu_seqlens)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    gradients = torch.ops.headrace.gated_delta_backward_v1(grad.contiguous(), *ctx.saved_tensors)
    return (*gradients, None)


_forward.register_autograd(_gradients, setup_context=_save)
