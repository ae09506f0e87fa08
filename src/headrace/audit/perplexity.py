"""Loss by month of the document: where a model's text ends.

Owns the table around the cutoff. A model's loss rises after its training text ends; where it
does not rise at the stated cutoff, the statement deserves doubt. An ablation: no verdict rests
on it. The unit is the document; loss is in nats a token.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from headrace.audit.columns import numbers
from headrace.audit.dated_csv import parse_dates, read_columns
from headrace.audit.records import Figure, PerplexityRecord
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

PROTOCOL = "loss_by_month/1"


def losses_by_month(
    dates: NDArray[np.datetime64],
    loss_sums: NDArray[np.float64],
    num_tokens: NDArray[np.integer],
    *,
    stack: str,
) -> tuple[PerplexityRecord, ...]:
    """Mean loss a token of each month's documents, with a t interval over documents.

    Args:
        dates: ``(n,)`` of the documents.
        loss_sums: ``(n,)`` nats.
        num_tokens: ``(n,)`` tokens that were predicted.
        stack: fingerprint of what computed them.

    Raises:
        DataError: a loss that is not finite, or a document without tokens.
    """
    bad = ~np.isfinite(loss_sums) | (num_tokens <= 0)
    if bad.any():
        raise DataError(
            f"document {int(np.argmax(bad))} has no finite loss or no tokens",
            remedy="leave it out, or look at the model's weights",
        )
    months: dict[str, list[int]] = defaultdict(list)
    for row, month in enumerate(dates.astype("datetime64[M]")):
        months[str(month)].append(row)
    return tuple(
        PerplexityRecord(month=month, loss=_figure(loss_sums[rows], num_tokens[rows], stack))
        for month, rows in sorted(months.items())
    )


def _figure(loss: NDArray[np.float64], tokens: NDArray[np.integer], stack: str) -> Figure:
    mean = float(loss.sum() / tokens.sum())
    count = len(loss)
    low = high = None
    if count >= 2:
        residual = loss - mean * tokens
        se = float(np.sqrt(count / (count - 1) * (residual**2).sum()) / tokens.sum())
        half = float(stats.t.ppf(0.975, count - 1)) * se
        low, high = mean - half, mean + half
    return Figure(
        value=mean,
        n=count,
        n_unit="documents",
        protocol=PROTOCOL,
        stack=stack,
        low=low,
        high=high,
        method="document_t" if low is not None else "",
        note="" if low is not None else "one document: no interval",
    )


def read_losses(path: Path, *, stack: str) -> tuple[PerplexityRecord, ...]:
    """Read a CSV with columns ``date, loss_sum, num_tokens``, one row a document.

    Raises:
        DataError: the file or a column is missing, or a value is none.
    """
    frame = read_columns(path, ("date", "loss_sum", "num_tokens"), what="document losses")
    dates = parse_dates(path, frame["date"], length=10)
    return losses_by_month(
        dates,
        numbers(frame["loss_sum"], f"{path}: column 'loss_sum'"),
        np.nan_to_num(numbers(frame["num_tokens"], f"{path}: column 'num_tokens'")).astype(int),
        stack=stack,
    )


def document_losses(
    model: Any, documents: Iterable[tuple[str, list[int]]], *, max_length: int
) -> Iterator[tuple[str, float, int]]:
    """``(date, loss sum, tokens)`` of each (date, token ids), in pieces of ``max_length``.

    Args:
        model: Hugging Face causal LM.
        documents: dates and token ids; documents of one token have nothing to predict and are
            passed over.
        max_length: positions a forward pass.
    """
    import torch  # noqa: PLC0415  # the table alone needs none

    device = next(model.parameters()).device
    for date, ids in documents:
        total, count = 0.0, 0
        for start in range(0, len(ids) - 1, max_length):
            # One token overlaps, so that every token but the first is predicted once.
            piece = torch.tensor([ids[start : start + max_length + 1]], device=device)
            with torch.no_grad():
                logits = model(input_ids=piece[:, :-1]).logits.float()
            losses = torch.nn.functional.cross_entropy(logits[0], piece[0, 1:], reduction="sum")
            total += float(losses)
            count += piece.shape[1] - 1
        if count:
            yield date, total, count
