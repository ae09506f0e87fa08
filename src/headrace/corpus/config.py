"""What a corpus is built from and how it is checked: the YAML file's keys.

Defaults are the safe side. Sources declare their rule for ``available_at`` here; what a rule
does is in :mod:`headrace.corpus.cutoff`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from headrace.corpus.checks.languages import LANGUAGES
from headrace.corpus.cutoff import AvailabilityRule, Cutoff, parse_cutoff
from headrace.corpus.instants import MICROSECONDS, time_zone
from headrace.corpus.settings import Settings, apply_overrides, load_yaml, validate
from headrace.corpus.source_config import SourceSettings, whole_year
from headrace.errors import ConfigError
from headrace.units import parse_bytes, parse_count

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Action = Literal["fail", "warn", "off"]


class FutureMentions(Settings):
    """Dates, years and dated entities after the cutoff in the text's body."""

    action: Action = "warn"
    max_share: Share = 0.02  # documents with a strong mention among all
    entities_file: str | None = None  # YAML: entity -> first public date, beside the built-in
    num_examples: int = Field(default=10, ge=0, le=1000)


class NearDuplicates(Settings):
    """MinHash over word shingles; the earliest of near-equal documents is kept."""

    enabled: bool = True
    threshold: Annotated[float, Field(ge=0.4, le=1.0)] = 0.75  # estimated Jaccard similarity
    shingle_words: int = Field(default=5, ge=1, le=32)
    num_perm: int = Field(default=112, ge=16, le=512)
    num_bands: int = Field(default=14, ge=1, le=128)
    seed: int = Field(default=1, ge=0)
    action: Action = "warn"
    max_share: Share = 0.5

    @model_validator(mode="after")
    def _bands_divide(self) -> NearDuplicates:
        if self.num_perm % self.num_bands:
            raise ValueError(f"num_bands {self.num_bands} does not divide num_perm {self.num_perm}")
        return self


class Length(Settings):
    """Characters a document may have; others are filtered."""

    min_chars: int = Field(default=1, ge=1)
    max_chars: int | None = Field(default=None, ge=1)
    action: Action = "warn"
    max_share: Share = 0.5


class Languages(Settings):
    """Languages by script and function words; an empty ``keep`` keeps all and counts them."""

    keep: tuple[str, ...] = ()
    action: Action = "warn"
    max_share: Share = 0.5

    @field_validator("keep")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(value) - LANGUAGES)
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not among {', '.join(sorted(LANGUAGES))}")
        return value


class Boilerplate(Settings):
    """Page furniture: share of a document's characters in navigation, notices, repeats."""

    max_document_share: Share = 1.0  # 1.0 filters nothing
    action: Action = "warn"
    max_share: Share = 0.5


class Concentration(Settings):
    """One month or one source that carries most of the tokens: a corpus that is not spread."""

    action: Action = "warn"
    max_month_share: Share = 0.5
    max_source_share: Share = 1.0


class Revisions(Settings):
    """Documents that are later versions of others of the same source."""

    action: Action = "warn"
    max_share: Share = 0.5


class UpperBounds(Settings):
    """Documents dated by a crawl time only: available no later, perhaps much earlier."""

    action: Action = "warn"
    max_share: Share = 1.0


class Checks(Settings):
    """Every check has counts, examples, a limit, and whether passing the limit fails."""

    future_mentions: FutureMentions = FutureMentions()
    near_duplicates: NearDuplicates = NearDuplicates()
    length: Length = Length()
    languages: Languages = Languages()
    boilerplate: Boilerplate = Boilerplate()
    concentration: Concentration = Concentration()
    revisions: Revisions = Revisions()
    upper_bounds: UpperBounds = UpperBounds()


