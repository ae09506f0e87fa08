"""The order in which rows are used: mixing, shuffling and where to go on after a stop.

The invariant: the row used at place ``index`` of epoch ``epoch`` is a pure function of the
seed, the sizes and the weights. So the state of the loader is three integers, resuming reads
nothing twice and skips nothing, and neither the number of ranks nor the micro-batch size
changes the order. Shuffling uses the raw output of Philox, which NumPy keeps stable between
versions (its shuffles are not).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """Where the loader stands.

    Attributes:
        seed: of the shuffle.
        epoch: finished epochs.
        index: rows of this epoch already used; of all, where there are no epochs.
        cursors: where each streamed dataset stands.
    """

    seed: int
    epoch: int = 0
    index: int = 0
    cursors: list[list[int]] = field(default_factory=list)


@lru_cache(maxsize=4)  # a weighted mixture asks for the same one every epoch
def permutation(size: int, *key: object) -> Ints:
    """A permutation of ``range(size)`` that depends on ``key`` alone, on every platform."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(size)
    order = np.argsort(raw, kind="stable")
    order.flags.writeable = False
    return order


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The rows of every epoch over one or several datasets.

    Without weights an epoch is every row of every dataset once. With weights a dataset supplies
    its share of the *tokens*; an epoch ends when the first dataset has been used once, and the
    others go on where they stopped in the next epoch, so none repeats a row before all of its
    rows were used.

    Attributes:
        num_rows: rows of each dataset.
        num_tokens: tokens of each dataset, padding not counted.
        weights: one a dataset, or ``None``.
        seed: of the shuffle.
        shuffle: otherwise rows keep the order of their dataset, and weighted datasets are
            interleaved evenly.
    """

    num_rows: tuple[int, ...]
    num_tokens: tuple[int, ...]
    weights: tuple[float, ...] | None
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.weights is not None and not all(0 < w < float("inf") for w in self.weights):
            raise ConfigError(
                f"dataset weights are {list(self.weights)}; a weight is a positive share of tokens",
                remedy="remove the dataset to leave it out",
            )

    @property
    def rows_per_epoch(self) -> tuple[int, ...]:
        """Rows that each dataset supplies to an epoch."""
        if self.weights is None:
            return self.num_rows
        share = np.array(self.weights) / sum(self.weights)
        tokens = np.array(self.num_tokens, np.float64)
        epoch_tokens = (tokens / share).min()
        rows = share * epoch_tokens * np.array(self.num_rows) / tokens
        return tuple(int(max(1, count)) for count in np.rint(rows))

    @property
    def epoch_length(self) -> int:
        """Rows of an epoch."""
        return sum(self.rows_per_epoch)

    def epoch(self, epoch: int) -> tuple[Ints, Ints]:
        """``(dataset, row)`` of every place of an epoch, two int64 arrays of ``epoch_length``."""
        counts = self.rows_per_epoch
        datasets = np.repeat(np.arange(len(counts)), counts)
        rows = np.concatenate([self._draw(i, epoch, count) for i, count in enumerate(counts)])
        if self.shuffle:
            order = permutation(len(rows), self.seed, "mix", epoch)
        elif self.weights is not None:
            places = [(np.arange(count) + 0.5) / count for count in counts]
            order = np.argsort(np.concatenate(places), kind="stable")
        else:
            return datasets, rows
        return datasets[order], rows[order]

    def _draw(self, dataset: int, epoch: int, count: int) -> Ints:
        """The next ``count`` rows of a dataset that has supplied ``count`` to each epoch before."""
        size = self.num_rows[dataset]
        places = np.arange(epoch * count, (epoch + 1) * count)
        passes, within = np.divmod(places, size)
        if not self.shuffle:
            return within
        rows = np.empty(count, np.int64)
        for current in np.unique(passes).tolist():
            chosen = passes == current
            rows[chosen] = permutation(size, self.seed, "rows", dataset, current)[within[chosen]]
        return rows
