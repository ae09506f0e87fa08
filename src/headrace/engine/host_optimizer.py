"""AdamW on chunks of the host state: parameter groups, and what each kernel call needs to know.

Invariants: a chunk lies in one parameter group and in this rank's shard; it is updated as a whole
or, when refused, not at all. Not thread-safe: the update lane is the only caller.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import NumericsError
from headrace.kernels.headroom import Headroom, Store
from headrace.store.layout import Grid, plan_segments
from headrace.store.ranges import norm_grids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.engine.config import AdamWConfig
    from headrace.kernels.calls import HostKernels
    from headrace.store.layout import ParamSpec
    from headrace.store.sections import Section
    from headrace.store.state import ModelState


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """What one optimizer step uses everywhere.

    Attributes:
        step: t of the bias correction, 1 for the first update.
        learning_rate: before group scales.
        gradient_scale: the clipping coefficient c, at most 1.
        largest_gradient: a bound on every gradient element before scaling, such as the norm;
            None makes each call look for itself.
    """

    step: int
    learning_rate: float
    gradient_scale: float = 1.0
    largest_gradient: float | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a unit's gradient: what returns, and is updated, on its own.

    Attributes:
        unit: which unit.
        index: position among the unit's chunks.
        start: first element, counted through the whole unit.
        stop: element after the last.
        group: parameter group.
        grid: on which it was cut.
    """

    unit: int
    index: int
    start: int
    stop: int
    group: int
    grid: Grid


class HostOptimizer:
    """Applies, inverts and corrects updates of chunks."""

    def __init__(
        self,
        state: ModelState,
        optimizer: AdamWConfig,
        kernels: HostKernels,
        *,
        num_threads: int,
        chunk_elements: int,
        sections: Sequence[tuple[Section, ...]],
    ) -> None:
        """Plan the chunks, cut at multiples of ``chunk_elements``; start the kernels' threads.

        Chunks and blocks of norms do not reach over ``sections`` of a unit.
        """
        self._state = state
        self._optimizer = optimizer
        split = state.dtype == "bfloat16"
        self._update = kernels.adamw_split if split else kernels.adamw_float32
        self._invert = kernels.invert_split if split else kernels.invert_float32
        self._correct = kernels.correct_split if split else kernels.correct_float32
        self._pool = kernels.Pool(num_threads)
        self.segments = [
            plan_segments(layout, self._group_of, norm_grids(layout, parts))
            for layout, parts in zip(state.layouts, sections, strict=True)
        ]
        self.chunks: list[list[Chunk]] = []
        self._places: dict[Chunk, slice] = {}
        for unit, segments in enumerate(self.segments):
            chunks: list[Chunk] = []
            starts = [segment.start for segment in segments]
            for part in state.shards[unit].trained_parts:
                reached = bisect.bisect_right(starts, part.start) - 1
                for segment in segments[reached : bisect.bisect_left(starts, part.stop)]:
                    first, last = max(segment.start, part.start), min(segment.stop, part.stop)
                    for start, stop in segment.grid.split(first, last, chunk_elements):
                        chunk = Chunk(unit, len(chunks), start, stop, segment.group, segment.grid)
                        at = part.at + start - part.start
                        self._places[chunk] = slice(at, at + stop - start)
                        chunks.append(chunk)
            self.chunks.append(chunks)
        self._headroom = {chunk: Headroom() for unit in self.chunks for chunk in unit}

    def close(self) -> None:
        """End the kernels' threads."""
        self._pool.close()

    def update(
        self,
        chunk: Chunk,
        gradient: NDArray[Any],
        settings: UpdateSettings,
        store: Store = Store.EVERYTHING,
    ) -> bool:
        """AdamW on a chunk; False if it was refused (a non-finite value)."""
        return self._call(
            self._update, chunk, gradient, settings, grad_scale=settings.gradient_scale, store=store
        )

    def invert(self, chunk: Chunk, gradient: NDArray[Any], settings: UpdateSettings) -> bool:
        """Undo, up to rounding, the update just applied with the same arguments."""
        return self._call(
            self._invert, chunk, gradient, settings, grad_scale=settings.gradient_scale
        )

    def correct(
        self, chunk: Chunk, gradient: NDArray[Any], settings: UpdateSettings, applied_scale: float
    ) -> bool:
        """Turn an update applied with ``applied_scale`` into one with the settings' scale."""
        return self._call(
            self._correct,
            chunk,
            gradient,
            settings,
            applied_scale=applied_scale,
            scale=settings.gradient_scale,
        )

    def refusal(self, chunk: Chunk) -> NumericsError:
        """The error for a chunk that was refused although its gradient is finite."""
        layout = self._state.layouts[chunk.unit]
        name = next(p.name for p in reversed(layout.params) if p.offset <= chunk.start)
        return NumericsError(
            f"the update at {name} would leave the range of its type; it was not applied",
            remedy="resume from the last checkpoint with a lower learning_rate",
        )

    def _call(
        self,
        kernel: Any,
        chunk: Chunk,
        gradient: NDArray[Any],
        settings: UpdateSettings,
        **how: Any,
    ) -> bool:
        planes = self._state.units[chunk.unit].arrays
        assert planes is not None, "a unit on the device was given to the host"
        self._state.before_update(chunk.unit)
        elements = self.own(chunk)
        factors = self.factors(chunk, settings)
        applied: bool = kernel(
            *(plane[elements] for plane in planes.master),
            planes.exp_avg[elements],
            planes.exp_avg_sq[elements],
            gradient[elements],
            **factors,
            pool=self._pool,
            headroom=self._headroom[chunk],
            largest_grad=settings.largest_gradient,
            **how,
        )
        return applied

    def own(self, chunk: Chunk) -> slice:
        """Where a chunk lies in this rank's planes."""
        return self._places[chunk]

    def factors(self, chunk: Chunk, settings: UpdateSettings) -> dict[str, Any]:
        """What AdamW takes for a chunk besides arrays and scales: its group's settings."""
        learning_rate_scale, decay = self._group_settings(chunk.group)
        return {
            "step": settings.step,
            "learning_rate": settings.learning_rate * learning_rate_scale,
            "beta1": self._optimizer.beta1,
            "beta2": self._optimizer.beta2,
            "eps": self._optimizer.eps,
            "weight_decay": decay,
        }

    def _group_of(self, param: ParamSpec) -> int:
        matrix = len(param.shape) >= 2
        groups = self._optimizer.groups
        for index, group in enumerate(groups):
            if re.search(group.pattern, param.name):
                return 2 * index + matrix
        return 2 * len(groups) + matrix

    def _group_settings(self, group: int) -> tuple[float, float]:
        """Learning-rate scale and weight decay of a segment's group."""
        index, matrix = divmod(group, 2)
        scale, decay = 1.0, self._optimizer.weight_decay if matrix else 0.0
        if index < len(self._optimizer.groups):
            overrides = self._optimizer.groups[index]
            scale = overrides.learning_rate_scale
            if overrides.weight_decay is not None:
                decay = overrides.weight_decay
        return scale, decay
