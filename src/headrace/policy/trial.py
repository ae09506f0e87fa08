"""A few real steps of a choice: what it takes in truth, before a run relies on it.

Invariant: weights are random, tokens too, and everything that was allocated is given back. Random
weights clip at every step, the case in which nothing can be updated before the norm is known.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from headrace.batch import IGNORE_INDEX, MicroBatch
from headrace.engine import Engine
from headrace.errors import CapacityError
from headrace.policy.steptime import StepTime
from headrace.store.state import ModelState

if TYPE_CHECKING:
    from headrace.engine.config import AdamWConfig
    from headrace.models.spec import ModelSpec
    from headrace.policy.budget import Workload
    from headrace.policy.search import Choice
    from headrace.store.state import StateDtype, UnitState

WARM_UP = 2  # the first compiles, the second is the first with updates to wait for
_LEARNING_RATE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the steps of a choice took.

    Attributes:
        seconds: median step; None when memory ran out.
        binding: the lane that compute waited for most, or compute.
        device_bytes: peak of the device; None on the CPU.
        error: why there is no figure.
    """

    seconds: float | None
    binding: str | None = None
    device_bytes: int | None = None
    error: str | None = None


def try_steps(
    spec: ModelSpec,
    choice: Choice,
    dtype: StateDtype,
    workload: Workload,
    *,
    device: torch.device,
    optimizer: AdamWConfig,
    max_grad_norm: float | None,
    steps: int,
) -> Trial:
    """Run ``WARM_UP`` and then ``steps`` steps of ``choice``.

    Args:
        spec: the model.
        choice: complete settings.
        dtype: of the state.
        workload: of a step, as the loader gives it.
        device: where compute runs.
        optimizer: the run's.
        max_grad_norm: the run's.
        steps: that count.
    """
    cuda = device.type == "cuda"

    def timed() -> Trial:
        generator = torch.Generator().manual_seed(0)
        state = ModelState(
            spec.units, dtype, device=device, device_units=choice.config.device_units or 0
        )
        try:
            fill_randomly(state, generator)
            batches = [_batch(spec, workload, generator) for _ in range(workload.micro_batches)]
            seconds, exposed = [], dict[str, float]()
            with Engine(spec, state, device, choice.config, optimizer) as engine:
                for number in range(WARM_UP + steps):
                    begun = time.perf_counter()
                    result = engine.step(
                        batches, learning_rate=_LEARNING_RATE, max_grad_norm=max_grad_norm
                    )
                    if number >= WARM_UP:
                        seconds.append(time.perf_counter() - begun)
                        exposed = result.exposed_seconds
                engine.synchronize()
        finally:
            state.close()
        time_of_step = median(seconds)
        observed = StepTime(seconds=time_of_step, compute=0.0, exposed=exposed)
        peak = torch.cuda.max_memory_allocated(device) if cuda else None
        return Trial(seconds=time_of_step, binding=observed.binding, device_bytes=peak)

    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        trial = timed()
    except (torch.OutOfMemoryError, CapacityError) as error:
        trial = Trial(seconds=None, error=str(error).splitlines()[0])
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return trial


def fill_randomly(state: ModelState, generator: torch.Generator) -> None:
    """Normal matrices of std 0.02, vectors of ones; units of equal shapes are alike."""
    seen: dict[tuple[tuple[int, ...], ...], UnitState] = {}
    for unit in state.units:
        shapes = tuple(tuple(param.shape) for param in unit.layout.params)
        if shapes in seen:
            unit.weights.copy_(seen[shapes].weights)
            continue
        seen[shapes] = unit
        for param in unit.layout.params:
            values = torch.ones(param.shape)
            if len(param.shape) >= 2:
                values.normal_(0.0, 0.02, generator=generator)
            unit.set_master(param, values)


def _batch(spec: ModelSpec, workload: Workload, generator: torch.Generator) -> MicroBatch:
    shape = (workload.rows, workload.tokens // workload.rows)
    ids_BT = torch.randint(0, spec.vocab_size, shape, generator=generator)
    targets_BT = torch.roll(ids_BT, -1, 1)
    targets_BT[:, -1] = IGNORE_INDEX
    return MicroBatch(
        input_ids_BT=ids_BT,
        targets_BT=targets_BT,
        position_ids_BT=torch.arange(shape[1]).expand(shape).clone(),
    )
