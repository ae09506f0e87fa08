"""Datasets that are read while training: no token is kept on the disk, a few parts in memory.

A streamed dataset is an endless sequence of parts (``parts.py``), in an order drawn anew each pass.
A part is tokenised whole and packed as a store of its own, so a row is at home in one part. The
invariant: the rows of part ``place`` of pass ``p`` are a pure function of the files, the tokenizer,
the settings and the seed; so a cursor of three integers says where a stream stands, and resuming
reads one part, not all before it. Chooses between no datasets.
"""

from __future__ import annotations

import copy
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.data.files import resolve_files
from headrace.data.formats import RowEncoder
from headrace.data.loader import RowSet
from headrace.data.packing import plan_rows
from headrace.data.parts import plan_parts
from headrace.data.sampler import permutation
from headrace.data.supervision import supervised_rows
from headrace.data.tokens import TokenStore, tokenizer_fingerprint
from headrace.errors import DataError

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy.typing as npt

    from headrace.data.packing import RowSettings
    from headrace.data.parts import Part
    from headrace.data.sources import DatasetSource

_EDGE_BYTES = 65_536


class Cursor(NamedTuple):
    """Where a stream stands.

    Attributes:
        passes: whole passes done.
        place: parts of this pass done.
        row: rows of the part at ``place`` done.
        tokens: that the stream has supplied, which decides whose turn it is.
    """

    passes: int = 0
    place: int = 0
    row: int = 0
    tokens: int = 0


class StreamedSet:
    """One dataset, read part by part.

    Args:
        source: the dataset.
        tokenizer: a Hugging Face tokenizer; may be ``None`` for ``tokens`` rows.
        settings: how rows are made.
        vocab_size: of the model.
        seed: of the order, of parts and of rows within one.
        number: of the dataset, part of the seed.
        shuffle: otherwise parts and rows keep the order of the files.

    Raises:
        DataError: files are missing, or there is nothing in them.
        ConfigError: chat rows without a template.
    """

    def __init__(
        self,
        source: DatasetSource,
        tokenizer: Any,
        settings: RowSettings,
        *,
        vocab_size: int,
        seed: int,
        number: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.source = source
        self.settings = settings
        self.parts = plan_parts(source)
        if not self.parts:
            raise DataError(
                f"dataset {source.label!r} is empty: its files hold nothing",
                remedy="give it documents, or remove it from datasets:",
            )
        # Its own copy: a tokenizer that is being saved must not be used from another thread.
        self._encoder = RowEncoder(source, copy.deepcopy(tokenizer))
        self._vocab_size = vocab_size
        self._seed = (seed, "stream", number)
        self._shuffle = shuffle
        self._ahead: dict[tuple[int, int], Future[tuple[RowSet, npt.NDArray[np.int64]] | None]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-stream")

    def take(self, cursor: Cursor) -> tuple[RowSet, int, Cursor]:
        """The row at a cursor and the cursor after it.

        Raises:
            DataError: an unusable row, or a whole pass without one to learn from.
        """
        passes, place, row, tokens = cursor
        for _ in range(len(self.parts) + 1):
            found = self._part(passes, place)
            if found is not None and row < found[0].plan.num_rows:
                rows, order = found
                chosen = int(order[row])
                pieces = rows.plan.row_offsets[chosen : chosen + 2]
                size = int(rows.plan.lengths[pieces[0] : pieces[1]].sum())
                return rows, chosen, Cursor(passes, place, row + 1, tokens + size)
            passes, place = self._after(passes, place)
            row = 0
        raise DataError(
            f"dataset {self.source.label!r} has no document to learn from in {len(self.parts)} "
            "parts",
            remedy="give it documents of at least two tokens, one of which is supervised",
        )

    def share_done(self, cursor: Cursor) -> float:
        """Passes done, the one that is going on counted by its parts."""
        return cursor.passes + cursor.place / len(self.parts)

    def fingerprint(self) -> str:
        """A name that changes with names, sizes and edges of the files, the tokenizer, the keys.

        Not with every byte: reading all of a stream before it begins would not be streaming.
        """
        digest = hashlib.sha256(json.dumps(self.source.recipe(), sort_keys=True).encode())
        tokenizer = self._encoder.tokenizer
        if tokenizer is not None:
            digest.update(tokenizer_fingerprint(tokenizer).encode())
            digest.update(json.dumps(getattr(tokenizer, "chat_template", None)).encode())
        for file in resolve_files(self.source.path, self.source.split):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\0".encode())
            with file.open("rb") as content:
                digest.update(content.read(_EDGE_BYTES))
                content.seek(max(0, size - _EDGE_BYTES))
                digest.update(content.read())
        return digest.hexdigest()[:32]

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _after(self, passes: int, place: int) -> tuple[int, int]:
        return (passes, place + 1) if place + 1 < len(self.parts) else (passes + 1, 0)

    def _part(self, passes: int, place: int) -> tuple[RowSet, npt.NDArray[np.int64]] | None:
        """Rows of a part and their order; the next part is read meanwhile."""
        here, following = (passes, place), self._after(passes, place)
        for key in (here, following):
            if key not in self._ahead:
                self._ahead[key] = self._pool.submit(self._read, *key)
        for key in [key for key in self._ahead if key not in (here, following)]:
            del self._ahead[key]
        return self._ahead[here].result()

    def _read(self, passes: int, place: int) -> tuple[RowSet, npt.NDArray[np.int64]] | None:
        order = (
            permutation(len(self.parts), *self._seed, "parts", passes)
            if self._shuffle
            else np.arange(len(self.parts))
        )
        rows = self._rows(self.parts[int(order[place])])
        if rows is None:
            return None
        count = rows.plan.num_rows
        if not self._shuffle:
            return rows, np.arange(count)
        return rows, permutation(count, *self._seed, "rows", passes, place)

    def _rows(self, part: Part) -> RowSet | None:
        chunks = list(self._encoder.encode(part))
        lengths = np.concatenate([c.lengths for c in chunks] or [np.empty(0, np.int64)])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        plan = plan_rows(offsets, self.settings)
        if not plan.num_rows:
            return None
        tokens = np.concatenate([chunk.input_ids for chunk in chunks])
        labels = None
        if any(chunk.labels is not None for chunk in chunks):
            labels = np.concatenate([c.input_ids if c.labels is None else c.labels for c in chunks])
            plan = supervised_rows(plan, labels)
            if not plan.num_rows:
                return None
        largest = int(tokens.max()) if labels is None else int(max(tokens.max(), labels.max()))
        store = TokenStore(
            folder=Path(part.file), tokens=tokens, offsets=offsets, labels=labels,
            max_token_id=largest,
        )  # fmt: skip
        store.check_vocabulary(self._vocab_size, f"{self.source.label}: {part.file}")
        return RowSet(label=self.source.label, store=store, plan=plan, settings=self.settings)
