"""Random optimizer states for the tests of the kernels, with the values that go wrong."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from headrace.kernels import reference

HYPERPARAMETERS = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
}

# Zeros, subnormals, the smallest normals, ones, ties of the split, large but squarable.
SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000,
     0x80800000, 0x3F800000, 0xBF800000, 0x3F808000, 0xBF808000, 0x3F807FFF, 0x3F808001,
     0x00008000, 0x80008000, 0x5E000000, 0xDE000000, 0x1E000000, 0x33D6BF95],
    dtype=np.uint32,
).view(np.float32)  # fmt: skip


@dataclass
class Planes:
    """A state: the split master, or the plain one in ``weight``, and the moments."""

    hi: np.ndarray | None
    lo: np.ndarray | None
    weight: np.ndarray | None
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray

    @property
    def arrays(self) -> list[np.ndarray]:
        """In the order of the calls."""
        return [array for array in vars(self).values() if array is not None]

    @property
    def master(self) -> np.ndarray:
        """The weights as float32."""
        if self.weight is not None:
            return self.weight
        return reference.join_bits(self.hi, self.lo)

    def copy(self) -> Planes:
        return Planes(**{
            field.name: None if getattr(self, field.name) is None
            else getattr(self, field.name).copy()
            for field in fields(self)
        })  # fmt: skip

    def slice(self, part: slice) -> Planes:
        return Planes(**{
            field.name: None if getattr(self, field.name) is None
            else getattr(self, field.name)[part]
            for field in fields(self)
        })  # fmt: skip

    def same_bits(self, other: Planes) -> bool:
        return all(
            mine.tobytes() == yours.tobytes()
            for mine, yours in zip(self.arrays, other.arrays, strict=True)
        )

    def call(self, kernels: Any, operation: str, grad: np.ndarray, **arguments: Any) -> bool:
        """Call ``adamw``, ``invert`` or ``correct`` of ``kernels`` in place."""
        kind = "split" if self.weight is None else "float32"
        return getattr(kernels, f"{operation}_{kind}")(
            *self.arrays, grad, **{**HYPERPARAMETERS, **arguments}
        )


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Truncated to bf16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def make_planes(num: int, *, split: bool, seed: int = 0, special: bool = True) -> Planes:
    """Weights near 1, moments of a run in progress; special values spread over all of them."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(num).astype(np.float32)
    exp_avg = (1e-3 * rng.standard_normal(num)).astype(np.float32)
    exp_avg_sq = (1e-6 * rng.standard_exponential(num)).astype(np.float32)
    if special:
        for array in (weight, exp_avg, exp_avg_sq):
            where = rng.random(num) < 0.2
            array[where] = rng.choice(SPECIAL, int(where.sum()))
        np.abs(exp_avg_sq, out=exp_avg_sq)
    if not split:
        return Planes(None, None, weight, exp_avg, exp_avg_sq)
    return Planes(*reference.split_bits(weight), None, exp_avg, exp_avg_sq)


def make_grad(num: int, *, bfloat16: bool, seed: int = 1, special: bool = True) -> np.ndarray:
    """Gradients near 1e-3, bf16 bits or float32."""
    rng = np.random.default_rng(seed)
    grad = (1e-3 * rng.standard_normal(num)).astype(np.float32)
    if special:
        where = rng.random(num) < 0.2
        grad[where] = rng.choice(SPECIAL, int(where.sum()))
    return bf16_bits(grad) if bfloat16 else grad
