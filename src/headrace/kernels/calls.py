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

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrace.errors import NumericsError
from headrace.kernels.coefficients import Coefficients, coefficients
from headrace.kernels.headroom import (
    AMPLE,
    FINITE,
    FINITE_SPLIT,
    Headroom,
    Limits,
    Operation,
    results_stay_finite,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]
    UInt16 = NDArray[np.uint16]
    Int16 = NDArray[np.int16]


class PoolLike(Protocol):
    """A set of threads of a backend."""

    @property
    def num_threads(self) -> int:
        """Threads that work at once, the caller's included."""

    def close(self) -> None:
        """End the threads."""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """The flat arrays of one call, all of length n: either ``hi`` and ``lo`` or ``weight``."""

    hi: UInt16 | None = None
    lo: Int16 | None = None
    weight: Float32 | None = None
    exp_avg: Float32
    exp_avg_sq: Float32
    grad: NDArray[Any]
    """uint16 (bf16 bits) or float32."""


class Backend(Protocol):
    """What a backend does with arrays that have been checked."""

    @property
    def name(self) -> str:
        """``native`` or ``reference``."""

    @property
    def instruction_set(self) -> str:
        """What runs the loops."""

    def make_pool(self, num_threads: int) -> PoolLike:
        """A pool of this backend."""

    def apply(
        self,
        operation: Operation,
        arrays: Arrays,
        c: Coefficients,
        limits: Limits,
        *,
        store: bool,
        pool: Any,
    ) -> bool:
        """Evaluate, and store when asked; whether any result is beyond the limits."""

    def largest(self, grad: NDArray[Any], pool: Any) -> float:
        """The largest magnitude; NaN if there is one, else infinity if there is one."""

    def split(self, value: Float32, hi: UInt16, lo: Int16, *, store: bool, pool: Any) -> bool:
        """Whether every ``hi`` is finite; stores the planes when asked."""

    def join(self, hi: UInt16, lo: Int16, out: Float32, pool: Any) -> None:
        """Join the planes into ``out``."""

    def touch(self, data: NDArray[np.uint8], pool: Any) -> None:
        """Write one byte of every page."""


