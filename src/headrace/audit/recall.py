"""The recall probe: does a model state dated market moves that it should not know?

Owns the statistic (4) and the question. The invariant: a side of the cutoff is judged by
shifting the answers against the dates of that side alone, so a model that answers by season or
by habit is no better on its dates than on any others. Significant before the cutoff and not
after it is knowledge of the past as a text would give it, whatever the panel can say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.audit.columns import numbers
from headrace.audit.config import parse_date
from headrace.audit.dated_csv import parse_dates, read_columns
from headrace.audit.records import Figure, RecallRecord
from headrace.audit.resample import admissible_offsets, shift_p
from headrace.audit.tables import null_of
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.audit.config import AuditConfig

    Array = NDArray[np.float64]

PROTOCOL = "recall/1"
MIN_DATES = 60


@dataclass(frozen=True, kw_only=True)
class RecallAnswers:
    """What a model stated of dated moves, and what they were.

    Attributes:
        date: ``(n,)`` datetime64[us], ascending, unique.
        stated: ``(n,)`` higher for "up"; any scale.
        true: ``(n,)`` moves.
    """

    date: NDArray[np.datetime64]
    stated: Array
    true: Array

    def __post_init__(self) -> None:
        """Refuse what cannot be scored."""
        if not len(self.date) == len(self.stated) == len(self.true):
            raise DataError(
                "recall answers: dates, stated and true differ in length",
                remedy="give one of each a row",
            )
        if (np.diff(self.date) <= np.timedelta64(0)).any():
            raise DataError(
                "recall answers: dates are not ascending and unique",
                remedy="sort the answers by date, one a date",
            )
        bad = ~(np.isfinite(self.stated) & np.isfinite(self.true))
        if bad.any():
            row = int(np.argmax(bad))
            raise DataError(
                f"recall answers: row {row} is missing or infinite", remedy="leave that row out"
            )


def read_answers(path: Path) -> RecallAnswers:
    """Read a CSV with columns ``date, stated, true``.

    Raises:
        DataError: the file or a column is missing, or a value is none.
    """
    frame = read_columns(path, ("date", "stated", "true"), what="recall answers")
    date = parse_dates(path, frame["date"])
    order = np.argsort(date, kind="stable")
    return RecallAnswers(
        date=date[order],
        stated=numbers(frame["stated"], f"{path}: column 'stated'")[order],
        true=numbers(frame["true"], f"{path}: column 'true'")[order],
    )


def judge_recall(
    answers: RecallAnswers, cutoff: str | None, config: AuditConfig, *, stack: str
) -> tuple[RecallRecord, tuple[bool, bool] | None]:
    """Correlation on each side of the cutoff, and which are significant.

    Returns:
        The record, and (significant before, significant after); ``None`` unless both sides
        have at least 60 dates.
    """
    if cutoff is None:
        return RecallRecord(before=None, after=None), None
    limit = parse_date(cutoff, "cutoff")
    figures: list[Figure | None] = []
    for side in (answers.date <= limit, answers.date > limit):
        if np.count_nonzero(side) < MIN_DATES:
            figures.append(None)
        else:
            figures.append(_side(answers.stated[side], answers.true[side], config, stack))
    before, after = figures
    record = RecallRecord(before=before, after=after)
    if before is None or after is None or before.p_value is None or after.p_value is None:
        return record, None
    return record, (before.p_value <= config.level, after.p_value <= config.level)


def _side(stated: Array, true: Array, config: AuditConfig, stack: str) -> Figure:
    rng = np.random.default_rng(config.seed)
    offsets = rng.permutation(admissible_offsets(len(true), 1))[: config.num_shifts]
    moved = (np.arange(len(true))[:, None] - offsets[None]) % len(true)
    observed = float(_correlations(stated[:, None], true)[0])
    null = _correlations(stated[moved], true)
    return Figure(
        value=observed,
        n=len(true),
        n_unit="dates",
        protocol=PROTOCOL,
        stack=stack,
        method="shifted_dates",
        p_value=shift_p(observed, null),
        null=null_of("shifted_dates", null),
    )


def _correlations(stated_nM: Array, true: Array) -> Array:
    """``(M,)``; 0 where either side is constant."""
    x = stated_nM - stated_nM.mean(axis=0)
    y = true - true.mean()
    scale = np.sqrt((x**2).sum(axis=0) * (y**2).sum())
    correlations: Array = np.where(scale > 0, y @ x / np.where(scale > 0, scale, 1.0), 0.0)
    return correlations


def stated_moves(
    model: Any,
    tokenizer: Any,
    dates: Sequence[str],
    *,
    market: str,
    up: str = " higher",
    down: str = " lower",
    batch_size: int = 32,
) -> Array:
    """``(n,)`` log-odds of ``up`` over ``down`` after "On DATE, MARKET closed".

    Args:
        model: Hugging Face causal LM.
        tokenizer: its tokenizer.
        dates: ISO dates.
        market: as the prompt names it ("the Japanese stock market").
        up: continuation of a rise.
        down: continuation of a fall.
        batch_size: prompts a forward pass.
    """
    prompts = [f"On {date}, {market} closed" for date in dates]
    odds = np.zeros(len(prompts))
    for sign, continuation in ((1.0, up), (-1.0, down)):
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            odds[start : start + len(batch)] += sign * _log_probability(
                model, tokenizer, batch, continuation
            )
    return odds


def _log_probability(
    model: Any, tokenizer: Any, prompts: Sequence[str], continuation: str
) -> Array:
    import torch  # noqa: PLC0415  # the statistic alone needs none

    device = next(model.parameters()).device
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    added = tokenizer(continuation, add_special_tokens=False)["input_ids"]
    longest = max(map(len, ids)) + len(added)
    batch = torch.zeros((len(ids), longest), dtype=torch.int64)
    mask = torch.zeros_like(batch)
    for row, own in enumerate(ids):
        whole = torch.tensor([*own, *added])
        batch[row, : len(whole)] = whole
        mask[row, : len(whole)] = 1
    with torch.no_grad():
        logits = model(input_ids=batch.to(device), attention_mask=mask.to(device)).logits
    scores = torch.log_softmax(logits.float(), dim=-1).cpu()
    total = np.zeros(len(ids))
    for row, own in enumerate(ids):
        for k, token in enumerate(added):
            # The logits at a position are of the token after it.
            total[row] += float(scores[row, len(own) + k - 1, token])
    return total
