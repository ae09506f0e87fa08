"""Rows of at most ``max_length`` tokens, planned from document lengths alone.

Owns the cutting of documents into pieces and the choice of which pieces share a row. The
invariant: a piece belongs to one document, every token of a document but its first is predicted
exactly once (unless ``excess_length`` says to lose some), and nothing is predicted across
documents. Plans are pure functions of lengths and settings; tokens are not touched.

A piece that is followed by more of its document also predicts the first token of the next
piece, so cutting a document loses context but no supervision.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_FORMAT = 1
_ARRAYS = ("row_offsets", "starts", "lengths", "has_next")


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How documents become rows.

    Attributes:
        max_length: tokens a row can hold.
        packing: several documents a row, told apart by ``cu_seqlens`` and positions; otherwise
            one piece a row, padded on the right.
        packing_strategy: ``bfd_split`` (best fit decreasing: documents stay whole where they
            fit, longer ones are cut at ``max_length``) or ``wrapped`` (one stream in document
            order cut every ``max_length`` tokens: no padding, more documents cut).
        excess_length: documents longer than ``max_length`` are ``split``, ``truncate``-d (the
            rest is lost) or ``drop``-ped. ``wrapped`` always splits.
    """

    max_length: int
    packing: bool = True
    packing_strategy: Literal["bfd_split", "wrapped"] = "bfd_split"
    excess_length: Literal["split", "truncate", "drop"] = "split"

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(
                f"max_length is {self.max_length}; a row needs 2 tokens to predict one",
                remedy="raise max_length",
            )
        if self.packing and self.packing_strategy == "wrapped" and self.excess_length != "split":
            raise ConfigError(
                f"excess_length: {self.excess_length} has no effect with packing_strategy: wrapped,"
                " which cuts one stream of documents",
                remedy="use packing_strategy: bfd_split, or leave excess_length at split",
            )


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Which pieces of the token stream make up each row.

    Attributes:
        row_offsets: int64 ``(num_rows + 1,)``, first piece of each row.
        starts: int64 ``(num_pieces,)``, where a piece begins in the flat tokens.
        lengths: int64 ``(num_pieces,)``.
        has_next: bool ``(num_pieces,)``, whether its last token has a successor to predict.
        num_tokens: tokens in all rows, padding not counted.
        num_dropped_tokens: tokens that ``truncate`` and ``drop`` lost, and those of documents of
            a single token.
    """

    row_offsets: Ints
    starts: Ints
    lengths: Ints
    has_next: npt.NDArray[np.bool_]
    num_tokens: int
    num_dropped_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return len(self.row_offsets) - 1


def cut_documents(
    offsets: Ints, max_length: int, excess_length: str
) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Pieces of every document: ``starts``, ``lengths``, ``has_next``, in document order.

    A last piece of one token is not made: the piece before it already predicts that token and
    it would predict nothing. For the same reason a document of one token makes no piece.
    """
    document_starts, lengths = offsets[:-1], np.diff(offsets)
    # ceil((L - 1) / M): the first token is given, the L - 1 others are predicted, M a piece.
    counts = np.maximum(lengths - 2 + max_length, 0) // max_length
    if excess_length == "truncate":
        counts = np.minimum(counts, 1)
    elif excess_length == "drop":
        counts = np.where(lengths > max_length, 0, counts)
    document = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = document_starts[document] + within * max_length
    ends = document_starts[document] + lengths[document]
    pieces = np.minimum(ends - starts, max_length)
    has_next = starts + pieces < ends
    if excess_length == "truncate":
        has_next = np.zeros_like(has_next)
    return starts, pieces, has_next


def best_fit_decreasing(lengths: Ints, capacity: int) -> Ints:
    """Row of each piece: longest first, each into the fullest row that still takes it.

    Args:
        lengths: int64 ``(num_pieces,)``, each between 1 and ``capacity``.
        capacity: tokens a row can hold.

    Rows are found through a bit set of the free spaces that occur, so a piece costs a shift of
    ``capacity`` bits, not a search over rows. (Best fit decreasing for packing sequences: Ding
    et al., "Fewer Truncations Improve Language Modeling", 2024.)
    """
    rows_with_space: dict[int, list[int]] = {}
    spaces = 0  # bit s is set when a row with s free tokens exists
    assigned = np.empty(len(lengths), np.int64)
    num_rows = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            rows = rows_with_space[space]
            row = rows.pop()
            if not rows:
                spaces ^= 1 << space
        else:
            space, row = capacity, num_rows
            num_rows += 1
        assigned[piece] = row
        if left := space - length:
            rows = rows_with_space.setdefault(left, [])
            if not rows:
                spaces |= 1 << left
            rows.append(row)
    return assigned


