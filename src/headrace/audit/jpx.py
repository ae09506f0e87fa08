"""The JPX competition's price file, to the letter.

Owns ``stock_prices.csv``: its columns, its adjusted close, its target, and panels made of it.
The invariant: a target that is used was recomputed from prices and adjustment factors and
agreed with the file's. The data may not be redistributed; nothing here holds any of it.

Facts that the file forces on a reader: 7,608 of its 2,332,531 rows have no prices and 238 no
target; 2020-10-01 is in it although the exchange was closed; ``AdjustmentFactor`` stands on the
last row before a split and multiplies that row and all earlier ones; the label of date t runs
from the close of t + 1 to the close of t + 2, rows of the same security, so the last two
sessions before a split date must be purged.

Shape legend: n rows, in the order of security, then date.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.columns import instants, numbers
from headrace.audit.csv_files import read_csv
from headrace.audit.panel import Panel, make_panel, name_rows
from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

COLUMNS = (
    "RowId", "Date", "SecuritiesCode", "Open", "High", "Low", "Close", "Volume",
    "AdjustmentFactor", "ExpectedDividend", "SupervisionFlag", "Target",
)  # fmt: skip
TARGET_TOLERANCE = 1e-8  # the file prints targets with about ten digits
FEATURES = ("return_1", "return_5", "return_30", "volatility_20", "log_volume_ratio_20")


@dataclass(frozen=True, kw_only=True)
class JpxPrices:
    """The file's columns that matter, sorted by security and date.

    Attributes:
        code: ``(n,)`` int64 securities code.
        date: ``(n,)`` datetime64[us].
        close, volume: ``(n,)`` as quoted; NaN where there was no trade.
        adjusted_close: ``(n,)`` after splits, rounded, filled forward.
        target: ``(n,)`` of the file; NaN where it has none.
        first_row: ``(n,)`` position of the first row of each row's security.
        dropped: what the file lacks, counted.
    """

    code: NDArray[np.int64]
    date: NDArray[np.datetime64]
    close: Array
    volume: Array
    adjusted_close: Array
    target: Array
    first_row: NDArray[np.intp]
    dropped: dict[str, int]


def read_jpx(path: Path) -> JpxPrices:
    """Read ``stock_prices.csv`` and check its targets.

    Raises:
        DataError: the file is missing, lacks a column, repeats a security and date, or holds a
            target that its own prices contradict (rows are named by RowId).
    """
    if not path.is_file():
        raise DataError(
            f"no JPX price file at {path}",
            remedy="download stock_prices.csv of the Kaggle competition, or write a synthetic one",
        )
    frame = read_csv(path, what="JPX price file")
    missing = [column for column in COLUMNS if column not in frame.columns]
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(missing)}; a JPX price file has all of {COLUMNS}",
            remedy="use the file as the competition published it",
        )
    frame = frame.sort("SecuritiesCode", "Date")
    date, _ = instants(frame["Date"], f"{path}: column 'Date'")
    security, close, volume, target, factor = (
        numbers(frame[c], f"{path}: column {c!r}")
        for c in ("SecuritiesCode", "Close", "Volume", "Target", "AdjustmentFactor")
    )
    for column, bad in (
        ("Date", np.isnat(date)),
        ("SecuritiesCode", np.isnan(security)),
        ("AdjustmentFactor", ~(factor > 0)),
    ):
        if bad.any():
            raise DataError(
                f"{path}: {column} is missing or not positive: {_row_ids(frame, bad)}",
                remedy="use the file as the competition published it",
            )
    code = security.astype(np.int64)
    same = np.concatenate(([False], (code[1:] == code[:-1])))
    repeated = same & np.concatenate(([False], date[1:] == date[:-1]))
    if repeated.any():
        raise DataError(
            f"{path} repeats a security and date: {_row_ids(frame, repeated)}",
            remedy="keep one row of each security and date",
        )
    starts = np.flatnonzero(~same)
    first_row = np.repeat(starts, np.diff(np.append(starts, len(code))))
    adjusted = adjusted_close(close, factor, first_row)
    computed = targets(adjusted, first_row)
    both = ~np.isnan(computed) & ~np.isnan(target)
    wrong = both & ~np.isclose(computed, target, rtol=0, atol=TARGET_TOLERANCE)
    if wrong.any():
        raise DataError(
            f"{path}: the target differs from the one its prices give in {wrong.sum()} rows: "
            f"{_row_ids(frame, wrong)}",
            remedy="use the file as the competition published it, all dates included",
        )
    return JpxPrices(
        code=code,
        date=date,
        close=close,
        volume=volume,
        adjusted_close=adjusted,
        target=target,
        first_row=first_row,
        dropped={
            "rows without target": int(np.isnan(target).sum()),
            "rows without prices": int(np.isnan(close).sum()),
        },
    )


def _row_ids(frame: pl.DataFrame, mask: NDArray[np.bool_]) -> str:
    return name_rows(mask, [str(row_id) for row_id in frame["RowId"].to_list()])


def round_half_up(values: Array) -> Array:
    """To 0.1, ties upward, as decimals: what the competition's own code does with ``Decimal``."""
    scaled = values * 10.0
    rounded: Array = np.floor(scaled + 0.5) / 10.0
    # Near a tie the binary product may fall on the wrong side; the shortest decimal decides.
    near = np.abs(scaled - np.floor(scaled) - 0.5) < 1e-6
    for i in np.flatnonzero(near):
        exact = Decimal(repr(float(values[i]))).quantize(Decimal("0.1"), rounding=ROUND_HALF_UP)
        rounded[i] = float(exact)
    return rounded


