"""The quickstart's price panel: the full entity x date matrix, some dates of it for embeddings.

Every row is a forecast made after the close of ``date``: bought at the next close, sold one
session later. Features are functions of returns up to ``date``; neither they nor the target
contain a price level, because levels are adjusted as of 2022. The full matrix serves the
shifted dates; embeddings are paid for on one date drawn from each run of ``stride`` sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import ConfigError
from headrace.quickstart.sources import COMPANY_NAMES, Closes

if TYPE_CHECKING:
    import polars as pl

LABEL_SESSIONS = 2
_HISTORY = 20
FEATURES = ("return_1", "return_5", "return_20", "volatility_20")


@dataclass(frozen=True, kw_only=True)
class PanelConfig:
    """Which part of the closes becomes the panel.

    Attributes:
        first: first date a forecast may be made on.
        last: last date a forecast may be made on.
        stride: sessions of which one gets embeddings.
        num_entities: the first so many tickers.
        seed: of the draw of dates.
    """

    first: date = date(2003, 1, 1)
    last: date = date(2010, 12, 31)
    stride: int = 5
    num_entities: int = 20
    seed: int = 0


def build_panel(closes: Closes, config: PanelConfig) -> pl.DataFrame:
    """The panel as the audit reads it: keys, label interval, target, features, prompts.

    Columns are ``entity, date, label_start, label_end, y``, those of :data:`FEATURES`,
    ``embedded``, and ``prompt`` (of embedded rows). Rows are in order of date, then ticker.
    ``y`` is ``close[t+2] / close[t+1] - 1``, as in the JPX competition; returns are
    logarithmic, volatility is their standard deviation over 20 sessions.

    Raises:
        ConfigError: the dates leave fewer than two sessions.
    """
    import polars as pl  # noqa: PLC0415 (half a second; the panel is built once)

    days = np.array(closes.dates, dtype="datetime64[D]")
    inside = (days >= np.datetime64(config.first)) & (days <= np.datetime64(config.last))
    positions = np.flatnonzero(inside)
    positions = positions[
        (positions >= _HISTORY) & (positions + LABEL_SESSIONS < len(closes.dates))
    ]
    if len(positions) < 2 or config.stride < 1:
        raise ConfigError(
            f"the panel from {config.first} to {config.last} has {len(positions)} sessions "
            f"with a stride of {config.stride}",
            remedy=f"choose dates between {closes.dates[_HISTORY]} and "
            f"{closes.dates[-1 - LABEL_SESSIONS]}",
        )
    entities = closes.entities[: config.num_entities]
    close = closes.close[:, : config.num_entities]
    chosen = _draw_dates(len(positions), config.stride, config.seed)
    width = len(entities)
    columns: dict[str, object] = {
        "entity": np.tile(np.array(entities), len(positions)),
        "date": np.repeat(days[positions], width),
        "label_start": np.repeat(days[positions + 1], width),
        "label_end": np.repeat(days[positions + LABEL_SESSIONS], width),
        "y": (close[positions + 2] / close[positions + 1] - 1).ravel(),
    }
    columns |= {name: values.ravel() for name, values in _features(close, positions).items()}
    columns["embedded"] = np.repeat(chosen, width)
    columns["prompt"] = [
        prompt(entity, closes.dates[position]) if embedded else None
        for position, embedded in zip(positions, chosen, strict=True)
        for entity in entities
    ]
    return pl.DataFrame(columns)


def _features(close: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
    log = np.log(close)
    steps = np.diff(log, axis=0)  # steps[t - 1] is the return of session t
    windows = np.lib.stride_tricks.sliding_window_view(steps, _HISTORY, axis=0)
    return {
        "return_1": log[positions] - log[positions - 1],
        "return_5": log[positions] - log[positions - 5],
        "return_20": log[positions] - log[positions - 20],
        "volatility_20": windows[positions - _HISTORY].std(axis=-1, ddof=1),
    }


def _draw_dates(num_dates: int, stride: int, seed: int) -> np.ndarray:
    """One date of each run of ``stride``, at random: no weekday is favoured."""
    rng = np.random.default_rng(seed)
    chosen = np.zeros(num_dates, dtype=bool)
    for start in range(0, num_dates, stride):
        chosen[start + rng.integers(min(stride, num_dates - start))] = True
    return chosen


def prompt(entity: str, day: date) -> str:
    """What a model reads before a forecast: the day and the company, in the addresses' style."""
    name = COMPANY_NAMES.get(entity, entity)
    return f"{day:%B} {day.day}, {day.year}. The shares of {name} will"
