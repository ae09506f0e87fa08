"""Known defects of the published evaluation, looked for in every run of it.

Owns the list, and the record of a run. The invariant: each defect is measured on the rows at
hand; ``present`` is ``None`` where these rows cannot tell, and never assumed. It changes no
number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from headrace.audit.config import parse_date
from headrace.audit.published import (
    NUM_DRAWS,
    PROTOCOL,
    PROTOCOL_VERSION,
    SPLIT_DATE,
    PublishedRows,
    PublishedScores,
    deal_folds,
    evaluate_published,
)
from headrace.audit.records import Figure, FindingRecord, PublishedRecord
from headrace.audit.tables import null_of
from headrace.audit.threads import single_blas
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.audit.panel import Panel
    from headrace.audit.published_jpx import PublishedFacts


def find_defects(
    panel: Panel, rows: PublishedRows, scores: PublishedScores, facts: PublishedFacts | None
) -> tuple[FindingRecord, ...]:
    """Look for each of them."""
    return (
        _point_outside(scores),
        _premium_without_leak(scores),
        _crossing(facts),
        _raw_close(facts),
        _universe(facts),
        _clusters(panel),
        _failed_draws(scores),
        FindingRecord(
            name="last_token_assumes_right_padding",
            present=None,
            detail="The published code takes position (number of real tokens - 1) of a row, which "
            "is a padding token when padding is on the left. Vectors do not show how they were "
            "pooled; headrace embed reads the mask.",
        ),
        _periods(panel, rows),
    )


def _point_outside(scores: PublishedScores) -> FindingRecord:
    name = "point_outside_its_interval"
    draws = scores.premium_draws
    if len(draws) == 0:
        return FindingRecord(name=name, present=None, detail="No draw was made.")
    low, high = np.percentile(draws, [2.5, 97.5])
    share = float((draws > scores.premium).mean())
    return FindingRecord(
        name=name,
        present=not low <= scores.premium <= high,
        detail=f"The premium of the rows is {scores.premium:.4f}, its refit interval "
        f"[{low:.4f}, {high:.4f}]; {share:.0%} of the draws lie above it. A draw holds about 63% "
        "of the entities, so its heads train on less and overfit more: the interval is biased.",
    )


def _premium_without_leak(scores: PublishedScores) -> FindingRecord:
    name = "premium_with_nothing_to_leak"
    null = (scores.r2_on - scores.r2_off)[1:]
    if len(null) == 0:
        return FindingRecord(
            name=name, present=None, detail="The dates cannot be shifted on this panel."
        )
    positive = float((null > 0).mean())
    # More positive than a fair coin would give in 1% of cases.
    limit = float(stats.binom.isf(0.01, len(null), 0.5)) / len(null)
    return FindingRecord(
        name=name,
        present=positive > limit,
        detail=f"With targets moved against the dates nothing can leak; the premium is positive in "
        f"{positive:.0%} of {len(null)} shifts, {np.median(null):.4f} in the median.",
    )


def _crossing(facts: PublishedFacts | None) -> FindingRecord:
    name = "volatility_crosses_entities"
    if facts is None:
        return _no_prices(name)
    return FindingRecord(
        name=name,
        present=facts.num_crossing > 0,
        detail=f"The 20-day volatility rolls over the whole file. {facts.num_flat_windows} windows "
        f"reach into the entity above; {facts.num_crossing} of {facts.num_rows} sampled values "
        "differ from those within their entity. (Such a window holds the entity's first return, "
        "which is missing, so its value is missing and the row is dropped.)",
    )


def _raw_close(facts: PublishedFacts | None) -> FindingRecord:
    name = "splits_look_like_returns"
    if facts is None:
        return _no_prices(name)
    return FindingRecord(
        name=name,
        present=facts.num_across_split > 0,
        detail=f"{facts.num_across_split} of {facts.num_rows} sampled rows have a 5- or 30-day "
        "return of the raw close that spans a split; the largest false move is "
        f"{facts.largest_false_return:.2f} in logarithms.",
    )


def _universe(facts: PublishedFacts | None) -> FindingRecord:
    name = "universe_chosen_with_the_full_sample"
    if facts is None:
        return _no_prices(name)
    return FindingRecord(
        name=name,
        present=facts.num_chosen < facts.num_candidates,
        detail=f"{facts.num_chosen} of {facts.num_candidates} securities were chosen by their "
        f"number of rows in the whole file; {facts.num_left_early} of those left out stop "
        "trading early.",
    )


def _no_prices(name: str) -> FindingRecord:
    return FindingRecord(name=name, present=None, detail="No price file to look it up in.")


def _clusters(panel: Panel) -> FindingRecord:
    """Whether dates move together: the intraclass correlation of a date, and its F test."""
    counts = np.bincount(panel.session, minlength=panel.num_sessions)
    means = np.bincount(panel.session, panel.y, panel.num_sessions) / np.maximum(counts, 1)
    within = float(((panel.y - means[panel.session]) ** 2).sum())
    between = float((counts * (means - panel.y.mean()) ** 2).sum())
    df = (panel.num_sessions - 1, len(panel.y) - panel.num_sessions)
    name = "entity_clusters_although_shocks_are_common"
    if df[1] < 1 or within == 0:
        return FindingRecord(name=name, present=None, detail="No date has two entities.")
    ratio = (between / df[0]) / (within / df[1])
    size = len(panel.y) / panel.num_sessions
    share = max(0.0, (ratio - 1) / (ratio - 1 + size))
    return FindingRecord(
        name=name,
        present=bool(stats.f.sf(ratio, *df) < 0.01),
        detail=f"{share:.0%} of the target's variance is common to a date (F = {ratio:.1f}); the "
        "interval resamples entities, which all share it.",
    )


def _failed_draws(scores: PublishedScores) -> FindingRecord:
    return FindingRecord(
        name="failed_draws_skipped",
        present=scores.num_failed > 0,
        detail=f"{scores.num_failed} of {len(scores.draws)} draws failed; the published code drops "
        "them without a word.",
    )


def _periods(panel: Panel, rows: PublishedRows) -> FindingRecord:
    before = int(rows.train.sum())
    sessions = panel.session[panel.embedded_rows]
    first, last = panel.date_text(int(sessions.min())), panel.date_text(int(sessions.max()))
    return FindingRecord(
        name="arms_tested_on_different_periods",
        present=before > 0,
        detail=f"Leakage-on tests {len(rows.train)} rows from {first} to {last}, leakage-off the "
        f"{len(rows.train) - before} after the split.",
    )


def published_record(
    scores: PublishedScores, findings: tuple[FindingRecord, ...], *, stack: str
) -> PublishedRecord:
    """The protocol's numbers as the published code prints them."""
    draws = scores.premium_draws
    low, high = np.percentile(draws, [2.5, 97.5]) if len(draws) else (None, None)
    num_rows = scores.num_train + scores.num_test
    name = f"{PROTOCOL}/{PROTOCOL_VERSION}"

    def plain(value: float, count: int) -> Figure:
        return Figure(value=value, n=count, n_unit="rows", protocol=name, stack=stack)

    return PublishedRecord(
        r2_on=plain(float(scores.r2_on[0]), num_rows),
        r2_off=plain(float(scores.r2_off[0]), scores.num_test),
        premium=replace(
            plain(scores.premium, num_rows),
            low=None if low is None else float(low),
            high=None if high is None else float(high),
            method="refit_bootstrap_percentile" if len(draws) else "",
            null=null_of("shifted_dates", (scores.r2_on - scores.r2_off)[1:]),
            note=(
                f"median of the draws {np.median(draws):.6g}; the interval is biased, see findings"
                if len(draws)
                else "no draws were made"
            ),
        ),
        num_draws=len(scores.draws),
        num_failed_draws=scores.num_failed,
        findings=findings,
    )


