"""What a source yields: documents and rejections, and the reasons a record is not kept.

The invariant of the whole package: every record of every input ends as exactly one of a
kept document or a listed reason with its position. Nothing is dropped in silence.

This module does not read files and does not judge dates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# Reasons that speak of a broken input count against a source's ``max_bad_share``.
BAD_REASONS: Mapping[str, str] = {
    "bad_json": "the line is not one complete JSON object",
    "bad_encoding": "the bytes are not text in the declared encoding, or the text is damaged",
    "bad_record": "the record does not have the structure its source type promises",
    "too_long": "the record is longer than max_document_bytes",
    "truncated_file": "the compressed stream ends before its end marker",
    "corrupt_file": "the file cannot be decoded from here on",
    "empty_file": "the file holds no record",
    "empty_text": "the text field is missing or empty",
    "undated": "no field of the declared rule is present",
    "unparseable_date": "a date field is present and is not an instant",
    "ambiguous_date": "a date can be read in more than one way (03/04/2016, a bare number)",
    "unset_clock": "the date is 1970-01-01T00:00:00Z, what a clock shows that was never set",
    "before_range": "the date is before not_before",
    "future_date": "the date is after not_after, or after the day of the build",
    "contradictory_times": "the document was collected before it was available",
    "outside_calendar": "the date is outside the exchange calendar",
    "duplicate_id": "another document of the source has this id and another text",
}
# Reasons that speak of a sound document that does not belong into the corpus.
SOUND_REASONS: Mapping[str, str] = {
    "after_cutoff": "not available by the latest cutoff",
    "exact_duplicate": "an earlier document has the same normalised text",
    "near_duplicate": "an earlier document has nearly the same text",
    "too_short": "fewer characters than checks.length.min_chars",
    "over_length": "more characters than checks.length.max_chars",
    "language": "the language is not one of checks.languages.keep",
    "boilerplate": "more of the text is page furniture than checks.boilerplate.max_share",
}
REASONS: Mapping[str, str] = {**BAD_REASONS, **SOUND_REASONS}

INSTANTS = ("event_time", "published_at", "available_at", "collected_at")
"""The four instants of a document, in the order they happen."""


@dataclass(slots=True, kw_only=True)
class RawDocument:
    """One record as its source gave it, not dated yet.

    ``position`` counts from one in the unit of the source (line, row, message, entry);
    ``byte`` is the offset in the decompressed stream where that is known. ``values`` holds
    what dates the document: field name to string, number, ``date`` or ``datetime``.
    """

    text: str
    position: int
    values: Mapping[str, Any]
    doc_id: str | None = None
    byte: int | None = None
    revision_key: str | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Rejection:
    """One record that is not kept, with the reason and where it stands."""

    reason: str
    detail: str
    position: int | None = None
    byte: int | None = None
    doc_id: str | None = None
    available_at: int | None = None

    def __post_init__(self) -> None:
        assert self.reason in REASONS, self.reason