def plan_rows(offsets: Ints, settings: RowSettings) -> RowPlan:
    """The rows of a dataset.

    Rows are ordered by the first document they hold and the documents in a row by their place
    in the dataset, so an unshuffled run reads them as nearly in order as packing allows.

    Args:
        offsets: int64 ``(num_documents + 1,)``, as in a token store.
        settings: length and packing.
    """
    offsets = np.asarray(offsets, np.int64)
    total = int(offsets[-1])
    if settings.packing and settings.packing_strategy == "wrapped":
        return _wrapped(offsets, settings.max_length)
    starts, lengths, has_next = cut_documents(offsets, settings.max_length, settings.excess_length)
    if not settings.packing:
        row_offsets = np.arange(len(starts) + 1)
    else:
        full = lengths == settings.max_length
        row = np.empty(len(lengths), np.int64)
        num_full = int(full.sum())
        row[full] = np.arange(num_full)
        row[~full] = num_full + best_fit_decreasing(lengths[~full], settings.max_length)
        _, first_piece, row = np.unique(row, return_index=True, return_inverse=True)
        rank = np.empty_like(first_piece)
        rank[np.argsort(first_piece)] = np.arange(len(first_piece))
        order = np.argsort(rank[row], kind="stable")
        starts, lengths, has_next = starts[order], lengths[order], has_next[order]
        row_offsets = np.searchsorted(rank[row][order], np.arange(len(first_piece) + 1))
    num_tokens = int(lengths.sum())
    return RowPlan(
        row_offsets=row_offsets.astype(np.int64),
        starts=starts,
        lengths=lengths,
        has_next=has_next,
        num_tokens=num_tokens,
        # The last token of a document cut exactly before it is predicted though in no piece.
        num_dropped_tokens=total - num_tokens - _tails(offsets, settings),
    )


def _tails(offsets: Ints, settings: RowSettings) -> int:
    if settings.excess_length != "split":
        return 0
    lengths = np.diff(offsets)
    return int(((lengths > settings.max_length) & (lengths % settings.max_length == 1)).sum())


def _wrapped(offsets: Ints, max_length: int) -> RowPlan:
    total = int(offsets[-1])
    row_starts = np.arange(0, total, max_length)
    bounds = np.union1d(offsets, row_starts)
    starts, ends = bounds[:-1], bounds[1:]
    return RowPlan(
        row_offsets=np.append(np.searchsorted(starts, row_starts), len(starts)).astype(np.int64),
        starts=starts,
        lengths=ends - starts,
        has_next=~np.isin(ends, offsets),
        num_tokens=total,
        num_dropped_tokens=0,
    )


def cached_plan(
    folder: Path,
    offsets: Ints,
    settings: RowSettings,
    *,
    make: Callable[[], RowPlan] | None = None,
    key: str | None = None,
) -> RowPlan:
    """:func:`plan_rows`, kept beside the token store.

    Packing ten million documents takes longer than a restart should.

    Args:
        folder: the token store's folder.
        offsets: its document offsets.
        settings: length and packing; part of the kept plan's name.
        make: makes the plan in place of :func:`plan_rows`.
        key: what ``make`` depends on besides.
    """
    recipe = json.dumps([_FORMAT, asdict(settings), *([key] if key else [])], sort_keys=True)
    place = folder / f"rows-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    kept = _read_plan(place)
    if kept is not None:
        return kept
    plan = plan_rows(offsets, settings) if make is None else make()
    temporary = Path(tempfile.mkdtemp(prefix=".rows-", dir=folder))
    for name in _ARRAYS:
        np.save(temporary / f"{name}.npy", getattr(plan, name), allow_pickle=False)
    counts = {"num_tokens": plan.num_tokens, "num_dropped_tokens": plan.num_dropped_tokens}
    (temporary / "counts.json").write_text(json.dumps(counts))
    try:
        temporary.rename(place)
    except OSError:  # another process was first; its plan is the same
        shutil.rmtree(temporary)
    return _read_plan(place) or plan


def _read_plan(place: Path) -> RowPlan | None:
    """The plan kept at ``place``; one that a crash or a copy damaged is cleared away."""
    if not place.exists():
        return None
    arrays: dict[str, Any] = {}
    try:
        for name in _ARRAYS:
            arrays[name] = np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return RowPlan(**arrays, **json.loads((place / "counts.json").read_text()))
    except (OSError, ValueError, TypeError, EOFError):
        shutil.rmtree(place, ignore_errors=True)
        return None
