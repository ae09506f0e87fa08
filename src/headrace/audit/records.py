"""The audit's result: the schema of one versioned JSON object.

Owns the layout. The invariant: every
number a reader may quote is a :class:`Figure` and carries how many observations it rests on,
its interval and how that was made, the version of the protocol that produced it and the
fingerprint of the stack that produced the embeddings. NaN and infinity never reach the file.
It computes no statistic and draws nothing; :mod:`headrace.audit.codec` reads and writes the file.

Versions: ``schema_version`` rises when a field is removed or changes its meaning; new
optional fields do not raise it, and readers ignore keys that they do not know.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = "headrace.audit"
SCHEMA_VERSION = 1

Verdict = Literal[
    "too_little_data", "not_identified", "no_detectable_skill", "skill", "knows_the_future"
]
VERDICTS: tuple[str, ...] = typing.get_args(Verdict)
Channel = Literal["common", "entity"]
CHANNELS: tuple[Channel, ...] = ("common", "entity")


@dataclass(frozen=True, kw_only=True)
class Null:
    """What a statistic looks like when the embedding cannot know the label.

    Attributes:
        kind: ``"shifted_dates"``, or ``"twins"`` (a reference, never a test).
        num_draws: values behind the summary.
        median, sd, q05, q95: of those values.
        values: the values themselves, in the order of the offsets or of the twins.
    """

    kind: str
    num_draws: int
    median: float | None
    sd: float | None
    q05: float | None
    q95: float | None
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number with everything that is needed to quote it.

    Attributes:
        value: the estimate; ``None`` when it could not be computed (``note`` says why).
        n: observations behind it, counted in ``n_unit``.
        n_unit: ``"rows"``, ``"dates"`` or ``"documents"``.
        low, high: interval at ``level``; ``None`` where no interval holds up.
        method: how interval and p-value were made: ``"date_block_t"``, ``"entity_cluster_t"``,
            ``"shifted_dates"``, ...
        num_blocks: date blocks behind a block interval; entities behind one of entity clusters.
        p_value, p_adjusted: as tested, and after the correction named in ``adjustment``.
        null: distribution under shifted dates.
        twins: the same statistic of the untrained twins.
        protocol: name and version of the evaluation protocol, ``"purged_kfold(10)/1"``.
        stack: fingerprint of the stack that produced the embeddings (key of ``stacks``).
        note: a sentence a reader needs beside the number.
    """

    value: float | None
    n: int
    n_unit: str
    protocol: str
    stack: str
    low: float | None = None
    high: float | None = None
    level: float = 0.95
    method: str = ""
    num_blocks: int | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    adjustment: str = ""
    null: Null | None = None
    twins: Null | None = None
    note: str = ""

    def written(self) -> str:
        """``0.012 [-0.003, 0.027]``, or the note of a figure that could not be had."""
        if self.value is None:
            return self.note
        interval = "" if self.low is None else f" [{self.low:.4f}, {self.high:.4f}]"
        return f"{self.value:.4f}{interval}"


