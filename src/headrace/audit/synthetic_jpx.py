"""A synthetic file in the JPX competition's schema.

Owns the simulation of ``stock_prices.csv``: integer-yen closes of simulated returns, splits,
halts, the closed day, delistings and late listings, targets by the competition's own formula.
The invariant: every peculiarity that a reader of the real file meets occurs here at least once.
It is not market data and holds none.

Shape legend: N securities, T sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.jpx import COLUMNS, adjusted_close, targets
from headrace.audit.synthetic import market_shocks
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

CLOSED_DAY = np.datetime64("2020-10-01")
SPLIT_FACTORS = (0.5, 0.2, 10.0)


@dataclass(frozen=True, kw_only=True)
class SyntheticJpxConfig:
    """What is simulated.

    Attributes:
        num_securities, num_sessions: of the file; sessions are weekdays from 2017-01-04, so the
            closed day is reached after 977 of them.
        splits, halts: expected number a security; a halt is 1 to 3 sessions without prices.
        num_delisted, num_listed_late: securities that end early or start late.
        volatility: daily standard deviation of returns; ``common_share`` of its square is shared.
        seed: of everything.
    """

    num_securities: int = 200
    num_sessions: int = 1202
    splits: float = 0.3
    halts: float = 0.5
    num_delisted: int = 5
    num_listed_late: int = 5
    volatility: float = 0.02
    common_share: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        if self.num_delisted + self.num_listed_late >= self.num_securities:
            raise ConfigError(
                "more securities are delisted or late than there are",
                remedy="lower num_delisted or num_listed_late",
            )
        if self.num_sessions < 60:
            raise ConfigError(
                f"{self.num_sessions} sessions: at least 60 are needed",
                remedy="num_sessions: 60 or more",
            )


def synthetic_jpx(config: SyntheticJpxConfig) -> pl.DataFrame:
    """Simulate the file as a frame with the competition's columns, sorted by date and code."""
    import polars as pl  # noqa: PLC0415  # half a second; only this function needs it

    rng = np.random.default_rng(config.seed)
    shape = (config.num_securities, config.num_sessions)
    dates = np.busday_offset("2017-01-04", np.arange(config.num_sessions), roll="forward")
    returns = config.volatility * (
        np.sqrt(config.common_share) * market_shocks(config.num_sessions, rng)[None]
        + np.sqrt(1.0 - config.common_share) * rng.standard_normal(shape)
    )
    closed = dates == CLOSED_DAY
    returns[:, closed] = 0.0
    factor = _splits(config, rng, closed)
    # A split on the row that carries its factor lowers prices from the next row on.
    quoted = np.cumprod(np.concatenate([np.ones((shape[0], 1)), factor[:, :-1]], axis=1), axis=1)
    start = np.exp(rng.uniform(np.log(2_000), np.log(8_000), shape[0]))
    close = np.maximum(np.rint(start[:, None] * np.exp(np.cumsum(returns, axis=1)) * quoted), 1.0)
    volume = np.rint(np.exp(rng.normal(12.0, 1.0, shape)) / 100) * 100
    missing = _halts(config, rng) | closed[None]
    missing[:, 0] = False
    close[missing] = np.nan
    volume[missing] = 0.0
    listed = _listed(config)
    code = 1301 + 7 * np.arange(shape[0])
    unit, session = np.nonzero(listed)
    order = np.lexsort((session, unit))
    unit, session = unit[order], session[order]
    first_row = np.searchsorted(unit, unit)
    own_close, own_factor = close[unit, session], factor[unit, session]
    adjusted = adjusted_close(own_close, own_factor, first_row)
    target = targets(adjusted, first_row)
    wiggle = np.abs(rng.normal(0.0, 0.005, (2, len(unit))))
    days = np.array([str(date).replace("-", "") for date in dates])[session]
    columns = {
        "RowId": [f"{day}_{c}" for day, c in zip(days, code[unit], strict=True)],
        "Date": [str(d) for d in dates[session]],
        "SecuritiesCode": code[unit],
        "Open": own_close,
        "High": np.rint(own_close * (1 + wiggle[0])),
        "Low": np.rint(own_close * (1 - wiggle[1])),
        "Close": own_close,
        "Volume": volume[unit, session].astype(np.int64),
        "AdjustmentFactor": own_factor,
        "ExpectedDividend": np.where(rng.random(len(unit)) < 0.005, 10.0, np.nan),
        "SupervisionFlag": rng.random(len(unit)) < 0.001,
        "Target": target,
    }
    frame = pl.DataFrame(columns).select(COLUMNS)
    floats = [name for name, dtype in frame.schema.items() if dtype == pl.Float64]
    return frame.with_columns(pl.col(floats).fill_nan(None)).sort("Date", "SecuritiesCode")


def write_synthetic_jpx(path: Path, config: SyntheticJpxConfig) -> None:
    """Write the file as the competition's CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    synthetic_jpx(config).write_csv(path)


def _splits(
    config: SyntheticJpxConfig, rng: np.random.Generator, closed: NDArray[np.bool_]
) -> Array:
    """``(N, T)`` adjustment factors; the first security splits for certain."""
    shape = (config.num_securities, config.num_sessions)
    at = rng.random(shape) < config.splits / config.num_sessions
    at[0, config.num_sessions // 3] = True
    at[:, 0] = at[:, -3:] = False
    at &= ~closed[None]
    return np.where(at, rng.choice(SPLIT_FACTORS, shape), 1.0)


def _halts(config: SyntheticJpxConfig, rng: np.random.Generator) -> NDArray[np.bool_]:
    """``(N, T)`` cells without prices; the second security is halted for certain."""
    shape = (config.num_securities, config.num_sessions)
    begin = rng.random(shape) < config.halts / config.num_sessions
    begin[1, config.num_sessions // 2] = True
    halted = begin.copy()
    for lag in (1, 2):
        goes_on = begin[:, :-lag] & (rng.random((shape[0], shape[1] - lag)) < 0.5)
        halted[:, lag:] |= goes_on
    return halted


def _listed(config: SyntheticJpxConfig) -> NDArray[np.bool_]:
    """``(N, T)`` rows that the file has: the last securities end early, those before start late."""
    listed = np.ones((config.num_securities, config.num_sessions), dtype=bool)
    for k in range(config.num_delisted):
        end = config.num_sessions * (k + 2) // (config.num_delisted + 3)
        listed[config.num_securities - 1 - k, end:] = False
    for k in range(config.num_listed_late):
        start = config.num_sessions * (k + 1) // (config.num_listed_late + 3)
        listed[config.num_securities - 1 - config.num_delisted - k, :start] = False
    return listed
