"""What a usable row is: the checks that every file format shares.

The invariant: what passes is a flat list of token ids that fit int32, with labels of the same
length or none. A message names the row's place and what to change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrace.batch import IGNORE_INDEX
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

MAX_ID = np.iinfo(np.int32).max
UNDATED = -1
_ISO_MONTH = re.compile(r"(\d{4})-(0[1-9]|1[0-2])(?!\d)")


class Place(Protocol):
    """Where a row stands: ``file:line``, made into text only for a message."""

    def __str__(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TokenChunk:
    """Rows of ``tokens`` data, back to back.

    Attributes:
        input_ids: int32 ``(num_tokens,)``.
        lengths: int64 ``(num_rows,)``, tokens of each row.
        labels: int32 ``(num_tokens,)`` or ``None`` when no row of the chunk has labels.
        months: int32 ``(num_rows,)``, 12 * year + month - 1 of each document, ``UNDATED`` where
            it has no date; ``None`` where dates were not asked for.
        num_unsupervised: rows left out because nothing in them is supervised.
    """

    input_ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int32] | None
    months: npt.NDArray[np.int32] | None = None
    num_unsupervised: int = 0


def month_name(month: int) -> str:
    """``2016-03`` for what :func:`month_of` gave."""
    return "undated" if month == UNDATED else f"{month // 12:04d}-{month % 12 + 1:02d}"


def month_of(place: Place, column: str, value: Any) -> int:
    """12 * year + month - 1 of a date, a time or text that begins with an ISO date.

    Raises:
        DataError: it is no date.
    """
    if value is None or value == "":
        return UNDATED
    if isinstance(value, str) and (match := _ISO_MONTH.match(value)):
        return 12 * int(match[1]) + int(match[2]) - 1
    year, month = getattr(value, "year", None), getattr(value, "month", None)
    if isinstance(year, int) and isinstance(month, int):
        return 12 * year + month - 1
    raise bad_row(
        place,
        f"{column!r} is {value!r}, which is no date",
        "write dates as 2016-03-31, or leave them empty",
    )


def checked_text(place: Place, column: str, text: object, remedy: str) -> str:
    """A value as text of whole characters.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(text, str):
        raise bad_row(place, f"{column!r} is {type(text).__name__}, not text", remedy)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_row(
            place,
            f"{column!r} holds half a character, \\u{ord(text[error.start]):04x} "
            f"(character {error.start})",
            "write the text again, with whole characters",
        ) from error
    return text


def bad_row(place: Place, reason: str, remedy: str) -> DataError:
    """The error for the row at ``place`` (``file:line``)."""
    return DataError(f"{place}: {reason}", remedy=remedy)


_TYPE_BY_COLUMN = {
    "input_ids": "tokens",
    "messages": "messages",
    "conversations": "messages",
    "completion": "prompt_completion",
    "instruction": "alpaca",
    "segments": "segments",
}


def name_the_column(key: str, columns: Iterable[str]) -> str:
    """The remedy where a column is missing: the type of rows with such columns, if they tell.

    Args:
        key: of a dataset, that names the column.
        columns: that there are.
    """
    found = next((_TYPE_BY_COLUMN[name] for name in columns if name in _TYPE_BY_COLUMN), None)
    other = "" if found is None else f"type: {found} if that is what its rows are, or "
    return f"set {other}{key}: of this dataset to the column that holds the text"


def checked_ids(place: Place, column: str, value: object, *, lowest: int) -> npt.NDArray[np.int32]:
    """A parsed JSON value as int32 ids, none below ``lowest``.

    Raises:
        DataError: with the place, the column and the first offending value.
    """
    remedy = 'a tokens row is {"input_ids": [ints]}, with "labels" of equal length if wanted'
    if value is None:
        raise bad_row(place, f"the row has no {column!r}", remedy)
    try:
        ids = np.asarray(value)
    except ValueError as error:
        raise bad_row(place, f"{column!r} is not a flat list ({error})", remedy) from error
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise bad_row(place, f"{column!r} is not a flat list of integers", remedy)
    outside = (ids < lowest) | (ids > MAX_ID)
    if outside.any():
        index = int(outside.argmax())
        raise bad_row(
            place, f"{column}[{index}] = {ids[index]} is no token id", "token ids start at 0"
        )
    return ids.astype(np.int32)


def checked_labels(place: Place, value: object, num_tokens: int) -> npt.NDArray[np.int32]:
    """A parsed JSON value as the labels of a row of ``num_tokens`` tokens.

    Raises:
        DataError: with the place and what is wrong.
    """
    labels = checked_ids(place, "labels", value, lowest=IGNORE_INDEX)
    check_ignored(place, labels)
    check_label_count(place, len(labels), num_tokens)
    return labels


def check_label_count(place: Place, num_labels: int, num_tokens: int) -> None:
    """Refuse labels that are not aligned with ``input_ids``."""
    if num_labels != num_tokens:
        raise bad_row(
            place,
            f"{num_labels} labels for {num_tokens} input_ids",
            "labels are aligned with input_ids (headrace shifts them); use -100 for no supervision",
        )


def check_ignored(place: Place, labels: npt.NDArray[np.int32]) -> None:
    """Refuse negative labels other than -100."""
    odd = (labels < 0) & (labels != IGNORE_INDEX)
    if odd.any():
        raise bad_row(
            place,
            f"label {labels[odd.argmax()]} is neither a token id nor -100",
            "use -100 where nothing is supervised",
        )
