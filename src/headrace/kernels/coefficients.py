"""The scalar factors of an optimizer call, computed once and rounded to fp32 once.

Invariant: both backends take every factor from here, already rounded, so their results cannot
differ by how a power or a square root of a hyperparameter was evaluated. Does no array work.

The factors are those of AdamW (Loshchilov & Hutter, arXiv:1711.05101) as ``torch.optim.AdamW``
computes them: in double precision, from the step number, every call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The factors of one call, as fp32. The order of the fields is that of ``csrc/kernels.h``."""

    grad_scale: np.float32
    """Multiplies every gradient element."""
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    eps: np.float32
    inverse_correction2: np.float32
    """1 / sqrt(1 - beta2^step)."""
    step_size: np.float32
    """learning_rate / (1 - beta1^step)."""
    decay: np.float32
    """learning_rate * weight_decay."""
    beta1: np.float32
    inverse_keep: np.float32
    """1 / (1 - decay): what inverting multiplies by."""
    first_delta: np.float32
    """(1 - beta1) * (scale - applied_scale): what correcting adds to ``exp_avg`` a gradient."""
    second_delta: np.float32
    """(1 - beta2) * (scale^2 - applied_scale^2)."""
    second_floor: np.float32
    """(1 - beta2) * scale^2: no second moment with this gradient in it is smaller."""

    @property
    def packed(self) -> NDArray[np.float32]:
        """All of them in the order of the fields."""
        return np.array([getattr(self, field.name) for field in fields(self)], dtype=np.float32)


def _require(holds: bool, name: str, value: float, rule: str) -> None:
    if not holds:
        raise ConfigError(
            f"{name} is {value!r}; it must be {rule}", remedy=f"give {name} within its limits"
        )


def coefficients(
    *,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    applied_scale: float = 1.0,
    scale: float = 1.0,
) -> Coefficients:
    """Check the hyperparameters of a call and compute its factors.

    Args:
        step: Number of this update, from 1; the bias corrections follow from it alone.
        learning_rate: Of this step, not negative.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment; a positive normal fp32 number, because
            without it a parameter that has no gradient yet divides zero by zero.
        weight_decay: Decoupled decay; ``learning_rate * weight_decay`` is below 1.
        grad_scale: Multiplies the gradient (clipping, averaging).
        applied_scale: For a correction, the scale the update was applied with.
        scale: For a correction, the scale it should have been applied with.

    Raises:
        ConfigError: A value is outside its range.
    """
    _require(step >= 1, "step", step, "at least 1")
    _require(
        math.isfinite(learning_rate) and learning_rate >= 0,
        "learning_rate",
        learning_rate,
        "finite and not negative",
    )
    _require(0 <= beta1 < 1, "beta1", beta1, "in [0, 1)")
    _require(0 <= beta2 < 1, "beta2", beta2, "in [0, 1)")
    _require(
        _SMALLEST_NORMAL <= eps < math.inf,
        "eps",
        eps,
        f"finite and at least {_SMALLEST_NORMAL:.3g}, the smallest normal fp32 number",
    )
    _require(
        weight_decay >= 0 and learning_rate * weight_decay < 1,
        "weight_decay",
        weight_decay,
        f"not negative, and below 1 times learning_rate {learning_rate!r}",
    )
    for name, value in (
        ("grad_scale", grad_scale),
        ("applied_scale", applied_scale),
        ("scale", scale),
    ):
        _require(math.isfinite(value), name, value, "finite")
    decay = learning_rate * weight_decay
    return Coefficients(
        grad_scale=np.float32(grad_scale),
        one_minus_beta1=np.float32(1 - beta1),
        beta2=np.float32(beta2),
        one_minus_beta2=np.float32(1 - beta2),
        eps=np.float32(eps),
        inverse_correction2=np.float32(1 / math.sqrt(1 - beta2**step)),
        step_size=np.float32(learning_rate / (1 - beta1**step)),
        decay=np.float32(decay),
        beta1=np.float32(beta1),
        inverse_keep=np.float32(1 / (1 - decay)),
        first_delta=np.float32((1 - beta1) * (scale - applied_scale)),
        second_delta=np.float32((1 - beta2) * (scale**2 - applied_scale**2)),
        second_floor=np.float32((1 - beta2) * scale**2),
    )
