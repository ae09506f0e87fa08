"""The calls that both backends offer: what is checked, in which order, before a store.

Invariant: a call either stores every result or, when a gradient or a result is not finite,
stores nothing and returns False. The decision is exact: False means that at least one new weight
(as the bf16 ``hi`` where the master is split), first or second moment would be infinite or NaN.
Does no arithmetic on elements; that is the backend's.

Cost of deciding, in bytes a parameter beside the 26 (split, bf16 gradient) that the update moves:
0 with an ample :class:`~headrace.kernels.headroom.Headroom` and a known ``largest_grad``; 2 with
the headroom alone (the gradient is scanned); 14 with neither (a dry run).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

import numpy as np

from headrace.errors import NumericsError
from headrace.kernels.arrays import Arrays, check_arrays
from headrace.kernels.coefficients import coefficients
from headrace.kernels.headroom import (
    AMPLE,
    FINITE,
    FINITE_SPLIT,
    Operation,
    Store,
    results_stay_finite,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.kernels.arrays import Backend, PoolLike
    from headrace.kernels.headroom import Headroom

    Float32 = NDArray[np.float32]
    UInt16 = NDArray[np.uint16]
    Int16 = NDArray[np.int16]


class _Options(TypedDict, total=False):
    step: Required[int]
    learning_rate: Required[float]
    beta1: Required[float]
    beta2: Required[float]
    eps: Required[float]
    weight_decay: Required[float]
    pool: Any
    headroom: Headroom | None
    largest_grad: float | None


class InvertOptions(_Options, total=False):
    """Keywords of a call that undoes an update; see :class:`HostKernels`."""

    grad_scale: float


class UpdateOptions(InvertOptions, total=False):
    """Keywords of an update."""

    store: Store


class CorrectOptions(_Options, total=False):
    """Keywords of a correction."""

    applied_scale: float
    scale: Required[float]


_KEYWORDS = {
    Operation.UPDATE: frozenset(UpdateOptions.__annotations__),
    Operation.INVERT: frozenset(InvertOptions.__annotations__),
    Operation.CORRECT: frozenset(CorrectOptions.__annotations__),
}


class HostKernels:
    """The optimizer's host kernels on one backend.

    All arrays are flat numpy arrays of one length n and change in place; they must not overlap.
    ``hi`` is uint16 (bf16 bits), ``lo`` int16, ``weight`` and the moments float32, ``grad``
    uint16 (bf16 bits) or float32. Calls from several threads that share a pool are served one
    after the other; without a pool a call runs on the caller's thread. The GIL is released.

    Common arguments of the calls on the state:

    * ``step``, ``learning_rate``, ``beta1``, ``beta2``, ``eps``, ``weight_decay``: see
      :func:`~headrace.kernels.coefficients.coefficients`.
    * ``pool``: a :meth:`Pool` of the same backend.
    * ``headroom``: what is known of this range of the state; spares the dry run.
    * ``largest_grad``: a bound on ``|grad|`` before scaling that the caller knows, such as its
      norm; spares the scan of the gradient. Wrong bounds are found after the fact and raise.
    * ``store`` (updates): ``WEIGHTS`` leaves the moments as they were, and ``MOMENTS`` with the
      same arguments follows it once, after a True: 18 bytes a parameter each instead of 26, the
      weights there sooner.

    Each returns True when it was applied and False when it was refused, with the state untouched.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __repr__(self) -> str:
        return f"HostKernels({self.backend.name}, {self.backend.instruction_set})"

    def Pool(self, num_threads: int) -> PoolLike:  # noqa: N802  the class of the backend's module
        """Threads for the calls below; the caller's is one of them. Close it when done.

        The threads inherit the processor affinity of the thread that makes the pool.

        Raises:
            ValueError: Not 1 to 1024 threads.
        """
        return self.backend.make_pool(num_threads)

    def adamw_split(
        self,
        hi: UInt16,
        lo: Int16,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        **options: Unpack[UpdateOptions],
    ) -> bool:
        """One AdamW step on a split master; the formulas are in ``reference.py``."""
        arrays = Arrays(hi=hi, lo=lo, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.UPDATE, arrays, options)

    def adamw_float32(
        self,
        weight: Float32,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        **options: Unpack[UpdateOptions],
    ) -> bool:
        """One AdamW step on a plain fp32 master; bitwise the values of :meth:`adamw_split`."""
        arrays = Arrays(weight=weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.UPDATE, arrays, options)

    def invert_split(
        self,
        hi: UInt16,
        lo: Int16,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        **options: Unpack[InvertOptions],
    ) -> bool:
        """Undo, up to rounding, the update just applied with the same arguments."""
        arrays = Arrays(hi=hi, lo=lo, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.INVERT, arrays, options)

    def invert_float32(
        self,
        weight: Float32,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        **options: Unpack[InvertOptions],
    ) -> bool:
        """Undo, up to rounding, the update just applied with the same arguments."""
        arrays = Arrays(weight=weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.INVERT, arrays, options)

    def correct_split(
        self,
        hi: UInt16,
        lo: Int16,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        **options: Unpack[CorrectOptions],
    ) -> bool:
        """Turn an update applied with ``applied_scale`` into one applied with ``scale``."""
        arrays = Arrays(hi=hi, lo=lo, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.CORRECT, arrays, options)

    def correct_float32(
        self,
        weight: Float32,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        **options: Unpack[CorrectOptions],
    ) -> bool:
        """Turn an update applied with ``applied_scale`` into one applied with ``scale``."""
        arrays = Arrays(weight=weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.CORRECT, arrays, options)

    def split_float32(self, value: Float32, hi: UInt16, lo: Int16, *, pool: Any = None) -> bool:
        """Store fp32 values as planes; False, with both untouched, if a ``hi`` is not finite.

        ``hi`` is the value rounded to bf16, half away from zero; ``(hi << 16) + lo`` gives back
        every bit. NaN, infinities and the 65,536 finite values that round to them are refused.
        """
        check_arrays({
            "value": (value, (np.float32,), False),
            "hi": (hi, (np.uint16,), True),
            "lo": (lo, (np.int16,), True),
        })  # fmt: skip
        if not self.backend.split(value, hi, lo, store=False, pool=pool):
            return False
        return self.backend.split(value, hi, lo, store=True, pool=pool)

    def join_float32(self, hi: UInt16, lo: Int16, out: Float32, *, pool: Any = None) -> None:
        """Write the fp32 values of two planes to ``out``."""
        check_arrays({
            "hi": (hi, (np.uint16,), False),
            "lo": (lo, (np.int16,), False),
            "out": (out, (np.float32,), True),
        })  # fmt: skip
        self.backend.join(hi, lo, out, pool)

    def touch(self, data: NDArray[np.uint8], *, pool: Any = None) -> None:
        """Have the system back every page of a fresh mapping; the contents are lost."""
        check_arrays({"data": (data, (np.uint8,), True)})
        self.backend.touch(data, pool)

    def _call(
        self, operation: Operation, arrays: Arrays, options: InvertOptions | CorrectOptions
    ) -> bool:
        factors: dict[str, Any] = dict(options)
        if unknown := factors.keys() - _KEYWORDS[operation]:
            raise TypeError(f"{operation.name.lower()} takes no {min(unknown)!r}")
        pool = factors.pop("pool", None)
        headroom: Headroom | None = factors.pop("headroom", None)
        largest_grad: float | None = factors.pop("largest_grad", None)
        store: Store = factors.pop("store", Store.EVERYTHING)
        c = coefficients(**factors)
        kinds: dict[str, tuple[Any, tuple[type, ...], bool]] = {
            "exp_avg": (arrays.exp_avg, (np.float32,), True),
            "exp_avg_sq": (arrays.exp_avg_sq, (np.float32,), True),
            "grad": (arrays.grad, (np.uint16, np.float32), False),
        }
        if arrays.weight is not None:
            kinds["weight"] = (arrays.weight, (np.float32,), True)
        else:
            kinds["hi"] = (arrays.hi, (np.uint16,), True)
            kinds["lo"] = (arrays.lo, (np.int16,), True)
        check_arrays(kinds)
        if len(arrays.grad) == 0:
            return True
        finite = FINITE if arrays.weight is not None else FINITE_SPLIT

        # Moments that are stored after their weights were looked at with them.
        is_proved = store == Store.MOMENTS
        if not is_proved and headroom is not None and headroom.is_ample:
            largest = largest_grad
            if largest is None:
                largest = self.backend.largest(arrays.grad, pool)
                if not np.isfinite(largest):
                    return False
            is_proved = results_stay_finite(operation, c, largest)
        if not is_proved:
            largest_grad = None  # whatever was promised, the dry run has looked at everything
            if self.backend.apply(operation, arrays, c, finite, store=Store.NOTHING, pool=pool):
                return False
        is_beyond = self.backend.apply(operation, arrays, c, AMPLE, store=store, pool=pool)
        if store == Store.MOMENTS:
            return True
        if headroom is not None:
            headroom.is_ample = not is_beyond
        if is_beyond and largest_grad is not None:
            raise NumericsError(
                f"weights or moments left the range of {AMPLE} in a step whose gradient was said "
                f"to be at most {largest_grad:g}: the bound was wrong or training has diverged",
                remedy="resume from the last checkpoint with a lower learning rate",
            )
        return True
