"""What a step that runs out of memory means: tried again once, or the reason and what to change.

The invariants: a step is tried again only if nothing of it was applied, so that the result is that
of smaller waves, to rounding; a second failure ends the run. Reads and writes no files.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

import torch

from headrace.errors import CapacityError
from headrace.store.host_memory import host_memory
from headrace.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.batch import MicroBatch
    from headrace.engine import Engine, StepResult

_REMEDY = (
    "set engine.activations: recompute, lower per_device_train_batch_size or max_length, or lower "
    "engine.device_units"
)
_HOST_REMEDY = (
    "lower per_device_train_batch_size or max_length, set engine.activations: recompute or "
    "async_save: false, or give the run more memory"
)


def step_with_retry(
    engine: Engine,
    micro_batches: Sequence[MicroBatch],
    *,
    learning_rate: float,
    max_grad_norm: float | None,
    say: Callable[[str], None],
) -> StepResult:
    """``engine.step``; out of device memory it is tried again once, with smaller waves.

    Args:
        engine: runs the step.
        micro_batches: of the step.
        learning_rate: of the step.
        max_grad_norm: of the step.
        say: shows a line.

    Raises:
        CapacityError: memory ran out, and the step could not be tried again or failed again.
        HeadraceError: whatever else a step raises.
    """
    step = engine.state.optimizer_step + 1

    def attempt() -> StepResult | str:
        try:
            return engine.step(
                micro_batches, learning_rate=learning_rate, max_grad_norm=max_grad_norm
            )
        except torch.OutOfMemoryError as error:
            return _first_line(error)
        except (MemoryError, RuntimeError) as error:
            if not _is_host_memory(error):
                raise
            raise _host_memory_error(f"in update {step}", error, _HOST_REMEDY) from error

    result = attempt()
    if not isinstance(result, str):
        return result
    # Outside of the handler: its traceback held what the step had kept.
    gc.collect()
    size = engine.shrink_waves(len(micro_batches))
    if size is None:
        others = ", as other ranks are in the middle of it" if engine.ranks.size > 1 else ""
        raise CapacityError(
            f"the device ran out of memory in update {step}, which cannot be tried again{others}: "
            f"{result}",
            remedy=_REMEDY,
        )
    say(
        f"out of device memory in update {step} ({result}); trying it again, and going on, with "
        f"engine.micro_batches_per_wave: {size}"
    )
    result = attempt()
    if isinstance(result, str):
        raise CapacityError(
            f"the device ran out of memory in update {step}, also with "
            f"engine.micro_batches_per_wave: {size}: {result}",
            remedy=_REMEDY,
        )
    return result


@contextlib.contextmanager
def memory_told(what: str, remedy: str = _HOST_REMEDY) -> Iterator[None]:
    """Say of memory that runs out when it did, and what to change.

    Args:
        what: was being done, such as ``"while the run was prepared"``.
        remedy: what to change.

    Raises:
        CapacityError: memory of the host or of the device ran out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the device ran out of memory {what}: {_first_line(error)}", remedy=remedy
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not _is_host_memory(error):
            raise
        raise _host_memory_error(what, error, remedy) from error


def _is_host_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _host_memory_error(what: str, error: BaseException, remedy: str) -> CapacityError:
    return CapacityError(
        f"host memory ran out {what}: {_first_line(error)} ({host_memory().explain()})",
        remedy=remedy,
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class MemoryWatch:
    """Looks at the host's memory between steps: the kernel ends a run that needs more, silently."""

    WARN_BELOW = 0.03
    STOP_BELOW = 0.005

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False

    def shortage(self) -> CapacityError | None:
        """Why the run should save and end now, if it should; says once when that comes near."""
        memory = host_memory()
        limit = memory.override or memory.cgroup_limit or memory.total
        if memory.available >= self.WARN_BELOW * limit:
            return None
        left = f"{format_bytes(memory.available)} of {format_bytes(limit)} of host memory are left"
        if memory.available < self.STOP_BELOW * limit:
            return CapacityError(f"{left} ({memory.explain()})", remedy=_HOST_REMEDY)
        if not self._said:
            self._said = True
            self._say(
                f"{left}; below {self.STOP_BELOW:.1%} the run saves and ends ({_HOST_REMEDY})"
            )
        return None
