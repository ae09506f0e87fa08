# Types of the compiled module; csrc/module.cpp is its source.

from typing import Any

import numpy as np
from numpy.typing import NDArray

class Pool:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    def close(self) -> None: ...

def instruction_sets() -> list[str]: ...
def apply_split(
    isa: str,
    operation: int,
    store: int,
    hi: NDArray[np.uint16],
    lo: NDArray[np.int16],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    grad: NDArray[Any],
    packed: NDArray[np.float32],
    weight_limit: int,
    first_limit: int,
    second_limit: int,
    pool: Pool | None,
) -> bool: ...
def apply_float32(
    isa: str,
    operation: int,
    store: int,
    weight: NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    grad: NDArray[Any],
    packed: NDArray[np.float32],
    weight_limit: int,
    first_limit: int,
    second_limit: int,
    pool: Pool | None,
) -> bool: ...
def largest(isa: str, grad: NDArray[Any], pool: Pool | None) -> float: ...
def split(
    isa: str,
    value: NDArray[np.float32],
    hi: NDArray[np.uint16],
    lo: NDArray[np.int16],
    store: bool,
    pool: Pool | None,
) -> bool: ...
def join(
    isa: str,
    hi: NDArray[np.uint16],
    lo: NDArray[np.int16],
    out: NDArray[np.float32],
    pool: Pool | None,
) -> None: ...
def touch(data: NDArray[np.uint8], pool: Pool | None) -> None: ...
def copy_streaming(
    isa: str, source: NDArray[np.float32], target: NDArray[np.float32], pool: Pool | None
) -> None: ...
def negate(isa: str, values: NDArray[np.float32], pool: Pool | None) -> None: ...
