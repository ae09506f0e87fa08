"""The figures of an evaluation: loss by dataset and by month of the document.

The invariant: every loss is the mean over the supervised tokens it names, whatever the batches,
and an evaluation needs no more memory than a step. Changes no weight.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

from headrace.data.loader import evaluation_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.data.batching import LoaderSettings
    from headrace.data.evaluation import EvalSet
    from headrace.data.loader import RowSet
    from headrace.engine import Engine
    from headrace.trainer.harness import Harness

_LARGEST_LOG = 700.0  # exp of more is not a float


class Evaluator:
    """Evaluates the live weights on several datasets.

    Args:
        engine: holds the weights.
        sets: the datasets.
        settings: their batches.
        rows_per_step: rows of a training step, of all ranks.
        harness: scores benchmarks, if any are asked for.
    """

    def __init__(
        self,
        engine: Engine,
        sets: Sequence[EvalSet],
        settings: LoaderSettings,
        *,
        rows_per_step: int,
        harness: Harness | None = None,
    ) -> None:
        self._engine = engine
        self._harness = harness
        self._sets = sets
        self._settings = settings
        # As many rows at a time as a step takes, so that evaluation needs no more memory.
        self._group = max(1, rows_per_step // settings.num_ranks // settings.micro_batch_size)
        self.losses: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """The row's figures: ``eval_loss`` over all sets, each set's own, and by month."""
        started = time.perf_counter()
        whole = _Sum()
        by_month: defaultdict[str, _Sum] = defaultdict(_Sum)
        self.losses = {}
        for dataset in self._sets:
            own = _Sum()
            for month, rows in dataset.parts:
                part = self._evaluate(rows)
                own += part
                if month is not None:
                    by_month[month] += part
            self.losses[dataset.label] = own.mean
            whole += own
        figures: dict[str, Any] = {}
        if self._sets:
            figures["eval_loss"] = whole.mean
            figures["eval_perplexity"] = _perplexity(whole.mean)
        if len(self.losses) > 1:
            figures |= {f"eval_{label}_loss": loss for label, loss in self.losses.items()}
        if by_month:
            months = sorted(by_month.items())
            figures["eval_loss_by_month"] = {month: found.mean for month, found in months}
            figures["eval_perplexity_by_month"] = {
                month: _perplexity(found.mean) for month, found in months
            }
        if self._harness is not None:
            figures |= self._harness.run()
        figures["eval_seconds"] = time.perf_counter() - started
        return figures

    def _evaluate(self, rows: RowSet) -> _Sum:
        found = _Sum()
        settings = self._settings
        batches = evaluation_batches(rows, settings, rank=self._engine.ranks.rank)
        # As many rounds on every rank; the last one may find nothing left on some.
        per_round = settings.micro_batch_size * settings.num_ranks * self._group
        for _ in range(-(-rows.plan.num_rows // per_round)):
            result = self._engine.evaluate(list(itertools.islice(batches, self._group)))
            found += _Sum(result.loss_sum, result.num_supervised_tokens)
        return found


class _Sum:
    """Nats over supervised tokens."""

    def __init__(self, nats: float = 0.0, num_tokens: int = 0) -> None:
        self.nats = nats
        self.num_tokens = num_tokens

    def __iadd__(self, other: _Sum) -> Self:
        self.nats += other.nats
        self.num_tokens += other.num_tokens
        return self

    @property
    def mean(self) -> float:
        return self.nats / max(1, self.num_tokens)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, _LARGEST_LOG))
