"""What every reader is told, and the little that readers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.corpus.cutoff import AvailabilityRule


@dataclass(slots=True, kw_only=True)
class ReadContext:
    """Limits and wishes of one source; ``num_positions`` comes back from the reader.

    Attributes:
        date_fields: fields that the rule asks for.
        max_bytes: records longer than this are rejected without being held.
        num_positions: records seen in the part just read, for positions in split files.
    """

    date_fields: tuple[str, ...]
    max_bytes: int
    num_positions: int = 0

    @staticmethod
    def for_rule(rule: AvailabilityRule, max_bytes: int) -> ReadContext:
        """The context of a source with this rule."""
        fields = tuple(dict.fromkeys((*rule.fields, *rule.upper_bound_fields)))
        return ReadContext(date_fields=fields, max_bytes=max_bytes)


def decode(content: bytes, encodings: tuple[str, ...]) -> str:
    """Text by the first encoding that fits.

    Raises:
        UnicodeDecodeError: none fits; the error is the first encoding's.
    """
    first: UnicodeDecodeError | None = None
    for name in encodings:
        try:
            return content.decode(name)
        except UnicodeDecodeError as error:
            first = first or error
        except UnicodeError as error:  # as codecs for other things than documents raise
            first = first or UnicodeDecodeError(name, b"", 0, 0, str(error))
    assert first is not None, "at least one encoding is configured"
    raise first


def decode_declared(content: bytes, declared: str | None, encodings: tuple[str, ...]) -> str:
    """Text by the encoding that the record itself names, else by the source's.

    A wrong declaration is common, and some name no encoding at all.

    Raises:
        UnicodeDecodeError: none fits.
    """
    if declared:
        try:
            return content.decode(declared)
        except (LookupError, ValueError):
            pass
    return decode(content, encodings)
