"""Host kernels: the plain reference, and the checked wrapper around the compiled ones.

:func:`load` chooses between them and says why. Importing this package does neither.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING, Literal

from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.kernels.calls import HostKernels

_LOGGER = logging.getLogger(__name__)

REQUIRE_VARIABLE = "HEADRACE_REQUIRE_NATIVE"
_COST = (
    "the NumPy reference runs instead, with the same results but on one thread, which takes some "
    "9x as long as one thread of the compiled kernels (measured: 170 against 1,500 million "
    "parameters a second)"
)


def is_native_required() -> bool:
    """Whether the environment forbids falling back to the reference."""
    return os.environ.get(REQUIRE_VARIABLE, "").lower() not in {"", "0", "false", "no", "off"}


@cache
def load(backend: Literal["auto", "native", "reference"] = "auto") -> HostKernels:
    """Choose the backend of the host kernels, and log which and why; once a process.

    Args:
        backend: ``native`` (compiled), ``reference`` (NumPy), or ``auto``: native where it was
            built, else the reference with a warning that says what it costs.

    Raises:
        ConfigError: ``backend`` is none of these.
        HeadraceError: The compiled kernels are missing and asked for, by ``backend`` or by
            ``HEADRACE_REQUIRE_NATIVE=1``.
    """
    if backend not in {"auto", "native", "reference"}:
        raise ConfigError(
            f"kernels backend {backend!r} is unknown", remedy="use auto, native or reference"
        )
    from headrace.kernels.calls import HostKernels  # noqa: PLC0415  numpy only when asked for

    if backend != "reference":
        try:
            from headrace.kernels.native import NativeBackend  # noqa: PLC0415  may be missing
        except ImportError as error:
            if backend == "native" or is_native_required():
                raise HeadraceError(
                    f"the compiled host kernels are asked for and not there: {error}",
                    remedy="install headrace with a C++ compiler at hand, or leave the choice open",
                ) from error
            _LOGGER.warning("no compiled host kernels: %s. %s", _COST, error)
        else:
            native = NativeBackend()
            _LOGGER.info("host kernels: native, %s", native.instruction_set)
            return HostKernels(native)
    from headrace.kernels.reference import ReferenceBackend  # noqa: PLC0415  see above

    if backend == "reference":
        _LOGGER.info("host kernels: reference, as asked")
    return HostKernels(ReferenceBackend())


def num_usable_cores() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0))