class Sampling(Settings):
    """Which documents fill the token budget."""

    max_tokens: int | None = None  # also "1B"; None keeps everything
    spread: Literal["month", "year", "none"] = "month"
    weights: Mapping[str, float] = Field(default_factory=dict)  # source -> share of the budget
    seed: int = Field(default=0, ge=0)

    @field_validator("max_tokens", mode="before")
    @classmethod
    def _counted(cls, value: object) -> object:
        return value if value is None else parse_count(cast("str", value))


class Executor(Settings):
    """Run the build's jobs as tasks of a datatrove executor, over a shared file system."""

    type: Literal["local", "slurm", "ray"]
    tasks: int = Field(ge=1)
    options: Mapping[str, Any] = Field(default_factory=dict)  # partition, time, workers, …


class BaseModel(Settings):
    """The model that will be trained further on this corpus; only named, never read."""

    name: str
    knowledge_cutoff: date | None = None  # the last day it can know of, as its makers say

    @field_validator("knowledge_cutoff", mode="before")
    @classmethod
    def _whole_years(cls, value: object) -> object:
        return whole_year(value, last=True)


class TokenizerSettings(Settings):
    """A tokenizer folder or ``tokenizer.json``, or one trained on this corpus."""

    path: str | None = None
    knowledge_cutoff: date | None = None  # of a given one: the last day its vocabulary can know
    train: Literal["bpe"] | None = None
    vocab_size: int = Field(default=32_768, ge=257, le=1_000_000)
    eos_token: str | None = None
    train_bytes: int = 64 * 2**20  # text the tokenizer is trained on, spread over the corpus

    @field_validator("train_bytes", mode="before")
    @classmethod
    def _sized(cls, value: object) -> object:
        return parse_bytes(cast("str", value))

    @field_validator("knowledge_cutoff", mode="before")
    @classmethod
    def _whole_years(cls, value: object) -> object:
        return whole_year(value, last=True)

    @model_validator(mode="after")
    def _one_way(self) -> TokenizerSettings:
        if (self.path is None) == (self.train is None):
            raise ValueError("give either a path or train: bpe")
        if self.train is not None and self.knowledge_cutoff is not None:
            raise ValueError("knowledge_cutoff is for a given tokenizer; one trained here has ours")
        return self


