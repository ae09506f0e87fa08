"""The keys of each source type, and the rule for ``available_at`` that the type declares.

What a type reads is in :mod:`headrace.corpus.sources`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, time
from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from headrace.corpus.instants import time_zone
from headrace.corpus.settings import Settings

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)?")
_SECONDS = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True, kw_only=True)
class RulePreset:
    """What a source type declares about its dates."""

    fields: tuple[str, ...]
    upper_bound_fields: tuple[str, ...] = ()
    fields_are_bounds: bool = False
    format: str = "auto"
    timezone: str = "UTC"
    calendar: str | None = None


class Availability(Settings):
    """``available_at:`` of a source; a plain string is one field's name."""

    fields: tuple[str, ...] = ()
    upper_bound_fields: tuple[str, ...] | None = None
    upper_bound: bool | None = None
    format: str | None = None
    timezone: str | None = None
    delay: float = Field(default=0.0, ge=0.0)  # seconds; also "15min", "2h", "1d"
    calendar: str | None = None
    after: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: object) -> object:
        if isinstance(value, str):
            return {"fields": (value,)}
        if isinstance(value, dict) and "field" in value:
            if "fields" in value:
                raise ValueError("give either field or fields")
            value = dict(value)
            value["fields"] = (value.pop("field"),)
        return value

    @field_validator("delay", mode="before")
    @classmethod
    def _duration(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise ValueError("write a duration such as 15min, 2h or 1d")
        return float(match[1]) * _SECONDS[match[2]]

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, value: str | None) -> str | None:
        if value is not None:
            time_zone(value)
        return value

    @field_validator("after")
    @classmethod
    def _wall_clock(cls, value: str | None) -> str | None:
        if value is not None:
            time.fromisoformat(value)
        return value

    @model_validator(mode="after")
    def _after_needs_calendar(self) -> Availability:
        if self.after is not None and self.calendar is None:
            raise ValueError("after needs a calendar: the sessions it rolls to")
        return self


def whole_year(value: object, *, last: bool) -> object:
    """A bare year as its first or last day; pydantic would take it for seconds since 1970."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 9998:
        return date(value, 12, 31) if last else date(value, 1, 1)
    return value


class BaseSource(Settings):
    """Keys that every source has."""

    type: str
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    path: tuple[str, ...] = ()  # files, folders, or package:NAME/sub/folder
    pattern: str | None = None  # glob below a folder
    license: str = "unknown"
    available_at: Availability = Availability()
    not_before: date | None = None
    not_after: date | None = None
    max_bad_share: float | None = Field(default=None, ge=0.0, le=1.0)
    encodings: tuple[str, ...] = ("utf-8",)  # tried in this order
    revisions: Literal["reject", "keep"] = "reject"  # an id that comes again with other text

    default_pattern: ClassVar[str] = "**/*"
    not_data: ClassVar[str] = ""  # files with usual names that are none of the data

    @field_validator("not_before", "not_after", mode="before")
    @classmethod
    def _whole_years(cls, value: object, info: ValidationInfo) -> object:
        return whole_year(value, last=info.field_name == "not_after")

    @field_validator("path", "encodings", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("encodings")
    @classmethod
    def _text_encodings(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("give at least one encoding")
        for name in value:
            try:
                sound = b"{\n".decode(name) == "{\n"
            except (LookupError, UnicodeError):
                sound = False
            if not sound:
                raise ValueError(
                    f"{name!r} is no encoding in which ASCII is ASCII; convert the files first"
                )
        return value

    @model_validator(mode="after")
    def _has_path(self) -> BaseSource:
        if not self.path:
            raise ValueError("path is missing")
        return self

    def preset(self) -> RulePreset:
        """The rule the type declares."""
        return RulePreset(fields=("available_at",))


class RowSource(BaseSource):
    """Keys of sources whose records are rows with named fields."""

    text_field: str = "text"
    id_field: str = "id"
    event_time_field: str = "event_time"
    published_at_field: str = "published_at"
    collected_at_field: str = "collected_at"
    revision_field: str | None = None  # rows with the same value are versions of one document
    metadata_fields: tuple[str, ...] = ()  # kept beside the text, as JSON

    def preset(self) -> RulePreset:
        """``available_at`` as given in the row."""
        return RulePreset(fields=("available_at",))


class JsonlSource(RowSource):
    """JSON lines, plain or compressed (.gz, .zst, .bz2, .xz)."""

    type: Literal["jsonl"]
    default_pattern: ClassVar[str] = "**/*.{json,ndjson,jl}*"


class ParquetSource(RowSource):
    """Parquet files."""

    type: Literal["parquet"]
    default_pattern: ClassVar[str] = "**/*.parquet"


class HfDatasetSource(RowSource):
    """A Hugging Face dataset: a folder written by ``save_to_disk``, or streamed by name."""

    type: Literal["hf_dataset"]
    dataset: str | None = None  # name for datasets.load_dataset(..., streaming=True)
    config_name: str | None = None
    split: str = "train"
    revision: str | None = None  # a commit; needed when streamed from a hub
    data_files: str | tuple[str, ...] | None = None
    max_records: int | None = Field(default=None, ge=1)
    default_pattern: ClassVar[str] = "**/*.arrow"
    not_data: ClassVar[str] = "**/cache-*.arrow"  # what mapping over a data set leaves beside it

    @model_validator(mode="after")
    def _has_path(self) -> HfDatasetSource:
        if bool(self.path) == (self.dataset is not None):
            raise ValueError("give either path (a saved data set) or dataset (streamed)")
        return self


class FineWebSource(RowSource):
    """FineWeb and FineWeb-2: ``date`` and ``dump`` are crawl times, so upper bounds only."""

    type: Literal["fineweb"]
    metadata_fields: tuple[str, ...] = ("url", "dump")
    license: str = "ODC-By 1.0"
    default_pattern: ClassVar[str] = "**/*.parquet"

    def preset(self) -> RulePreset:
        """The fetch time, else the last day the dump can have been crawled."""
        return RulePreset(
            fields=("date",), upper_bound_fields=("dump_end",), fields_are_bounds=True
        )


class CcNewsSource(RowSource):
    """CC-News rows (JSONL or Parquet): the page's own date, else the crawl time."""

    type: Literal["cc_news"]
    published_at_field: str = "date"
    metadata_fields: tuple[str, ...] = ("url", "domain", "title")
    default_pattern: ClassVar[str] = "**/*"

    def preset(self) -> RulePreset:
        """``date`` as the page declares it, read as late as a zone allows."""
        return RulePreset(fields=("date",), upper_bound_fields=("crawl_date",), timezone="latest")