@dataclass(frozen=True, kw_only=True)
class PublishedOptions:
    """How ``vessl-2026`` is run beside an audit.

    Attributes:
        split_date: last training date of the leakage-off arm.
        num_draws: refits; 0 leaves the interval out.
        num_shifts: moved targets that show the premium with nothing to leak.
        facts: what the price file says, for panels of :func:`published_panel`.
    """

    split_date: str = SPLIT_DATE
    num_draws: int = NUM_DRAWS
    num_shifts: int = 39
    facts: PublishedFacts | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: a negative count, or a split date that is none.
        """
        parse_date(self.split_date, "published: split_date")
        if min(self.num_draws, self.num_shifts) < 0:
            raise ConfigError(
                f"published: {self.num_draws} draws and {self.num_shifts} shifts; neither may be "
                "negative",
                remedy="0 leaves them out",
            )


def check_published(panel: Panel, options: PublishedOptions) -> None:
    """Whether the protocol can be run at all, before anything is computed.

    Raises:
        DataError: fewer than 10 rows on a side of the split, or fewer than 5 entities.
    """
    rows = PublishedRows.of_panel(panel, split_date=options.split_date)
    deal_folds(rows, np.ones(len(rows.entity)))


def run_published(
    panel: Panel,
    embedding: NDArray[np.floating],
    options: PublishedOptions,
    *,
    offsets: NDArray[np.int64],
    stack: str,
) -> tuple[PublishedScores, PublishedRecord]:
    """Run the protocol on one embedding and look for its defects.

    Args:
        panel: its embedded rows are evaluated.
        embedding: ``(n, D)``.
        options: how.
        offsets: of the shifted dates; empty where they are refused.
        stack: fingerprint.

    Raises:
        DataError: fewer than 10 rows on a side of the split, or fewer than 5 entities.
    """
    rows = PublishedRows.of_panel(
        panel, split_date=options.split_date, offsets=offsets[: options.num_shifts]
    )
    with single_blas():
        scores = evaluate_published(embedding, rows, num_draws=options.num_draws)
    findings = find_defects(panel, rows, scores, options.facts)
    return scores, published_record(scores, findings, stack=stack)


def published_reduction(base: PublishedScores, trained: PublishedScores, *, stack: str) -> Figure:
    """Premium of ``base`` minus that of ``trained``, the percentile interval of paired draws."""
    draws = (base.draws[:, 1] - base.draws[:, 0]) - (trained.draws[:, 1] - trained.draws[:, 0])
    draws = draws[~np.isnan(draws)]
    low, high = np.percentile(draws, [2.5, 97.5]) if len(draws) else (None, None)
    return Figure(
        value=base.premium - trained.premium,
        n=base.num_train + base.num_test,
        n_unit="rows",
        protocol=f"{PROTOCOL}/{PROTOCOL_VERSION}",
        stack=stack,
        low=None if low is None else float(low),
        high=None if high is None else float(high),
        method="refit_bootstrap_percentile" if len(draws) else "",
        note=f"median of the draws {np.median(draws):.6g}" if len(draws) else "no draws were made",
    )
