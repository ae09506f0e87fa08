"""Dropout whose mask is a function of where an element is, so that it can be drawn again.

Owns the mask and its seeds. Invariant: an element is dropped by the seed of the run, the optimizer
step, the layer, its row in the global batch, its place in the row and the module's name, and by
nothing else. Forward and recompute, every schedule and every cut of a batch into micro-batches
therefore drop the same elements. Integers of torch alone, which a compiler fuses with what is
around them; no generator's state is read.

Shape legend: L layers, R rows of a step's batch, B rows of a micro-batch, M elements of a row.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from headrace.errors import ModelRefusedError

if TYPE_CHECKING:
    from torch import Tensor

_SEEDS = "row_seeds_B"
# Multipliers that hash-prospector found for words of 32 bits (github.com/skeeto/hash-prospector).
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


class SeededDropout(nn.Module):
    """Dropout by the seeds that are bound for a call; the identity when none are."""

    def __init__(self, probability: float, name: str) -> None:
        """Drop with ``probability``, above 0 and below 1; ``name`` tells masks of a layer apart."""
        super().__init__()
        self.probability = probability
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.salt = int.from_bytes(digest, "little", signed=True)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """``input``, its dropped elements zero and the others divided by ``1 - probability``.

        Args:
            input: ``(B, ...)``, or the same with rows and positions flattened.

        Raises:
            ModelRefusedError: it is no whole number of elements a row.
        """
        # Bound for a call, never set otherwise.
        seeds_B = getattr(self, _SEEDS, None)
        if seeds_B is None:
            return input
        num_rows = seeds_B.shape[0]
        if input.numel() % num_rows:
            raise ModelRefusedError(
                f"a linear layer with an adapter is called with {input.numel()} values for "
                f"{num_rows} rows, so that dropout cannot tell which row one belongs to",
                remedy="lora_dropout: 0, or leave the layer out of lora_target_modules",
            )
        kept_BM = kept_elements(
            seeds_B ^ self.salt, input.numel() // num_rows, probability=self.probability
        )
        scaled = input * (1.0 / (1.0 - self.probability))
        return torch.where(kept_BM.view(input.shape), scaled, 0.0)

    def extra_repr(self) -> str:
        """What torch prints of it."""
        return f"p={self.probability}"


def kept_elements(seeds_B: Tensor, num_elements: int, *, probability: float) -> Tensor:
    """Which elements of each row stay, bool ``(B, M)``.

    A row's counter goes through a hash of 32 bits: three multiplications, the upper half of the
    seed mixed in after the first, so that rows whose lower halves are close share no sequence. It
    repeats after 2^32 elements.

    Args:
        seeds_B: int64, all bits random.
        num_elements: M.
        probability: of dropping one.
    """
    # Torch's integers wrap on conversion, sum and product, as a twin in numpy confirms.
    low_B1, high_B1 = (half.to(torch.int32)[:, None] for half in (seeds_B, seeds_B >> 32))
    hash_BM = torch.arange(num_elements, device=seeds_B.device).to(torch.int32) + low_B1
    hash_BM = _folded(_folded(hash_BM, 16).mul_(_FIRST), 15)
    hash_BM ^= high_B1
    hash_BM = _folded(_folded(hash_BM, 16).mul_(_SECOND), 15)
    hash_BM = _folded(hash_BM.mul_(_FIRST), 15)
    return hash_BM >= min(round(probability * 2**32) - 2**31, 2**31 - 1)


def _folded(words: Tensor, by: int) -> Tensor:
    """``words ^ (words >> by)`` with zeros shifted in; in place, for what no compiler fuses."""
    shifted = words >> by
    shifted &= (1 << (32 - by)) - 1
    shifted ^= words
    return shifted


def draw_seeds(seed: int, step: int, *, num_layers: int, num_rows: int) -> Tensor:
    """A seed for every layer and row of a step, int64 ``(L, R)`` on the CPU.

    A row's seeds do not depend on how many rows there are.

    Args:
        seed: of the run.
        step: the optimizer step, from 1.
        num_layers: L.
        num_rows: R.
    """
    key = np.array([seed % 2**64, step], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(num_rows * num_layers)
    seeds_RL = torch.from_numpy(raw.view(np.int64).reshape(num_rows, num_layers))
    return seeds_RL.T.contiguous()


def seed_names(module: nn.Module) -> tuple[str, ...]:
    """What to bind to the seeds ``(B,)`` of a micro-batch's rows so that ``module`` drops."""
    return tuple(
        f"{path}.{_SEEDS}"
        for path, part in module.named_modules()
        if isinstance(part, SeededDropout)
    )