class WarcSource(BaseSource):
    """WARC files (CC-News as crawled): ``WARC-Date`` is a crawl time, an upper bound."""

    type: Literal["warc"]
    default_pattern: ClassVar[str] = "**/*.warc*"

    def preset(self) -> RulePreset:
        """The time of the fetch."""
        return RulePreset(fields=("warc_date",), fields_are_bounds=True)


class EdgarSource(BaseSource):
    """EDGAR full-text submissions: acceptance time, after 17:30 the next business day."""

    type: Literal["edgar"]
    forms: tuple[str, ...] = ()  # e.g. 10-K, 10-Q, 8-K; empty keeps all; amendments follow
    documents: Literal["main", "all"] = "main"
    revisions: Literal["reject", "keep"] = "keep"
    encodings: tuple[str, ...] = ("utf-8", "cp1252", "latin-1")
    license: str = "public filings"
    default_pattern: ClassVar[str] = "**/*.txt*"

    def preset(self) -> RulePreset:
        """``ACCEPTANCE-DATETIME``, New York, rolled by EDGAR's business days."""
        return RulePreset(
            fields=("acceptance_datetime",),
            format="%Y%m%d%H%M%S",
            timezone="America/New_York",
            calendar="EDGAR",
        )


class MailSource(BaseSource):
    """mbox files and single RFC 822 messages: the later of ``Date`` and the last ``Received``."""

    type: Literal["mbox"]
    encodings: tuple[str, ...] = ("utf-8", "latin-1")
    default_pattern: ClassVar[str] = "**/*"

    def preset(self) -> RulePreset:
        """A sender's clock can be wrong; the receiving server's is the later word."""
        return RulePreset(fields=("date", "received"), format="rfc2822", timezone="latest")


class DebianChangelogSource(BaseSource):
    """Debian changelogs: one document an entry, dated by its trailer line."""

    type: Literal["debian_changelog"]
    encodings: tuple[str, ...] = ("utf-8", "latin-1")
    default_pattern: ClassVar[str] = "**/changelog.Debian*"

    def preset(self) -> RulePreset:
        """The trailer's date, which carries its zone."""
        return RulePreset(fields=("date",), format="rfc2822", timezone="latest")


class FolderSource(BaseSource):
    """Text files dated by their path, or by a table beside them."""

    type: Literal["folder"]
    date_pattern: str | None = None  # regular expression with groups year[, month[, day]]
    index: str | None = None  # CSV with a row a file
    index_file_field: str = "file"
    index_date_field: str = "date"
    split_paragraphs: bool = False  # a document for each block between blank lines
    default_pattern: ClassVar[str] = "**/*.txt"

    def preset(self) -> RulePreset:
        """``date`` from the path or the table."""
        return RulePreset(fields=("date",))

    @field_validator("date_pattern")
    @classmethod
    def _has_year(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                groups = re.compile(value).groupindex
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
            if "year" not in groups:
                raise ValueError("needs at least a group (?P<year>…)")
        return value

    @model_validator(mode="after")
    def _one_way_to_date(self) -> FolderSource:
        if (self.date_pattern is None) == (self.index is None):
            raise ValueError("give either date_pattern or index")
        return self


SourceSettings = (
    JsonlSource
    | ParquetSource
    | HfDatasetSource
    | FineWebSource
    | CcNewsSource
    | WarcSource
    | EdgarSource
    | MailSource
    | DebianChangelogSource
    | FolderSource
)
