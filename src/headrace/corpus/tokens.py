"""Token ids of many texts as two arrays, the form in which encoders hand them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of all texts, one after the other (int32), and how many each text has (int64)."""

    ids: NDArray[np.int32]
    counts: NDArray[np.int64]

    @staticmethod
    def joined(ids: Sequence[NDArray[np.int32]]) -> Tokens:
        """From the ids of each text."""
        counts = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return Tokens(np.concatenate(ids) if ids else np.empty(0, np.int32), counts)

    def split(self) -> list[NDArray[np.int32]]:
        """The ids of each text."""
        return np.split(self.ids, np.cumsum(self.counts)[:-1]) if self.counts.size else []
