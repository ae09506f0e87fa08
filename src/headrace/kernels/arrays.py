"""What a call works on: its flat arrays, how they are checked, and what a backend offers.

Invariant: an array that passes :func:`check_arrays` can be handed to compiled code as it is. Does
no arithmetic.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.kernels.coefficients import Coefficients
    from headrace.kernels.headroom import Limits, Operation, Store

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
        store: Store,
        pool: Any,
    ) -> bool:
        """Evaluate, and store what is asked; whether any result is beyond the limits."""

    def largest(self, grad: NDArray[Any], pool: Any) -> float:
        """The largest magnitude; NaN if there is one, else infinity if there is one."""

    def split(self, value: Float32, hi: UInt16, lo: Int16, *, store: bool, pool: Any) -> bool:
        """Whether every ``hi`` is finite; stores the planes when asked."""

    def join(self, hi: UInt16, lo: Int16, out: Float32, pool: Any) -> None:
        """Join the planes into ``out``."""

    def touch(self, data: NDArray[np.uint8], pool: Any) -> None:
        """Write one byte of every page."""


def check_arrays(kinds: dict[str, tuple[Any, tuple[type, ...], bool]]) -> None:
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
