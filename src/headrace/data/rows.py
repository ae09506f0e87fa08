"""What a usable row is: the checks that every file format shares.

The invariant: what passes is a flat list of token ids that fit int32, with labels of the same
length or none. A message names the row's place and what to change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.batch import IGNORE_INDEX
from headrace.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class TokenChunk:
    """Rows of ``tokens`` data, back to back.

    Attributes:
        input_ids: int32 ``(num_tokens,)``.
        lengths: int64 ``(num_rows,)``, tokens of each row.
        labels: int32 ``(num_tokens,)`` or ``None`` when no row of the chunk has labels.
    """

    input_ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int32] | None


def bad_row(place: str, reason: str, remedy: str) -> DataError:
    """The error for the row at ``place`` (``file:line``)."""
    return DataError(f"{place}: {reason}", remedy=remedy)


def checked_ids(place: str, column: str, value: object, *, lowest: int) -> npt.NDArray[np.int32]:
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


def checked_labels(place: str, value: object, num_tokens: int) -> npt.NDArray[np.int32]:
    """A parsed JSON value as the labels of a row of ``num_tokens`` tokens.

    Raises:
        DataError: with the place and what is wrong.
    """
    labels = checked_ids(place, "labels", value, lowest=IGNORE_INDEX)
    check_ignored(place, labels)
    check_label_count(place, len(labels), num_tokens)
    return labels


def check_label_count(place: str, num_labels: int, num_tokens: int) -> None:
    """Refuse labels that are not aligned with ``input_ids``."""
    if num_labels != num_tokens:
        raise bad_row(
            place,
            f"{num_labels} labels for {num_tokens} input_ids",
            "labels are aligned with input_ids (headrace shifts them); use -100 for no supervision",
        )


def check_ignored(place: str, labels: npt.NDArray[np.int32]) -> None:
    """Refuse negative labels other than -100."""
    odd = (labels < 0) & (labels != IGNORE_INDEX)
    if odd.any():
        raise bad_row(
            place,
            f"label {labels[odd.argmax()]} is neither a token id nor -100",
            "use -100 where nothing is supervised",
        )
