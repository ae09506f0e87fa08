"""The host kernels in plain NumPy: the definition of every bit the compiled ones produce.

Legend: all arrays are flat and of one length n; ``bits`` are fp32 values seen as int32.

Invariant: element i of a result depends on element i of the inputs and on the coefficients
alone, through correctly rounded fp32 operations in the order written here. Chunking, threads and
instruction sets therefore cannot change it. Speed is not its business: it makes a dozen passes
and runs on one thread.

The order of operations, with g the scaled gradient and u the bias-corrected direction::

    g          = grad * grad_scale
    exp_avg    = exp_avg + (1 - beta1) * (g - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + ((1 - beta2) * g) * g
    u          = exp_avg / (sqrt(exp_avg_sq) * (1 / sqrt(1 - beta2^step)) + eps)
    weight     = weight - (learning_rate / (1 - beta1^step) * u + learning_rate * decay * weight)

These are the formulas of ``torch.optim.AdamW``. Two roundings differ from it, both to be more
exact: the root is multiplied by the reciprocal of the bias correction, and step and decay are
added before either meets the weight, so that the master is rounded once (torch multiplies by
1 - lr * decay, which at lr * decay = 1e-6 is off by 1.3% of the decay). Moments below the
smallest normal fp32 number are stored as +0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.kernels.calls import HostKernels
from headrace.kernels.headroom import Operation, Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.kernels.arrays import Arrays
    from headrace.kernels.coefficients import Coefficients
    from headrace.kernels.headroom import Limits

    Float32 = NDArray[np.float32]

_CHUNK = 1 << 18  # elements a pass, which bounds the temporaries
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SMALLEST_NORMAL = np.int32(0x00800000)
_FIRST_INFINITE_HI = np.int32(0x7F7F8000)  # rounds away to 0x7f80, infinity


class Pool:
    """Stands where the compiled pool of threads stands; the reference runs on the caller's."""

    def __init__(self, num_threads: int) -> None:
        if not 1 <= num_threads <= 1024:
            raise ValueError(f"num_threads is {num_threads}; a pool has 1 to 1024 threads")
        self.num_threads = num_threads

    def close(self) -> None:
        """Nothing to end."""


def split_bits(value: Float32) -> tuple[NDArray[np.uint16], NDArray[np.int16]]:
    """The planes of fp32 values: ``hi`` rounds half away from zero, ``lo`` is what remains."""
    bits = value.view(np.uint32)
    hi = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    lo = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)
    return hi, lo


def join_bits(hi: NDArray[np.uint16], lo: NDArray[np.int16]) -> Float32:
    """The fp32 values of two planes, ``(hi << 16) + lo`` on the bits, for every bit pattern."""
    bits = (hi.astype(np.uint32) << np.uint32(16)) + lo.astype(np.int32).view(np.uint32)
    return bits.view(np.float32)


