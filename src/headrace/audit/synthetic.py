"""Simulated panels in which what can be known is known.

Owns the simulation that every statistic was checked on before it was trusted: a market with
GARCH volatility and Student t(4) shocks, entity noise, numeric features, and the embeddings of
:mod:`headrace.audit.synthetic_embeddings` with planted knowledge of stated size. The invariant:
what is planted is named in the configuration and is all there is; with every share at 0, the
embedding knows nothing. It estimates nothing.

Shape legend: N entities, T sessions, n embedded rows, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from headrace.audit.panel import Panel
from headrace.audit.synthetic_embeddings import NetworkKind, PlantedKnowledge, draw_embeddings
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.audit.records import Channel

    Array = NDArray[np.float64]

_NUM_FEATURES = 3


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """What is simulated.

    Attributes:
        num_entities, num_sessions: of the panel; its matrix of targets is full.
        rows_per_entity: embedded rows an entity, on random dates.
        dimension: of the embeddings.
        network: how it reads dates, see :mod:`headrace.audit.synthetic_embeddings`.
        num_twins: untrained networks beside the audited one.
        common_share: share of var(y) that all entities share.
        feature_skill: share of var(y) that is linear in a numeric feature, which the network
            reads too: honest skill with nothing of its own.
        skill: share of var(y), in each channel, that the embedding knows on every date.
        skill_constant_in: ``"share"``: of var(y), volatility included; ``"units"``: of y, so
            that a break of volatility changes the share.
        leak: share of var(y), in each channel, that it knows before the cutoff only.
        channels: those that skill and leak are planted in.
        entity_effect: share of var(y) of effects of entities that come and go: honest skill, for
            the network reads which entity a row is of.
        effect_persistence: correlation of an effect from one session to the next.
        volatility_break: noise after the cutoff, as a factor of that before it.
        cutoff_fraction: share of the sessions before the cutoff.
        seed: of everything.
    """

    num_entities: int = 300
    num_sessions: int = 1171
    rows_per_entity: int = 30
    dimension: int = 64
    network: NetworkKind = "digits"
    num_twins: int = 4
    common_share: float = 0.3
    feature_skill: float = 0.0
    skill: float = 0.0
    skill_constant_in: Literal["share", "units"] = "share"
    leak: float = 0.0
    channels: tuple[Channel, ...] = ("common", "entity")
    entity_effect: float = 0.0
    effect_persistence: float = 0.995
    volatility_break: float = 1.0
    cutoff_fraction: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        planted = self.skill + self.leak
        if planted >= min(self.common_share, 1.0 - self.common_share):
            raise ConfigError(
                f"a channel cannot hold a planted share of {planted}",
                remedy="lower skill or leak: together below common_share, and below 1 less it",
            )
        if self.rows_per_entity > self.num_sessions:
            raise ConfigError(
                f"{self.rows_per_entity} rows an entity of {self.num_sessions} sessions",
                remedy="at most one row a session",
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


def _effects(config: SyntheticConfig, rng: np.random.Generator) -> Array:
    """``(N, T)`` of unit variance, each row an AR(1) of its own."""
    effects = rng.standard_normal((config.num_entities, config.num_sessions))
    rho = config.effect_persistence
    effects[:, 1:] *= np.sqrt(1.0 - rho**2)
    for t in range(1, config.num_sessions):
        effects[:, t] += rho * effects[:, t - 1]
    return effects


def simulate(config: SyntheticConfig) -> SyntheticAudit:
    """Draw one panel with its embeddings."""
    rng = np.random.default_rng(config.seed)
    shape = (config.num_entities, config.num_sessions)
    dates = np.busday_offset("2015-01-05", np.arange(config.num_sessions), roll="forward")
    cutoff_session = int(config.cutoff_fraction * config.num_sessions)
    before = np.arange(config.num_sessions) < cutoff_session
    volatility = np.where(before, 1.0, config.volatility_break)
    common = np.sqrt(config.common_share) * market_shocks(config.num_sessions, rng)
    entity = np.sqrt(1.0 - config.common_share) * rng.standard_normal(shape)
    features = rng.standard_normal((*shape, _NUM_FEATURES))
    y = (common[None] + entity) * volatility[None]
    y += np.sqrt(config.feature_skill) * features[:, :, 0]
    if config.entity_effect:
        y += np.sqrt(config.entity_effect) * _effects(config, rng)
    knowledge: list[PlantedKnowledge] = []
    everywhere = np.ones(config.num_sessions, dtype=bool)
    for channel in config.channels:
        own = common[None] if channel == "common" else entity
        if config.skill and config.skill_constant_in == "units":
            own = np.sqrt(config.skill) * rng.standard_normal(own.shape)
            y = y + own
            knowledge.append(PlantedKnowledge(signal=own, share=None, known=everywhere))
        elif config.skill:
            knowledge.append(PlantedKnowledge(signal=own, share=config.skill, known=everywhere))
        if config.leak:
            knowledge.append(PlantedKnowledge(signal=own, share=config.leak, known=before))
    embedded = np.zeros(shape, dtype=bool)
    for row in embedded:
        row[rng.choice(config.num_sessions, config.rows_per_entity, replace=False)] = True
    panel = _panel(config, dates, y, features, embedded)
    embedding, twins = draw_embeddings(
        panel,
        knowledge,
        network=config.network,
        dimension=config.dimension,
        num_twins=config.num_twins,
        seed=config.seed,
    )
    return SyntheticAudit(
        panel=panel, embedding=embedding, twins=twins, cutoff=str(dates[cutoff_session - 1])
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
    ends = (moments.astype(np.int64) + 86_399_000_000).astype("datetime64[us]")
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
