"""The tiny model of a self-test: weights at which every feature of the class shows, and batches.

Fresh weights are small: scores stay near zero, where soft caps, sinks and windows change nothing.
Here matrices keep the size of what they multiply, and norms, biases and scalars are moved off
their ones and zeros. Units and masters are those of an ordinary training run.

Shape legend: B rows, T positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from headrace.batch import IGNORE_INDEX, MicroBatch
from headrace.models.shrink import MAX_LAYERS, VOCAB, shrink
from headrace.models.structure import covering_prefix
from headrace.store.loading import initialise
from headrace.store.state import ModelState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.models.spec import ModelSpec
    from headrace.store.layout import ParamSpec
    from headrace.store.state import UnitState

MATRIX_GAIN = 0.7  # at 1, deep twins amplify float32 rounding to a hundredth of a percent
ROW_LENGTH = 14
CUTS = (4, 11)  # documents of 4, 7 and 3 tokens: within, across and after a window of 5


def tiny_config(spec: ModelSpec) -> Any:
    """The tiny configuration of a model: all its kinds of layers, small sizes."""
    return shrink(spec.config, covering_prefix(list(spec.parts.layers), MAX_LAYERS))


def filled_state(spec: ModelSpec, *, seed: int = 0) -> ModelState:
    """A float32 state of ``spec`` whose weights make every feature matter."""
    state = ModelState(spec.units, "float32")
    initialise(spec, state, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for unit in state.units:
        for param in unit.layout.params:
            unit.set_master(param, _value(spec, unit, param, generator))
    return state


def _value(
    spec: ModelSpec, unit: UnitState, param: ParamSpec, generator: torch.Generator
) -> torch.Tensor:
    noise: torch.Tensor = torch.randn(param.shape, generator=generator)
    if param.buffer:  # of any meaning: near what the class sets
        return unit.master(param) + 0.1 * noise
    if param.local_name.endswith("A_log"):
        # Fresh recurrences forget within a token; slow ones show what reaches whom, and do not
        # drown in the rounding of large exponents.
        return 0.2 * noise - 2.0
    if len(param.shape) < 2:
        return unit.master(param) + 0.2 * noise
    if param.adapter:  # beside the matrix, not in its place
        return 0.5 * noise / math.sqrt(param.shape[-1])
    if param.local_name == spec.embedding_name:
        return noise if not spec.tied else 0.5 * noise
    return MATRIX_GAIN * noise / math.sqrt(param.shape[-1])


def make_batch(ids_BT: torch.Tensor, *, cuts: Sequence[int] = (), first: int = 0) -> MicroBatch:
    """A micro-batch in which every row is cut into documents at the same positions.

    Args:
        ids_BT: token ids.
        cuts: positions at which a document starts.
        first: positions before it have no target.
    """
    B, T = ids_BT.shape
    targets_BT = torch.roll(ids_BT, -1, 1)
    positions_T = torch.arange(T)
    for cut in cuts:
        positions_T[cut:] = torch.arange(T - cut)
        targets_BT[:, cut - 1] = IGNORE_INDEX
    targets_BT[:, -1] = IGNORE_INDEX
    targets_BT[:, :first] = IGNORE_INDEX
    bounds = [row * T + cut for row in range(B) for cut in (0, *cuts)]
    return MicroBatch(
        input_ids_BT=ids_BT,
        targets_BT=targets_BT,
        position_ids_BT=positions_T.expand(B, T).clone(),
        cu_seqlens=torch.tensor([*bounds, B * T], dtype=torch.int32) if cuts else None,
    )


def make_batches(
    num: int, *, cuts: Sequence[int] = (), vocab_size: int = VOCAB, seed: int = 0
) -> list[MicroBatch]:
    """Micro-batches of two rows of random tokens; the first has fewer targets than the others."""
    generator = torch.Generator().manual_seed(seed)
    return [
        make_batch(
            torch.randint(0, vocab_size, (2, ROW_LENGTH), generator=generator),
            cuts=cuts,
            first=5 if number == 0 else 0,
        )
        for number in range(num)
    ]
