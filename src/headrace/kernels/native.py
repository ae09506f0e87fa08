"""The compiled host kernels: choice of the instruction set, and the checked calls.

Invariant: bitwise the results of ``reference.py``, whatever the instruction set, the number of
threads and the split into chunks. Importing this module without the compiled one raises; use
:func:`headrace.kernels.load` to fall back to the reference.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.kernels.calls import HostKernels

try:
    from headrace.kernels import _native
except ImportError as error:
    raise ImportError(
        "the compiled host kernels (headrace.kernels._native) are not installed: this headrace "
        "was built without a C++ compiler, or is run from a source tree that was not built. "
        "Install a C++17 compiler and run 'pip install --force-reinstall --no-deps headrace' "
        "(in a clone: 'pip install -e .')"
    ) from error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.kernels.arrays import Arrays
    from headrace.kernels.coefficients import Coefficients
    from headrace.kernels.headroom import Limits, Operation, Store

Pool = _native.Pool

ISA_VARIABLE = "HEADRACE_ISA"


def instruction_sets() -> list[str]:
    """The instruction sets of this build that this processor runs, narrowest first."""
    return _native.instruction_sets()


class NativeBackend:
    """The primitives behind :class:`~headrace.kernels.calls.HostKernels`, compiled.

    Args:
        instruction_set: One of :func:`instruction_sets`; by default what the environment variable
            ``HEADRACE_ISA`` names when the first call is made, else the widest.
    """

    name = "native"

    def __init__(self, instruction_set: str | None = None) -> None:
        self._instruction_set = instruction_set and _checked(instruction_set, "instruction_set")

    @property
    def instruction_set(self) -> str:
        """What runs the loops."""
        if not self._instruction_set:
            wanted = os.environ.get(ISA_VARIABLE)
            self._instruction_set = (
                _checked(wanted, ISA_VARIABLE) if wanted else instruction_sets()[-1]
            )
        return self._instruction_set

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
        pool: Any,
    ) -> bool:
        """Evaluate, and store what is asked; whether any result is beyond the limits."""
        # One after the other: isa, operation, store, the master's planes, the rest.
        rest = (
            arrays.exp_avg, arrays.exp_avg_sq, arrays.grad, c.packed,
            limits.weight, limits.exp_avg, limits.exp_avg_sq, pool,
        )  # fmt: skip
        isa, number = self.instruction_set, int(operation)
        if arrays.weight is not None:
            return _native.apply_float32(isa, number, int(store), arrays.weight, *rest)
        assert arrays.hi is not None
        assert arrays.lo is not None
        return _native.apply_split(isa, number, int(store), arrays.hi, arrays.lo, *rest)

    def largest(self, grad: NDArray[Any], pool: Any) -> float:
        """The largest magnitude; NaN if there is one, else infinity if there is one."""
        return _native.largest(self.instruction_set, grad, pool)

    def split(
        self,
        value: NDArray[np.float32],
        hi: NDArray[np.uint16],
        lo: NDArray[np.int16],
        *,
        store: bool,
        pool: Any,
    ) -> bool:
        """Whether every ``hi`` is finite; stores the planes when asked."""
        return _native.split(self.instruction_set, value, hi, lo, store, pool)

    def join(
        self,
        hi: NDArray[np.uint16],
        lo: NDArray[np.int16],
        out: NDArray[np.float32],
        pool: Any,
    ) -> None:
        """Join the planes into ``out``."""
        _native.join(self.instruction_set, hi, lo, out, pool)

    def touch(self, data: NDArray[np.uint8], pool: Any) -> None:
        """Write one byte of every page."""
        _native.touch(data, pool)


def _checked(name: str, source: str) -> str:
    usable = instruction_sets()
    if name not in usable:
        raise ConfigError(
            f"{source} asks for {name!r}; this build and processor have {', '.join(usable)}",
            remedy=f"unset {ISA_VARIABLE} to use the widest",
        )
    return name


_KERNELS = HostKernels(NativeBackend())
adamw_split = _KERNELS.adamw_split
adamw_float32 = _KERNELS.adamw_float32
invert_split = _KERNELS.invert_split
invert_float32 = _KERNELS.invert_float32
correct_split = _KERNELS.correct_split
correct_float32 = _KERNELS.correct_float32
split_float32 = _KERNELS.split_float32
join_float32 = _KERNELS.join_float32
touch = _KERNELS.touch
