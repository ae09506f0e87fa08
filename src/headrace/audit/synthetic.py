"""Simulated panels and embeddings in which what is known is known.

Owns the simulation that every statistic was checked on before it was trusted: a market with
GARCH volatility and Student t(4) shocks, entity noise, numeric features, random networks that
read a prompt with its date, and planted knowledge of stated size. The invariant: what is
planted is named in the configuration and is all there is; with every share at 0, the embedding
knows nothing. It estimates nothing.

Shares are of the variance of y. Per channel: an embedding with ``leak=0.03`` holds, in each
channel named, a signal that explains 0.03 of var(y) on dates before the cutoff and nothing
after it.

Shape legend: N entities, T sessions, n embedded rows, D dimensions, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from headrace.audit.panel import Panel
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.audit.records import Channel

    Array = NDArray[np.float64]

_H = 64
_NUM_FEATURES = 3


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """What is simulated.

    Attributes:
        num_entities, num_sessions: of the panel; its matrix of targets is full.
        rows_per_entity: embedded rows an entity, on random dates.
        dimension: of the embeddings.
        network: ``"digits"`` reads year, month and day as tokens; ``"calendar"`` encodes dates
            smoothly and knows as little.
        num_twins: untrained networks beside the audited one.
        common_share: share of var(y) that all entities share.
        feature_skill: share of var(y) that is linear in a numeric feature, which the network
            reads too: honest skill with nothing of its own.
        skill: share of var(y), in each channel, that the embedding knows on every date.
        skill_constant_in: ``"share"``: of var(y), volatility included; ``"units"``: of y, so
            that a break of volatility changes the share.
        leak: share of var(y), in each channel, that it knows before the cutoff only.
        channels: those that skill and leak are planted in.
        volatility_break: noise after the cutoff, as a factor of that before it.
        cutoff_fraction: share of the sessions before the cutoff.
        seed: of everything.
    """

    num_entities: int = 300
    num_sessions: int = 1171
    rows_per_entity: int = 30
    dimension: int = 64
    network: Literal["digits", "calendar"] = "digits"
    num_twins: int = 4
    common_share: float = 0.3
    feature_skill: float = 0.0
    skill: float = 0.0
    skill_constant_in: Literal["share", "units"] = "share"
    leak: float = 0.0
    channels: tuple[Channel, ...] = ("common", "entity")
    volatility_break: float = 1.0
    cutoff_fraction: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        planted = self.skill + self.leak
        if planted >= min(self.common_share, 1.0 - self.common_share):
            raise ConfigError(f"a channel cannot hold a planted share of {planted}")
        if self.rows_per_entity > self.num_sessions:
            raise ConfigError(
                f"{self.rows_per_entity} rows an entity of {self.num_sessions} sessions"
            )


@dataclass(frozen=True, kw_only=True)
class SyntheticAudit:
    """A panel with its embeddings.

    Attributes:
        panel: full matrix of targets, ``rows_per_entity`` embedded rows an entity.
        embedding: ``(n, D)`` float32 of the audited network.
        twins: ``(n, D)`` each, of untrained networks that read the same prompts.
        cutoff: ISO date of the last session before the cutoff.
    """

    panel: Panel
    embedding: NDArray[np.float32]
    twins: dict[str, NDArray[np.float32]]
    cutoff: str


def market_shocks(num_sessions: int, rng: np.random.Generator) -> Array:
    """``(T,)`` GARCH(1, 1) shocks with Student t(4) tails, scaled to variance 1."""
    burn = 200
    innovations = rng.standard_t(4, num_sessions + burn) / np.sqrt(2.0)
    shocks = np.empty(num_sessions + burn)
    variance = 1.0
    for t, innovation in enumerate(innovations):
        shocks[t] = np.sqrt(variance) * innovation
        # The square is bounded so that one draw of a t(4) cannot end the simulation.
        variance = 0.05 + 0.08 * min(shocks[t] ** 2, 25.0) + 0.87 * variance
    kept = shocks[burn:]
    scaled: Array = kept / kept.std()
    return scaled


def _date_encoding(
    config: SyntheticConfig, dates: NDArray[np.datetime64], rng: np.random.Generator
) -> Array:
    """``(T, H)`` of what a network sees of a date."""
    if config.network == "calendar":
        day = np.arange(config.num_sessions)[:, None]
        scales = np.exp(rng.uniform(np.log(10), np.log(600), _H))
        return 2.0 * np.cos(day / scales + rng.uniform(0, 2 * np.pi, _H))
    year = dates.astype("datetime64[Y]").astype(np.int64)
    month = dates.astype("datetime64[M]").astype(np.int64) % 12
    day = (dates.astype("datetime64[D]") - dates.astype("datetime64[M]")).astype(np.int64)
    encoding = np.zeros((config.num_sessions, _H))
    for token in (year - year.min(), month, day // 10, day % 10):
        encoding += rng.standard_normal((int(token.max()) + 1, _H))[token]
    return encoding


def _network(inputs_nH: Array, dimension: int, rng: np.random.Generator) -> Array:
    """Two random layers, no training: ``(n, D)``, unit variance in every dimension."""
    hidden = np.tanh(
        inputs_nH @ (rng.standard_normal((_H, 2 * _H)) / (12.0)) + 0.3 * rng.standard_normal(2 * _H)
    )
    out = np.tanh(hidden @ (rng.standard_normal((2 * _H, dimension)) / 8.0))
    scaled: Array = out / out.std(axis=0)
    return scaled


def _noisy(signal: Array, share: float, rng: np.random.Generator) -> Array:
    """Signal plus noise, unit variance, of squared correlation ``share / var(signal)``."""
    ratio = share / signal.var()
    noisy = signal + signal.std() * np.sqrt(1.0 / ratio - 1.0) * rng.standard_normal(signal.shape)
    scaled: Array = noisy / noisy.std()
    return scaled


class _Embedding:
    """An embedding to which signals are added, each spread over an eighth of its dimensions."""

    def __init__(self, values: Array, rng: np.random.Generator) -> None:
        self.values, self._rng = values, rng
        self._width = max(1, values.shape[1] // 8)
        self._next = 0

    def plant(self, signal_n: Array) -> None:
        signs = self._rng.choice([-1.0, 1.0], self._width)
        columns = np.arange(self._next, self._next + self._width) % self.values.shape[1]
        self.values[:, columns] += signal_n[:, None] * signs
        self._next += self._width


def simulate(config: SyntheticConfig) -> SyntheticAudit:
    """Draw one panel with its embeddings."""
    rng = np.random.default_rng(config.seed)
    num_entities, num_sessions = config.num_entities, config.num_sessions
    dates = np.busday_offset("2015-01-05", np.arange(num_sessions), roll="forward")
    cutoff_session = int(config.cutoff_fraction * num_sessions)
    before = np.arange(num_sessions) < cutoff_session
    volatility = np.where(before, 1.0, config.volatility_break)
    common = np.sqrt(config.common_share) * market_shocks(num_sessions, rng)
    entity = np.sqrt(1.0 - config.common_share) * rng.standard_normal((num_entities, num_sessions))
    features = rng.standard_normal((num_entities, num_sessions, _NUM_FEATURES))
    y = (common[None] + entity) * volatility[None]
    y += np.sqrt(config.feature_skill) * features[:, :, 0]

    rows = np.stack(
        [
            np.sort(rng.choice(num_sessions, config.rows_per_entity, replace=False))
            for _ in range(num_entities)
        ]
    )
    unit = np.repeat(np.arange(num_entities), config.rows_per_entity)
    session = rows.reshape(-1)
    inputs = _date_encoding(config, dates, rng)[session]
    inputs = inputs + 0.7 * rng.standard_normal((num_entities, _H))[unit]
    inputs += 0.5 * features[unit, session] @ rng.standard_normal((_NUM_FEATURES, _H))
    embedding = _Embedding(_network(inputs, config.dimension, rng), rng)

    def plant(share: float, known: NDArray[np.bool_]) -> None:
        """Plant knowledge of each channel on the sessions of ``known``, noise on the others."""
        for channel in config.channels:
            noise = rng.standard_normal(num_sessions if channel == "common" else len(session))
            if channel == "common":
                knows, noise = _noisy(common, share, rng)[session], noise[session]
            else:
                knows = _noisy(entity[unit, session], share, rng)
            embedding.plant(np.where(known[session], knows, noise))

    if config.skill and config.skill_constant_in == "units":
        for channel in config.channels:
            extra = rng.standard_normal((1 if channel == "common" else num_entities, num_sessions))
            y = y + np.sqrt(config.skill) * extra
            embedding.plant(np.broadcast_to(extra, y.shape)[unit, session])
    elif config.skill:
        plant(config.skill, np.ones(num_sessions, dtype=bool))
    if config.leak:
        plant(config.leak, before)

    embedded = np.zeros((num_entities, num_sessions), dtype=bool)
    embedded[unit, session] = True
    return SyntheticAudit(
        panel=_panel(config, dates, y, features, embedded),
        embedding=embedding.values.astype(np.float32),
        twins={
            f"twin {k}": _network(
                inputs, config.dimension, np.random.default_rng((config.seed, k))
            ).astype(np.float32)
            for k in range(config.num_twins)
        },
        cutoff=str(dates[cutoff_session - 1]),
    )


def _panel(
    config: SyntheticConfig,
    dates: NDArray[np.datetime64],
    y: Array,
    features: Array,
    embedded: NDArray[np.bool_],
) -> Panel:
    """Built without the checks of ``make_panel``: keys are unique by construction."""
    num_entities, num_sessions = y.shape
    unit, session = np.divmod(np.arange(y.size), num_sessions)
    moments = dates.astype("datetime64[us]")
    ends = moments + np.timedelta64(86_399, "s")
    return Panel(
        name=f"synthetic {num_entities} x {num_sessions}, seed {config.seed}",
        entities=np.array([f"E{k:05d}" for k in range(num_entities)]),
        sessions=moments,
        entity=unit.astype(np.int32),
        session=session.astype(np.int32),
        label_start=moments[session],
        label_end=ends[session],
        y=y.reshape(-1),
        features=features.reshape(y.size, -1),
        feature_names=tuple(f"feature_{k}" for k in range(features.shape[2])),
        embedded=embedded.reshape(-1),
    )