def widen(grad: NDArray[Any]) -> Float32:
    """Gradients as fp32; uint16 holds bf16 bits."""
    if grad.dtype == np.uint16:
        return (grad.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return grad


def _flushed(moment: Float32) -> Float32:
    below = (moment.view(np.int32) & _MAGNITUDE) < _SMALLEST_NORMAL
    return np.where(below, np.float32(0), moment)


def _direction(exp_avg: Float32, exp_avg_sq: Float32, c: Coefficients) -> Float32:
    return exp_avg / (np.sqrt(exp_avg_sq) * c.inverse_correction2 + c.eps)


def updated(
    weight: Float32, exp_avg: Float32, exp_avg_sq: Float32, grad: Float32, c: Coefficients
) -> tuple[Float32, Float32, Float32]:
    """Weight and moments after an AdamW step (arXiv:1711.05101, algorithm 2)."""
    grad = grad * c.grad_scale
    exp_avg = _flushed(exp_avg + c.one_minus_beta1 * (grad - exp_avg))
    exp_avg_sq = _flushed(c.beta2 * exp_avg_sq + (c.one_minus_beta2 * grad) * grad)
    step = c.step_size * _direction(exp_avg, exp_avg_sq, c) + c.decay * weight
    return weight - step, exp_avg, exp_avg_sq


def inverted(
    weight: Float32, exp_avg: Float32, exp_avg_sq: Float32, grad: Float32, c: Coefficients
) -> tuple[Float32, Float32, Float32]:
    """Weight and moments before an AdamW step, from those after it, up to rounding."""
    grad = grad * c.grad_scale
    step = c.step_size * _direction(exp_avg, exp_avg_sq, c) + c.decay * weight
    first = _flushed(np.divide(exp_avg - c.one_minus_beta1 * grad, c.beta1))
    second: Float32 = np.divide(exp_avg_sq - (c.one_minus_beta2 * grad) * grad, c.beta2)
    second = _flushed(np.where(second < 0, np.float32(0), second))
    restored: Float32 = np.add(weight, step * c.inverse_keep)
    return restored, first, second


def corrected(
    weight: Float32, exp_avg: Float32, exp_avg_sq: Float32, grad: Float32, c: Coefficients
) -> tuple[Float32, Float32, Float32]:
    """Weight and moments as if the gradient had been scaled by ``scale`` from the start.

    The second moment is at least (1 - beta2) * scale^2 * grad^2, its exact lower bound: where
    rounding leaves less than that, steps of any size would follow.
    """
    first = _flushed(exp_avg + c.first_delta * grad)
    second = exp_avg_sq + (c.second_delta * grad) * grad
    floor = (c.second_floor * grad) * grad
    second = _flushed(np.where(second < floor, floor, second))
    difference = _direction(exp_avg, exp_avg_sq, c) - _direction(first, second, c)
    return weight + c.step_size * difference, first, second


_FORMULAS = {
    Operation.UPDATE: updated,
    Operation.INVERT: inverted,
    Operation.CORRECT: corrected,
}


def _is_beyond(values: Float32, limit: int) -> bool:
    return bool(np.any((values.view(np.int32) & _MAGNITUDE) > limit))


class ReferenceBackend:
    """The primitives behind :class:`~headrace.kernels.calls.HostKernels`, in NumPy."""

    name = "reference"
    instruction_set = "numpy"

    def make_pool(self, num_threads: int) -> Pool:
        """A pool of this backend."""
        return Pool(num_threads)

    def apply(
        self,
        operation: Operation,
        arrays: Arrays,
        c: Coefficients,
        limits: Limits,
        *,
        store: Store,
        pool: object,
    ) -> bool:
        """Evaluate, and store what is asked. Returns whether a result is beyond the limits."""
        del pool
        beyond = False
        for begin in range(0, len(arrays.grad), _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            if arrays.weight is not None:
                weight = arrays.weight[chunk]
            else:
                assert arrays.hi is not None
                assert arrays.lo is not None
                weight = join_bits(arrays.hi[chunk], arrays.lo[chunk])
            with np.errstate(all="ignore"):
                weight, exp_avg, exp_avg_sq = _FORMULAS[operation](
                    weight,
                    arrays.exp_avg[chunk],
                    arrays.exp_avg_sq[chunk],
                    widen(arrays.grad[chunk]),
                    c,
                )
            if store != Store.MOMENTS:
                beyond |= _is_beyond(weight, limits.weight)
            beyond |= _is_beyond(exp_avg, limits.exp_avg)
            beyond |= _is_beyond(exp_avg_sq, limits.exp_avg_sq)
            if store in (Store.EVERYTHING, Store.MOMENTS):
                arrays.exp_avg[chunk] = exp_avg
                arrays.exp_avg_sq[chunk] = exp_avg_sq
            if store in (Store.EVERYTHING, Store.WEIGHTS):
                if arrays.weight is not None:
                    arrays.weight[chunk] = weight
                else:
                    assert arrays.hi is not None
                    assert arrays.lo is not None
                    arrays.hi[chunk], arrays.lo[chunk] = split_bits(weight)
        return beyond

    def largest(self, grad: NDArray[Any], pool: object) -> float:
        """The largest magnitude; NaN if there is one, else infinity if there is one."""
        del pool
        largest = np.int32(0)
        for begin in range(0, len(grad), _CHUNK):
            bits = widen(grad[begin : begin + _CHUNK]).view(np.int32) & _MAGNITUDE
            largest = max(largest, bits.max())
        return float(np.int32(largest).view(np.float32))

    def split(
        self,
        value: Float32,
        hi: NDArray[np.uint16],
        lo: NDArray[np.int16],
        *,
        store: bool,
        pool: object,
    ) -> bool:
        """Whether every ``hi`` is finite; stores the planes when asked."""
        del pool
        finite = True
        for begin in range(0, len(value), _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            if store:
                hi[chunk], lo[chunk] = split_bits(value[chunk])
            else:
                finite &= not _is_beyond(value[chunk], int(_FIRST_INFINITE_HI) - 1)
        return finite

    def join(
        self, hi: NDArray[np.uint16], lo: NDArray[np.int16], out: Float32, pool: object
    ) -> None:
        """Join the planes into ``out``."""
        del pool
        for begin in range(0, len(out), _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            out[chunk] = join_bits(hi[chunk], lo[chunk])

    def touch(self, data: NDArray[np.uint8], pool: object) -> None:
        """Write one byte of every page."""
        del pool
        data[::4096] = 0


_KERNELS = HostKernels(ReferenceBackend())
adamw_split = _KERNELS.adamw_split
adamw_float32 = _KERNELS.adamw_float32
invert_split = _KERNELS.invert_split
invert_float32 = _KERNELS.invert_float32
correct_split = _KERNELS.correct_split
correct_float32 = _KERNELS.correct_float32
split_float32 = _KERNELS.split_float32
join_float32 = _KERNELS.join_float32
touch = _KERNELS.touch
