"""Embeddings of random networks, with knowledge planted in them.

Owns two geometries of networks that read a row's date, entity and features and know nothing
(``"digits"`` reads year, month and day as tokens; ``"calendar"`` encodes dates smoothly), and
the planting of stated knowledge into them. The invariant: without planted knowledge an
embedding is a function of the row's key and features alone. It draws no targets.

Shape legend: n embedded rows, T sessions, D dimensions, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.audit.panel import Panel
    from headrace.audit.records import Channel

    Array = NDArray[np.float64]

NetworkKind = Literal["digits", "calendar"]
_H = 64


@dataclass(frozen=True, kw_only=True)
class PlantedKnowledge:
    """A signal and when it is known.

    Attributes:
        signal: ``(N, T)``, or ``(1, T)`` for what all entities share, in a unit in which the
            target has variance 1.
        share: of the target's variance that the embedding's noisy copy explains; ``None``
            plants the signal itself.
        known: ``(T,)``; on other dates noise of the same size takes its place, so that the
            embedding's scale does not tell the dates apart.
    """

    signal: Array
    share: float | None
    known: NDArray[np.bool_]


def _date_encoding(
    network: NetworkKind, dates: NDArray[np.datetime64], rng: np.random.Generator
) -> Array:
    """``(T, H)`` of what a network sees of a date."""
    if network not in {"digits", "calendar"}:
        raise ConfigError(
            f"network {network!r} is neither digits nor calendar", remedy="one of them"
        )
    if network == "calendar":
        day = np.arange(len(dates))[:, None]
        scales = np.exp(rng.uniform(np.log(10), np.log(600), _H))
        return 2.0 * np.cos(day / scales + rng.uniform(0, 2 * np.pi, _H))
    days = dates.astype("datetime64[D]")
    year = days.astype("datetime64[Y]").astype(np.int64)
    month = days.astype("datetime64[M]").astype(np.int64) % 12
    day_of_month = (days - days.astype("datetime64[M]")).astype(np.int64)
    encoding = np.zeros((len(dates), _H))
    for token in (year - year.min(), month, day_of_month // 10, day_of_month % 10):
        encoding += rng.standard_normal((int(token.max()) + 1, _H))[token]
    return encoding


def _network(inputs_nH: Array, dimension: int, rng: np.random.Generator) -> Array:
    """Two random layers, no training: ``(n, D)``, unit variance in every dimension."""
    bias, first, second = (
        rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        for shape, scale in (((2 * _H,), 0.3), ((_H, 2 * _H), 1 / 12), ((2 * _H, dimension), 1 / 8))
    )
    hidden = np.tanh(inputs_nH.astype(np.float32) @ first + bias)
    out = np.tanh(hidden @ second)
    scaled: Array = out / out.std(axis=0, dtype=np.float64)
    return scaled


def draw_embeddings(
    panel: Panel,
    knowledge: Sequence[PlantedKnowledge],
    *,
    network: NetworkKind,
    dimension: int,
    num_twins: int,
    seed: int,
) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
    """An embedding of the panel's embedded rows that holds ``knowledge``, and untrained twins.

    Returns:
        ``(n, D)``, and ``(n, D)`` by name of twin.
    """
    rng = np.random.default_rng((seed, 1))
    rows = panel.embedded_rows
    unit, session = panel.entity[rows], panel.session[rows]
    inputs = _date_encoding(network, panel.sessions, rng)[session]
    inputs += 0.7 * rng.standard_normal((panel.num_entities, _H))[unit]
    features = panel.features[rows]
    spread = features.std(axis=0)
    features = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    inputs += 0.5 * features @ rng.standard_normal((features.shape[1], _H))
    values = plant(_network(inputs, dimension, rng), panel, knowledge, rng)
    twins = {
        f"twin {k}": _network(inputs, dimension, np.random.default_rng((seed, 2, k))).astype(
            np.float32
        )
        for k in range(num_twins)
    }
    return values.astype(np.float32), twins


def knowledge_of_panel(
    panel: Panel, *, share: float, channels: tuple[Channel, ...], cutoff: np.datetime64 | None
) -> list[PlantedKnowledge]:
    """Knowledge of a panel's own targets, to plant in an embedding of it.

    Args:
        panel: full matrix of targets.
        share: of var(y), in each channel.
        channels: to plant in.
        cutoff: last known date; every date where it is ``None``.
    """
    known = np.ones(panel.num_sessions, dtype=bool)
    if cutoff is not None:
        known = panel.sessions <= cutoff
    matrix = (panel.matrix(panel.y) - panel.y.mean()) / panel.y.std()
    common = np.nanmean(matrix, axis=0, keepdims=True)
    signals = {"common": common, "entity": np.nan_to_num(matrix - common, nan=0.0)}
    return [
        PlantedKnowledge(signal=signals[channel], share=share, known=known) for channel in channels
    ]


def plant(
    values_nD: NDArray[np.floating],
    panel: Panel,
    knowledge: Sequence[PlantedKnowledge],
    rng: np.random.Generator,
) -> Array:
    """``(n, D)`` with each signal added, with random signs, to an eighth of the dimensions.

    A signal has the standard deviation of the dimension that it is added to.
    """
    planted_nD: Array = np.array(values_nD, dtype=np.float64)
    rows = panel.embedded_rows
    unit, session = panel.entity[rows], panel.session[rows]
    dimension = planted_nD.shape[1]
    width = max(1, dimension // 8)
    spread = planted_nD.std(axis=0)
    for k, planted in enumerate(knowledge):
        columns = np.arange(k * width, (k + 1) * width) % dimension
        signal = _noisy_signal(planted, rng)
        cells = signal[unit if len(signal) > 1 else 0, session]
        signs = rng.choice([-1.0, 1.0], width) * np.where(spread > 0, spread, 1.0)[columns]
        planted_nD[:, columns] += cells[:, None] * signs
    return planted_nD


def _noisy_signal(planted: PlantedKnowledge, rng: np.random.Generator) -> Array:
    """Signal plus noise, unit variance; noise alone on dates that are not known."""
    signal = planted.signal
    noise = rng.standard_normal(signal.shape)
    if planted.share is not None:
        ratio = planted.share / signal.var()
        signal = signal + signal.std() * np.sqrt(1.0 / ratio - 1.0) * noise
    known: Array = np.where(planted.known, signal / signal.std(), rng.standard_normal(signal.shape))
    return known