@dataclass(frozen=True, kw_only=True)
class PanelRecord:
    """What was audited. Counts are after dropping; ``dropped`` says what went and why.

    ``num_rows`` rows have an embedding; ``num_matrix_rows`` have a target and serve the
    shifted dates. ``coverage`` is the filled share of the entity x date rectangle.
    """

    name: str
    sha256: str
    num_rows: int
    num_matrix_rows: int
    num_entities: int
    num_dates: int
    first_date: str
    last_date: str
    coverage: float
    label_sessions: int
    features: tuple[str, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EmbeddingRecord:
    """Where a model's vectors came from; ``None`` for what a bare array does not tell."""

    dimension: int
    num_rows: int
    source: str
    sha256: str | None = None
    weights: str | None = None
    template: str | None = None
    pooling: str | None = None
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """What the field prints (no verdict rests on it), and the leakage of the evaluation itself.

    ``premium`` = ``r2_on`` - ``r2_off``; ``premium_matched`` tests both arms on the same rows.
    ``leakage`` is the statistic C of ``seen_unseen``.
    """

    r2_on: Figure
    r2_off: Figure
    premium: Figure
    premium_matched: Figure
    leakage: Figure


@dataclass(frozen=True, kw_only=True)
class ContaminationRecord:
    """Covariance gain over the reference, as a share of var(y), around a model's cutoff.

    ``contrast`` = ``before`` - ``after``, one-sided. ``detectable`` is the contrast that
    would have been seen with 80% probability. ``reference`` names what was subtracted. ``own``
    is the contrast of the model's predictions alone: without p < 0.2 there nothing is claimed.
    """

    channel: Channel
    before: Figure
    after: Figure
    contrast: Figure
    detectable: float | None
    reference: str
    own: Figure | None = None


@dataclass(frozen=True, kw_only=True)
class RecallRecord:
    """The recall probe: stated against true market returns, on each side of the cutoff."""

    before: Figure | None
    after: Figure | None


@dataclass(frozen=True, kw_only=True)
class PeriodRecord:
    """One stretch of dates of the picture of skill over time."""

    start: str
    end: str
    side: Literal["before", "gap", "after", "unknown"]
    common: Figure | None
    entity: Figure | None


@dataclass(frozen=True, kw_only=True)
class SplitRecord:
    """One row of the walk-forward table (the pooled row has ``label="pooled"``)."""

    label: str
    train_start: str
    train_end: str
    test_start: str
    test_end: str
    num_train: int
    r2: Figure


@dataclass(frozen=True, kw_only=True)
class EmbargoRecord:
    """One row of the embargo table: the leakage-off arm with sessions left out of training."""

    embargo_sessions: int
    r2_off: Figure
    premium: Figure


@dataclass(frozen=True, kw_only=True)
class PerplexityRecord:
    """Mean loss of a model on the documents of one month."""

    month: str
    loss: Figure


@dataclass(frozen=True, kw_only=True)
class FindingRecord:
    """A known defect of a published evaluation, looked for here.

    ``present`` is ``None`` where the data cannot tell.
    """

    name: str
    present: bool | None
    detail: str


@dataclass(frozen=True, kw_only=True)
class PublishedRecord:
    """Protocol ``vessl-2026`` to the letter; its interval is biased, see ``findings``."""

    r2_on: Figure
    r2_off: Figure
    premium: Figure
    num_draws: int
    num_failed_draws: int
    findings: tuple[FindingRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """Everything about one audited model. ``summary`` is page one, sentence by sentence."""

    name: str
    cutoff: str | None
    stack: str
    embedding: EmbeddingRecord
    verdict: Verdict
    summary: tuple[str, ...]
    channels: tuple[Channel, ...] = ()
    share_of_r2: float | None = None
    cautions: tuple[str, ...] = ()
    evaluation: EvaluationRecord | None = None
    skill: dict[str, Figure] = field(default_factory=dict)
    contamination: dict[str, ContaminationRecord] = field(default_factory=dict)
    recall: RecallRecord | None = None
    periods: tuple[PeriodRecord, ...] = ()
    walk_forward: tuple[SplitRecord, ...] = ()
    embargo: tuple[EmbargoRecord, ...] = ()
    perplexity: tuple[PerplexityRecord, ...] = ()
    published: PublishedRecord | None = None


@dataclass(frozen=True, kw_only=True)
class ControlRecord:
    """The positive control: an embedding into which a leak of known size was planted.

    ``detected`` says whether the contrast found it at that cutoff, on this panel; where it did
    not, the absence of a claim about the models says little.
    """

    cutoff: str
    planted_share: float
    detected: bool
    contrasts: dict[str, Figure]


@dataclass(frozen=True, kw_only=True)
class ReductionRecord:
    """What training removed, ``base`` minus ``trained``: skill by channel, then the premium.

    ``walk_forward`` is the difference of pooled R2, ``embargo`` that of the chronological arm and
    of the matched premium at each embargo; rows are paired.
    """

    base: str
    trained: str
    skill: dict[str, Figure]
    premium: Figure
    published: Figure | None = None
    walk_forward: Figure | None = None
    embargo: tuple[EmbargoRecord, ...] = ()

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure with the words for it."""
        for channel, figure in self.skill.items():
            yield f"skill, {channel}", figure
        yield "premium", self.premium
        if self.walk_forward is not None:
            yield "walk-forward R2", self.walk_forward
        for row in self.embargo:
            yield f"matched premium, embargo {row.embargo_sessions}", row.premium


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The whole file.

    Attributes:
        schema, schema_version: ``"headrace.audit"`` and the version of this layout.
        headrace_version: what wrote the file.
        settings: every choice that shaped the figures, by name.
        panel: the rows that were audited.
        stacks: fingerprint to its parts (library versions, device, dtype, ...).
        mixed_stacks: models of different stacks were compared because the user forced it.
        models: audited models in the order given.
        twins: names of the reference networks.
        reductions: for each (base, trained) pair asked for.
        controls: the positive control at every cutoff that was tested.
        slope: skill gain per year of knowledge cutoff over the models, when there are several.
        warnings: what the reader must know before any figure.
    """

    panel: PanelRecord
    models: tuple[ModelRecord, ...]
    settings: dict[str, Any]
    stacks: dict[str, dict[str, str]]
    headrace_version: str
    schema: str = SCHEMA
    schema_version: int = SCHEMA_VERSION
    mixed_stacks: bool = False
    twins: tuple[str, ...] = ()
    reductions: tuple[ReductionRecord, ...] = ()
    controls: tuple[ControlRecord, ...] = ()
    slope: dict[str, Figure] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def model(self, name: str) -> ModelRecord:
        """The record of the model called ``name``."""
        for record in self.models:
            if record.name == name:
                return record
        raise DataError(
            f"no model named {name!r} in this audit; it has: {self._names()}",
            remedy="one of these names",
        )

    def _names(self) -> str:
        return ", ".join(record.name for record in self.models)