class CorpusConfig(Settings):
    """One corpus: sources, cutoffs, checks, sampling and where it goes."""

    output_dir: str
    work_dir: str | None = None  # default: output_dir + ".work"
    cutoff: str | date | datetime | None = None
    cutoffs: Sequence[str | date] | Mapping[str, str | date] | None = None
    cutoff_timezone: str = "UTC"
    sources: tuple[Annotated[SourceSettings, Field(discriminator="type")], ...] = Field(
        min_length=1
    )
    checks: Checks = Checks()
    sampling: Sampling = Sampling()
    tokenizer: TokenizerSettings | None = None
    base_model: BaseModel | None = None
    max_bad_share: Share = 0.05
    max_document_bytes: int = 16 * 2**20
    not_before: date = date(1900, 1, 1)
    not_after: date | None = None
    num_workers: int | None = Field(default=None, ge=1)
    shard_bytes: int = 256 * 2**20
    executor: Executor | None = None

    @field_validator("max_document_bytes", "shard_bytes", mode="before")
    @classmethod
    def _sized(cls, value: object) -> object:
        return parse_bytes(cast("str", value))

    @field_validator("cutoff", mode="before")
    @classmethod
    def _year_is_no_timestamp(cls, value: object) -> object:
        return str(value) if isinstance(value, int) else value

    @field_validator("cutoffs", mode="before")
    @classmethod
    def _years_are_no_timestamps(cls, value: object) -> object:
        if isinstance(value, Mapping):
            return {
                str(key): str(item) if isinstance(item, int) else item
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [str(item) if isinstance(item, int) else item for item in value]
        return value

    @field_validator("not_before", "not_after", mode="before")
    @classmethod
    def _whole_years(cls, value: object, info: ValidationInfo) -> object:
        return whole_year(value, last=info.field_name == "not_after")

    @field_validator("base_model", mode="before")
    @classmethod
    def _named_model(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("tokenizer", mode="before")
    @classmethod
    def _named_tokenizer(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> CorpusConfig:
        if (self.cutoff is None) == (self.cutoffs is None):
            raise ValueError("give either cutoff or cutoffs")
        names = [source.name for source in self.sources]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"source names must differ: {', '.join(sorted(twice))}")
        unknown = set(self.sampling.weights) - set(names)
        if unknown:
            raise ValueError(f"sampling.weights names no source: {', '.join(sorted(unknown))}")
        if self.sampling.max_tokens is not None and self.tokenizer is None:
            raise ValueError("sampling.max_tokens needs a tokenizer")
        time_zone(self.cutoff_timezone)
        return self

    def vintages(self) -> tuple[Cutoff, ...]:
        """The cutoffs, earliest first.

        Raises:
            ConfigError: a cutoff is no date, a name is no folder name, or two are the same.
        """
        if self.cutoff is not None:
            return (parse_cutoff(self.cutoff, timezone=self.cutoff_timezone),)
        assert self.cutoffs is not None
        named = (
            self.cutoffs.items()
            if isinstance(self.cutoffs, Mapping)
            else [(str(item), item) for item in self.cutoffs]
        )
        result = [
            parse_cutoff(item, name=str(name), timezone=self.cutoff_timezone)
            for name, item in named
        ]
        if not result:
            raise ConfigError("cutoffs is empty", remedy="give at least one date")
        for cutoff in result:
            if not _NAME.fullmatch(cutoff.name) or cutoff.name in {"documents", "tokens"}:
                raise ConfigError(
                    f"cutoff name {cutoff.name!r} cannot name a folder",
                    remedy="write cutoffs as {name: date} with letters, digits, '.', '_' or '-'",
                )
        result.sort(key=lambda cutoff: cutoff.instant_us)
        instants = [cutoff.instant_us for cutoff in result]
        if len(set(instants)) < len(instants):
            raise ConfigError("two cutoffs are the same instant", remedy="leave one out")
        return tuple(result)

    @property
    def work_path(self) -> Path:
        """Where resumable pieces live; deleting it costs time, never data."""
        return Path(self.work_dir or f"{self.output_dir.rstrip('/')}.work")


def rule_for(config: CorpusConfig, source: SourceSettings) -> AvailabilityRule:
    """The rule of one source: its type's declaration, changed by what the file says."""
    declared = source.available_at
    preset = source.preset()
    return AvailabilityRule(
        fields=declared.fields or preset.fields,
        upper_bound_fields=(
            declared.upper_bound_fields
            if declared.upper_bound_fields is not None
            else preset.upper_bound_fields
        ),
        fields_are_bounds=(
            declared.upper_bound
            if declared.upper_bound is not None
            else (preset.fields_are_bounds and not declared.fields)
        ),
        format=declared.format or (preset.format if not declared.fields else "auto"),
        timezone=declared.timezone or preset.timezone,
        delay_us=round(declared.delay * MICROSECONDS),
        calendar=declared.calendar or preset.calendar,
        after=time.fromisoformat(declared.after) if declared.after else None,
        not_before=source.not_before or config.not_before,
        not_after=source.not_after or config.not_after,
    )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> CorpusConfig:
    """Read a YAML file, apply ``key=value`` words, check everything that needs no data.

    Relative paths in the file are relative to the working directory.

    Raises:
        ConfigError: anything in the file or the words is wrong.
    """
    values = apply_overrides(load_yaml(Path(path)), overrides)
    return config_from(values, origin=str(path))


def config_from(values: Mapping[str, Any], *, origin: str = "corpus configuration") -> CorpusConfig:
    """A configuration from a mapping, as the YAML file would give it."""
    config = validate(CorpusConfig, values, origin=origin)
    config.vintages()
    return config