def adjusted_close(close: Array, factor: Array, first_row: NDArray[np.intp]) -> Array:
    """Close times all adjustment factors from its own date on, rounded; 0 and gaps filled forward.

    Args:
        close: ``(n,)`` quoted closes, NaN where there was no trade.
        factor: ``(n,)`` AdjustmentFactor, 1 on most rows.
        first_row: ``(n,)`` position of the first row of each row's security.
    """
    cumulative = np.ones(len(close))
    starts = np.unique(first_row)
    for start, stop in zip(starts, np.append(starts[1:], len(close)), strict=True):
        cumulative[start:stop] = np.cumprod(factor[start:stop][::-1])[::-1]
    adjusted = round_half_up(close * cumulative)
    adjusted[adjusted == 0.0] = np.nan
    known = np.where(np.isnan(adjusted), -1, np.arange(len(adjusted)))
    source = np.maximum.accumulate(known)
    inside = source >= first_row
    filled: Array = np.where(inside, adjusted[np.maximum(source, 0)], np.nan)
    return filled


def targets(adjusted: Array, first_row: NDArray[np.intp]) -> Array:
    """``A[t + 2] / A[t + 1] - 1`` over the rows of a security; NaN at its last two rows."""
    target = np.full(len(adjusted), np.nan)
    same = first_row[2:] == first_row[:-2]
    target[:-2] = np.where(same, adjusted[2:] / adjusted[1:-1] - 1.0, np.nan)
    return target


def _lagged(values: Array, lag: int, first_row: NDArray[np.intp]) -> Array:
    out = np.full(len(values), np.nan)
    position = np.arange(len(values)) - lag
    inside = position >= first_row
    out[inside] = values[position[inside]]
    return out


def _rolling(values: Array, window: int, first_row: NDArray[np.intp], *, sd: bool) -> Array:
    """Mean or standard deviation over the last ``window`` rows of the same security, all there."""
    lags = np.stack([_lagged(values, lag, first_row) for lag in range(window)])
    rolled: Array = lags.std(axis=0, ddof=1) if sd else lags.mean(axis=0)
    return rolled


def point_in_time_features(prices: JpxPrices) -> Array:
    """``(n, 5)`` of :data:`FEATURES`, from adjusted closes of the same security up to the date."""
    log_close = np.log(prices.adjusted_close)
    first = prices.first_row
    daily = log_close - _lagged(log_close, 1, first)
    volume = np.log1p(np.nan_to_num(prices.volume, nan=0.0))
    return np.column_stack(
        [
            daily,
            log_close - _lagged(log_close, 5, first),
            log_close - _lagged(log_close, 30, first),
            _rolling(daily, 20, first, sd=True),
            volume - _rolling(volume, 20, first, sd=False),
        ]
    )


def jpx_panel(
    prices: JpxPrices,
    *,
    num_entities: int = 1000,
    dates_per_entity: int = 30,
    seed: int = 42,
    name: str = "jpx",
) -> Panel:
    """A panel with the full matrix of targets and a sample of rows to embed.

    The universe is drawn from the securities that trade on the panel's first session with
    complete features: what happens to them later, delisting included, plays no part.

    Args:
        prices: of :func:`read_jpx`.
        num_entities: securities, all where there are fewer.
        dates_per_entity: rows to embed of each, on random dates, all where there are fewer.
        seed: of both draws.
        name: what reports call it.

    Raises:
        DataError: no row has target and features.
    """
    if num_entities < 2 or dates_per_entity < 1:
        raise ConfigError(
            f"{num_entities} entities x {dates_per_entity} dates is no panel",
            remedy="give at least one of each",
        )
    features = point_in_time_features(prices)
    usable = ~np.isnan(prices.target) & np.isfinite(features).all(axis=1)
    if not usable.any():
        raise DataError(
            f"panel {name!r}: no row has a target and 30 sessions of prices before it",
            remedy="a file of more sessions",
        )
    start = prices.date[usable].min()
    at_start = np.unique(prices.code[usable & (prices.date == start)])
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(at_start)[:num_entities])
    rows = np.flatnonzero(usable & np.isin(prices.code, chosen))
    code = prices.code[rows]
    embedded = np.zeros(len(rows), dtype=bool)
    for security in chosen:
        own = np.flatnonzero(code == security)
        embedded[rng.permutation(own)[:dates_per_entity]] = True
    begin, end = label_interval(prices)
    return make_panel(
        entity=code,
        date=prices.date[rows],
        label_start=begin[rows],
        label_end=end[rows],
        y=prices.target[rows],
        features=features[rows],
        feature_names=FEATURES,
        embedded=embedded,
        name=name,
        dropped=prices.dropped
        | {
            "rows without features": int((~np.isnan(prices.target) & ~usable).sum()),
            "securities not trading on the first session": int(
                len(np.unique(prices.code)) - len(at_start)
            ),
        },
        notes=(
            "JPX prices: 2020-10-01 is in the file although the exchange was closed.",
            f"The universe is drawn from securities that trade on {str(start)[:10]}.",
        ),
    )


def label_interval(prices: JpxPrices) -> tuple[NDArray[np.datetime64], NDArray[np.datetime64]]:
    """``(n,)`` dates of the next row and the one after it, which the label runs between.

    At the end of a security's rows, where the file has targets from later data, calendar days
    stand in for the missing sessions.
    """
    day = np.timedelta64(1, "D")
    begin, end = prices.date + day, prices.date + 2 * day
    for lag, out in ((1, begin), (2, end)):
        same = prices.first_row[lag:] == prices.first_row[:-lag]
        out[:-lag][same] = prices.date[lag:][same]
    return begin, np.maximum(begin, end)
