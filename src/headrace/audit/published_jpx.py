"""The rows of protocol ``vessl-2026`` from JPX prices, to the letter.

Owns the published features, universe and sample, and what on the way is a defect: the counts
that :mod:`headrace.audit.published_defects` names. The invariant: features, universe and sample
equal what the published pandas code gives on the same file. Nothing here should be used for
anything but comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.jpx import JpxPrices, label_interval
from headrace.audit.panel import Panel, make_panel
from headrace.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FEATURES = ("log_close", "log_volume", "ret_5d", "ret_30d", "vol_20d")
NUM_ENTITIES = 1000
DATES_PER_ENTITY = 30
SAMPLE_SEED = 42


@dataclass(frozen=True, kw_only=True)
class PublishedFacts:
    """What the price file says about the published choices.

    Attributes:
        num_rows: sampled rows.
        num_crossing: sampled rows whose 20-day volatility differs from the one within their
            entity.
        num_flat_windows: rows of the file whose volatility window reaches into the entity above.
        num_across_split: sampled rows whose 5- or 30-day return spans a split.
        largest_false_return: largest move in such a return that adjustment takes away.
        num_candidates, num_chosen: securities to choose from, and chosen by their number of rows.
        num_left_early: securities left out that stop trading before the file's last session.
    """

    num_rows: int
    num_crossing: int
    num_flat_windows: int
    num_across_split: int
    largest_false_return: float
    num_candidates: int
    num_chosen: int
    num_left_early: int


def _starts(code: NDArray[np.int64]) -> NDArray[np.intp]:
    """``(n,)`` first row of each row's security, for rows sorted by it."""
    first = np.flatnonzero(np.concatenate(([True], code[1:] != code[:-1])))
    return np.repeat(first, np.diff(np.append(first, len(code))))


def _diff(values: Array, lag: int, first_row: NDArray[np.intp]) -> Array:
    out = np.full(len(values), np.nan)
    same = first_row[lag:] == first_row[:-lag]
    out[lag:] = np.where(same, values[lag:] - values[:-lag], np.nan)
    return out


def _flat_rolling_sd(values: Array, window: int) -> Array:
    """Rolling standard deviation over the file's rows, whatever entity they belong to."""
    out = np.full(len(values), np.nan)
    if len(values) >= window:
        views = np.lib.stride_tricks.sliding_window_view(values, window)
        out[window - 1 :] = views.std(axis=1, ddof=1)
    return out


def published_features(log_close: Array, volume: Array, first_row: NDArray[np.intp]) -> Array:
    """``(n, 5)`` unadjusted features, returns counted in rows, the volatility window flat."""
    return np.column_stack(
        [
            log_close,
            np.log(np.maximum(volume, 1.0)),
            _diff(log_close, 5, first_row),
            _diff(log_close, 30, first_row),
            _flat_rolling_sd(_diff(log_close, 1, first_row), 20),
        ]
    )


def published_panel(
    prices: JpxPrices,
    *,
    num_entities: int = NUM_ENTITIES,
    dates_per_entity: int = DATES_PER_ENTITY,
    name: str = "jpx, vessl-2026 sample",
) -> tuple[Panel, PublishedFacts]:
    """The published universe with all its rows, the sampled ones marked embedded.

    Raises:
        DataError: no row has a target and 30 rows of prices before it.
    """
    targeted = np.flatnonzero(~np.isnan(prices.target))
    first = _starts(prices.code[targeted])
    log_close = np.log(np.maximum(prices.close[targeted], 1e-6))
    features = published_features(log_close, prices.volume[targeted], first)
    usable = np.isfinite(features).all(axis=1)
    if not usable.any():
        raise DataError(
            f"{name}: no row has a target and 30 rows of prices before it",
            remedy="a file of more sessions",
        )
    code = prices.code[targeted][usable]
    entities, first_seen, counts = np.unique(code, return_index=True, return_counts=True)
    # By descending number of rows; of equal numbers the one seen first.
    chosen = np.sort(entities[np.lexsort((first_seen, -counts))][:num_entities])
    kept = np.isin(code, chosen)
    rows = targeted[usable][kept]
    embedded = np.zeros(len(rows), dtype=bool)
    rng = np.random.default_rng(SAMPLE_SEED)
    for security in chosen:
        own = np.flatnonzero(prices.code[rows] == security)
        if len(own) > dates_per_entity:
            own = own[rng.choice(len(own), size=dates_per_entity, replace=False)]
        embedded[own] = True
    begin, end = label_interval(prices)
    panel = make_panel(
        entity=prices.code[rows],
        date=prices.date[rows],
        label_start=begin[rows],
        label_end=end[rows],
        y=prices.target[rows],
        features=features[usable][kept],
        feature_names=FEATURES,
        embedded=embedded,
        name=name,
        dropped=dict(prices.dropped),
        notes=(
            "Features, universe and sample are those of vessl-2026, defects included.",
            "JPX prices: 2020-10-01 is in the file although the exchange was closed.",
        ),
    )
    sampled = np.flatnonzero(usable)[kept][embedded]
    return panel, _facts(prices, targeted, features, sampled=sampled, chosen=chosen)


def _facts(
    prices: JpxPrices,
    targeted: NDArray[np.intp],
    features: Array,
    *,
    sampled: NDArray[np.intp],
    chosen: NDArray[np.int64],
) -> PublishedFacts:
    """Count what the published choices do; ``sampled`` are positions among ``targeted``."""
    first = _starts(prices.code[targeted])
    position = np.arange(len(targeted)) - first
    within = np.where(position >= 20, features[:, 4], np.nan)
    adjusted = np.log(prices.adjusted_close[targeted])
    false = np.stack(
        [features[:, 2] - _diff(adjusted, 5, first), features[:, 3] - _diff(adjusted, 30, first)]
    )[:, sampled]
    false = np.abs(np.nan_to_num(false))
    # Rounding of adjusted closes moves a return by far less than any split does.
    across = (false > 0.05).any(axis=0)
    traded = ~np.isnan(prices.close)
    securities, index = np.unique(prices.code[traded], return_inverse=True)
    last = np.zeros(len(securities), dtype=np.int64)
    np.maximum.at(last, index, prices.date[traded].astype(np.int64))
    left_out = ~np.isin(securities, chosen)
    return PublishedFacts(
        num_rows=len(sampled),
        num_crossing=int((features[sampled, 4] != within[sampled]).sum()),
        num_flat_windows=int((position < 19).sum()),
        num_across_split=int(across.sum()),
        largest_false_return=float(false.max(initial=0.0)),
        num_candidates=len(securities),
        num_chosen=len(chosen),
        num_left_early=int((left_out & (last < last.max())).sum()),
    )
