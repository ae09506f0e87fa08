"""How a call knows beforehand that none of its results can overflow.

A refused call leaves the state untouched, so it must be known before the first store that every
result is finite. Evaluating the whole update first would say so exactly and costs half as much
memory traffic again. A :class:`Headroom` says so for free: while the state is far below overflow
(every real state is), a bound on the gradient proves it, and each update checks on the way that
the state stays far below.

Invariant: :func:`results_stay_finite` never says yes when a result could be infinite or NaN.
Does not look at arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from headrace.kernels.coefficients import Coefficients


class Operation(IntEnum):
    """What a call does to the state; the numbers are those of ``csrc/kernels.h``."""

    UPDATE = 0
    INVERT = 1
    CORRECT = 2


class Store(IntEnum):
    """What of the results a call stores; the numbers are those of ``csrc/kernels.h``.

    ``WEIGHTS`` and then ``MOMENTS``, with the same gradient, leave what ``EVERYTHING`` does: new
    moments depend on no weight. Only updates are stored in two parts.
    """

    NOTHING = 0
    EVERYTHING = 1
    WEIGHTS = 2
    MOMENTS = 3


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest magnitudes that results may have, as bits of non-negative fp32 values."""

    weight: int
    exp_avg: int
    exp_avg_sq: int


_LARGEST = 0x7F7FFFFF  # the largest finite fp32
_LARGEST_SPLIT = 0x7F7F7FFF  # the largest fp32 whose hi, rounded half away, is finite

FINITE = Limits(weight=_LARGEST, exp_avg=_LARGEST, exp_avg_sq=_LARGEST)
FINITE_SPLIT = Limits(weight=_LARGEST_SPLIT, exp_avg=_LARGEST, exp_avg_sq=_LARGEST)

_AMPLE_WEIGHT = 2.0**64
_AMPLE_EXP_AVG = 2.0**48
_AMPLE_EXP_AVG_SQ = 2.0**96
_SAFE = 2.0**126  # a quarter of overflow: covers what rounding adds to a bound
AMPLE = Limits(
    weight=_bits(_AMPLE_WEIGHT),
    exp_avg=_bits(_AMPLE_EXP_AVG),
    exp_avg_sq=_bits(_AMPLE_EXP_AVG_SQ),
)


class Headroom:
    """What is known about one range of the state: whether it is far from overflow.

    Keep one for each range that is always passed to the kernels as a whole. It starts out
    knowing nothing, learns from the first update, and must :meth:`forget` when anything else
    writes to the range (loading a checkpoint).
    """

    __slots__ = ("is_ample",)

    def __init__(self) -> None:
        self.is_ample = False

    def forget(self) -> None:
        """Know nothing again."""
        self.is_ample = False

    def __repr__(self) -> str:
        return f"Headroom(is_ample={self.is_ample})"


def results_stay_finite(operation: Operation, c: Coefficients, largest_grad: float) -> bool:
    """Whether an ample state and gradients up to ``largest_grad`` (unscaled) cannot overflow.

    Every intermediate of the operations in ``reference.py`` is bounded by the sums below: the
    denominators are at least ``eps`` (or ``beta1``, ``beta2``), the moments and the weight at
    most their ample limits.
    """
    if not math.isfinite(largest_grad):
        return False
    eps, beta2 = float(c.eps), float(c.beta2)
    if operation is Operation.UPDATE:
        grad = abs(float(c.grad_scale)) * largest_grad
        exp_avg = 2 * _AMPLE_EXP_AVG + grad
        exp_avg_sq = _AMPLE_EXP_AVG_SQ + grad * grad
        weight = _AMPLE_WEIGHT * 2 + float(c.step_size) * exp_avg / eps
    elif operation is Operation.INVERT:
        if c.beta1 == 0 or beta2 == 0:
            return False
        grad = abs(float(c.grad_scale)) * largest_grad
        exp_avg = (_AMPLE_EXP_AVG + grad) / float(c.beta1)
        exp_avg_sq = (_AMPLE_EXP_AVG_SQ + grad * grad) / beta2
        move = float(c.step_size) * _AMPLE_EXP_AVG / eps + _AMPLE_WEIGHT
        weight = _AMPLE_WEIGHT + move * float(c.inverse_keep)
    else:
        exp_avg = _AMPLE_EXP_AVG + abs(float(c.first_delta)) * largest_grad
        second = abs(float(c.second_delta)) + float(c.second_floor)
        exp_avg_sq = _AMPLE_EXP_AVG_SQ + second * largest_grad**2
        weight = _AMPLE_WEIGHT + float(c.step_size) * (_AMPLE_EXP_AVG + exp_avg) / eps
    # The root of the second moment is multiplied by the bias correction.
    denominator = math.sqrt(exp_avg_sq) * float(c.inverse_correction2) + eps
    return max(exp_avg, exp_avg_sq, weight, denominator) < _SAFE
