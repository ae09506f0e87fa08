"""Targets of a ridge that are held in memory, for tests of the solver alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class ArrayTargets:
    """``values`` is ``(n, M)``; no features move with them."""

    values: np.ndarray
    num_features: int = 0

    @property
    def num_columns(self) -> int:
        """M."""
        return self.values.shape[1]

    def block(self, rows: np.ndarray, columns: slice) -> np.ndarray:
        """``(1, n, M)``."""
        return self.values[rows, columns][None]
