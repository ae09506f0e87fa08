"""Steps of streamed datasets, mixed by tokens.

The invariant: which dataset supplies the next row depends on the tokens that each has supplied
so far, and on nothing else: the one that is furthest behind its share. So the state of the loader
is (seed, index) and a cursor for each stream, and a run that is stopped anywhere goes on with
the row that would have come. There are no epochs: a stream begins anew when it ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.data.loader import RowSet, StepBatch, collate
from headrace.data.sampler import LoaderState
from headrace.data.streams import Cursor, StreamedSet
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.data.batching import LoaderSettings


class StreamLoader:
    """Steps without end of one or several streams.

    Args:
        streams: the datasets; with a weight each (its share of the tokens) if there are several.
        settings: batch sizes.
        seed: of the order.
        shuffle: whether the streams are.
        rank: which part of each step this process gets.
        state: where to go on; the beginning by default.

    Raises:
        ConfigError: several streams without weights.
    """

    steps_per_epoch = 0

    def __init__(
        self,
        streams: Sequence[StreamedSet],
        settings: LoaderSettings,
        *,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        state: LoaderState | None = None,
    ) -> None:
        weights = [stream.source.weight for stream in streams]
        if len(streams) > 1 and not all(weight is not None and weight > 0 for weight in weights):
            raise ConfigError(
                f"{len(streams)} datasets are streamed, with the weights {weights}: how much of "
                "each to read is not known from their sizes",
                remedy="give every dataset a weight: its share of the tokens",
            )
        self.streams = list(streams)
        self.settings = settings
        self.seed = seed
        self._weights = [1.0 if weight is None else weight for weight in weights]
        self._shuffle = shuffle
        self._rank = rank
        self.state = state or self._beginning()

    def _beginning(self) -> LoaderState:
        return LoaderState(seed=self.seed, cursors=[list(Cursor()) for _ in self.streams])

    @property
    def epoch(self) -> float:
        """Passes over the stream that was read least often."""
        return min(
            stream.share_done(cursor)
            for stream, cursor in zip(self.streams, self._cursors(), strict=True)
        )

    def next_step(self) -> StepBatch:
        """The next step's micro-batches; advances the state."""
        cursors = self._cursors()
        rows: list[tuple[RowSet, int]] = []
        ids: list[tuple[int, int]] = []
        for place in range(self.settings.rows_per_step):
            number = self._whose_turn(cursors)
            row_set, row, cursors[number] = self.streams[number].take(cursors[number])
            rows.append((row_set, row))
            ids.append((number, self.state.index + place))
        size = self.settings.micro_batch_size
        groups = [rows[first : first + size] for first in range(0, len(rows), size)]
        mine = groups[self._rank :: self.settings.num_ranks]
        built = [collate(group, self.settings) for group in mine]
        self.state = replace(
            self.state,
            index=self.state.index + len(rows),
            cursors=[list(cursor) for cursor in cursors],
        )
        micro_batches = [batch for batch, _ in built]
        return StepBatch(
            micro_batches=micro_batches,
            row_ids=ids,
            lengths=np.concatenate([lengths for _, lengths in built] or [np.empty(0, np.int64)]),
            num_supervised_tokens=sum(batch.num_supervised_tokens for batch in micro_batches),
            state=self.state,
        )

    def _cursors(self) -> list[Cursor]:
        return [Cursor(*cursor) for cursor in self.state.cursors]

    def _whose_turn(self, cursors: Sequence[Cursor]) -> int:
        behind = [
            cursor.tokens / weight for cursor, weight in zip(cursors, self._weights, strict=True)
        ]
        return behind.index(min(behind))

    def state_after(self, num_steps: int) -> LoaderState:
        """Where the loader stands after that many steps; reads everything up to there."""
        kept, self.state = self.state, self._beginning()
        try:
            for _ in range(num_steps):
                self.next_step()
            return self.state
        finally:
            self.state = kept

    def describe(self) -> list[str]:
        """Lines for people about the mixture."""
        total = sum(self._weights)
        return [
            f"streamed: {stream.source.label}: {weight / total:.3g} of the tokens, "
            f"{len(stream.parts):,} parts"
            for stream, weight in zip(self.streams, self._weights, strict=True)
        ]

    def facts(self) -> list[dict[str, Any]]:
        """One object a dataset for the run's record, as JSON types."""
        return [
            {
                "name": stream.source.label,
                "key": stream.fingerprint(),
                "streamed": True,
                "weight": weight,
                "num_parts": len(stream.parts),
            }
            for stream, weight in zip(self.streams, self._weights, strict=True)
        ]

    def fingerprint(self) -> dict[str, Any]:
        """What decides the stream of rows, as JSON types."""
        return {
            "seed": self.seed,
            "shuffle": self._shuffle,
            "datasets": [
                {
                    "key": stream.fingerprint(),
                    "rows": vars(stream.settings),
                    "weight": weight,
                    "subset": None,
                }
                for stream, weight in zip(self.streams, self._weights, strict=True)
            ],
        }

    def close(self) -> None:
        """End what reads ahead."""
        for stream in self.streams:
            stream.close()