def _check(kinds: dict[str, tuple[Any, tuple[type, ...], bool]]) -> None:
    """Refuse arrays that a kernel would misread.

    Args:
        kinds: By name: the array, the element types allowed, whether it is written to.

    Raises:
        TypeError: Not an array, or of another element type.
        ValueError: Not flat, contiguous, aligned, writeable, of one length, or overlapping.
    """
    length: tuple[str, int] | None = None
    spans: list[tuple[int, int, str, bool]] = []
    for name, (array, types, is_written) in kinds.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is a {type(array).__name__}; the kernels take numpy arrays")
        if array.dtype.type not in types or not array.dtype.isnative:
            wanted = " or ".join(np.dtype(kind).name for kind in types)
            raise TypeError(f"{name} holds {array.dtype}; the kernels take {wanted}")
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} has shape {array.shape} and strides {array.strides}; the kernels take "
                "flat contiguous arrays, in place"
            )
        if not array.flags.aligned:
            raise ValueError(f"{name} does not start at a multiple of {array.itemsize} bytes")
        if is_written and not array.flags.writeable:
            raise ValueError(f"{name} is read-only and would be written to")
        if length is None:
            length = (name, len(array))
        elif length[1] != len(array):
            raise ValueError(
                f"{name} has {len(array)} elements and {length[0]} has {length[1]}; "
                "all arrays of a call belong to the same parameters"
            )
        address = array.__array_interface__["data"][0]
        spans.append((address, address + array.nbytes, name, is_written))
    spans.sort()
    for (_, end, name, is_written), (begin, _, other, other_written) in itertools.pairwise(spans):
        if begin < end and (is_written or other_written):
            raise ValueError(f"{name} and {other} overlap in memory")


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
        *,
        step: int,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        grad_scale: float = 1.0,
        pool: Any = None,
        headroom: Headroom | None = None,
        largest_grad: float | None = None,
    ) -> bool:
        """One AdamW step on a split master; the formulas are in ``reference.py``."""
        factors = coefficients(
            step=step, learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, grad_scale=grad_scale,
        )  # fmt: skip
        arrays = Arrays(hi=hi, lo=lo, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.UPDATE, arrays, factors, pool, headroom, largest_grad)

    def adamw_float32(
        self,
        weight: Float32,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        *,
        step: int,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        grad_scale: float = 1.0,
        pool: Any = None,
        headroom: Headroom | None = None,
        largest_grad: float | None = None,
    ) -> bool:
        """One AdamW step on a plain fp32 master; bitwise the values of :meth:`adamw_split`."""
        factors = coefficients(
            step=step, learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, grad_scale=grad_scale,
        )  # fmt: skip
        arrays = Arrays(weight=weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.UPDATE, arrays, factors, pool, headroom, largest_grad)

    def invert_split(
        self,
        hi: UInt16,
        lo: Int16,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        *,
        step: int,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        grad_scale: float = 1.0,
        pool: Any = None,
        headroom: Headroom | None = None,
        largest_grad: float | None = None,
    ) -> bool:
        """Undo, up to rounding, the update just applied with the same arguments."""
        factors = coefficients(
            step=step, learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, grad_scale=grad_scale,
        )  # fmt: skip
        arrays = Arrays(hi=hi, lo=lo, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.INVERT, arrays, factors, pool, headroom, largest_grad)

    def invert_float32(
        self,
        weight: Float32,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        *,
        step: int,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        grad_scale: float = 1.0,
        pool: Any = None,
        headroom: Headroom | None = None,
        largest_grad: float | None = None,
    ) -> bool:
        """Undo, up to rounding, the update just applied with the same arguments."""
        factors = coefficients(
            step=step, learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, grad_scale=grad_scale,
        )  # fmt: skip
        arrays = Arrays(weight=weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.INVERT, arrays, factors, pool, headroom, largest_grad)

    def correct_split(
        self,
        hi: UInt16,
        lo: Int16,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        *,
        step: int,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        applied_scale: float = 1.0,
        scale: float,
        pool: Any = None,
        headroom: Headroom | None = None,
        largest_grad: float | None = None,
    ) -> bool:
        """Turn an update applied with ``applied_scale`` into one applied with ``scale``."""
        factors = coefficients(
            step=step, learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, applied_scale=applied_scale, scale=scale,
        )  # fmt: skip
        arrays = Arrays(hi=hi, lo=lo, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.CORRECT, arrays, factors, pool, headroom, largest_grad)

    def correct_float32(
        self,
        weight: Float32,
        exp_avg: Float32,
        exp_avg_sq: Float32,
        grad: NDArray[Any],
        *,
        step: int,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        applied_scale: float = 1.0,
        scale: float,
        pool: Any = None,
        headroom: Headroom | None = None,
        largest_grad: float | None = None,
    ) -> bool:
        """Turn an update applied with ``applied_scale`` into one applied with ``scale``."""
        factors = coefficients(
            step=step, learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, applied_scale=applied_scale, scale=scale,
        )  # fmt: skip
        arrays = Arrays(weight=weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad)
        return self._call(Operation.CORRECT, arrays, factors, pool, headroom, largest_grad)

    def split_float32(self, value: Float32, hi: UInt16, lo: Int16, *, pool: Any = None) -> bool:
        """Store fp32 values as planes; False, with both untouched, if a ``hi`` is not finite.

        ``hi`` is the value rounded to bf16, half away from zero; ``(hi << 16) + lo`` gives back
        every bit. NaN, infinities and the 65,536 finite values that round to them are refused.
        """
        _check({
            "value": (value, (np.float32,), False),
            "hi": (hi, (np.uint16,), True),
            "lo": (lo, (np.int16,), True),
        })  # fmt: skip
        if not self.backend.split(value, hi, lo, store=False, pool=pool):
            return False
        return self.backend.split(value, hi, lo, store=True, pool=pool)

    def join_float32(self, hi: UInt16, lo: Int16, out: Float32, *, pool: Any = None) -> None:
        """Write the fp32 values of two planes to ``out``."""
        _check({
            "hi": (hi, (np.uint16,), False),
            "lo": (lo, (np.int16,), False),
            "out": (out, (np.float32,), True),
        })  # fmt: skip
        self.backend.join(hi, lo, out, pool)

    def touch(self, data: NDArray[np.uint8], *, pool: Any = None) -> None:
        """Have the system back every page of a fresh mapping; the contents are lost."""
        _check({"data": (data, (np.uint8,), True)})
        self.backend.touch(data, pool)

    def _call(
        self,
        operation: Operation,
        arrays: Arrays,
        c: Coefficients,
        pool: Any,
        headroom: Headroom | None,
        largest_grad: float | None,
    ) -> bool:
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
        _check(kinds)
        if len(arrays.grad) == 0:
            return True
        finite = FINITE if arrays.weight is not None else FINITE_SPLIT

        is_proved = False
        if headroom is not None and headroom.is_ample:
            largest = largest_grad
            if largest is None:
                largest = self.backend.largest(arrays.grad, pool)
                if not np.isfinite(largest):
                    return False
            is_proved = results_stay_finite(operation, c, largest)
        if not is_proved:
            largest_grad = None  # whatever was promised, the dry run has looked at everything
            if self.backend.apply(operation, arrays, c, finite, store=False, pool=pool):
                return False
        is_beyond = self.backend.apply(operation, arrays, c, AMPLE, store=True, pool=pool)
        if headroom is not None:
            headroom.is_ample = not is_beyond
        if is_beyond and largest_grad is not None:
            raise NumericsError(
                f"weights or moments left the range of {AMPLE} in a step whose gradient was said "
                f"to be at most {largest_grad:g}: the bound was wrong or training has diverged",
                remedy="resume from the last checkpoint with a lower learning rate",
            )
        return True
