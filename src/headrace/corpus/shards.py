"""Token pieces a unit, and the shards that a vintage is made of.

A shard holds the documents of some neighbouring units that belong to the same set of vintages;
vintages share shards by linking them. Shards are pure functions of their key, so a build that
was killed, or to which a source was added, makes only those that are not there.

A shard folder holds, for each set of vintages, ``<mask>.documents.parquet``,
``<mask>.tokens.parquet`` and an entry in ``stats.json``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.corpus.checks.mentions import BODY, CUED_YEAR, KINDS, SETTINGS
from headrace.corpus.encode import CheckedEncoder, make_encoder
from headrace.corpus.files import is_whole, whole_folder
from headrace.corpus.instants import DAY_US, from_microseconds, month_of
from headrace.corpus.tokenizer import load_tokenizer
from headrace.corpus.unit_files import DOCUMENTS, REPEATED, row_groups

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SHARD_VERSION = 4

TOKENS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("available_at", pa.timestamp("us", "UTC")),
        ("input_ids", pa.list_(pa.int32())),
    ]
)
_SNIPPET = 60
_MAX_EXAMPLES = 1000


class TokenPass:
    """Tokenises units; made once a worker."""

    def __init__(self, tokenizer_file: Path, eos_token_id: int) -> None:
        """Load the tokenizer."""
        self._encoder = make_encoder(load_tokenizer(tokenizer_file), eos_token_id)

    def run(self, unit: Path, wanted_rows: NDArray[np.bool_], place: Path) -> None:
        """Write ``tokens.parquet`` and ``counts.bin`` (int64 a document row, 0 if not wanted)."""
        if is_whole(place):
            return
        checked = self._encoder if isinstance(self._encoder, CheckedEncoder) else None
        if checked is not None:
            checked.start_unit()
        counts = np.zeros(wanted_rows.size, dtype=np.int64)
        schema = pa.schema([TOKENS.field("input_ids")])
        with whole_folder(place) as folder:
            # A dictionary of ids costs more than it saves.
            with pq.ParquetWriter(
                folder / "tokens.parquet",
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=False,
            ) as writer:
                for first, batch in row_groups(unit / "documents.parquet", ["text"]):
                    wanted = np.flatnonzero(wanted_rows[first : first + batch.num_rows])
                    tokens = self._encoder.encode_column(batch.column(0).take(pa.array(wanted)))
                    lengths = np.zeros(batch.num_rows, dtype=np.int64)
                    lengths[wanted] = tokens.counts
                    counts[first : first + batch.num_rows] = lengths
                    lists = _lists(tokens.ids, lengths)
                    writer.write_table(pa.Table.from_arrays([lists], schema=schema))
            counts.tofile(folder / "counts.bin")
            fell_back = checked is not None and checked.differs
            (folder / "encoder.json").write_text(json.dumps({"fell_back": fell_back}))


def _lists(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids))


def read_counts(place: Path) -> NDArray[np.int64]:
    """Token counts of a unit's document rows."""
    return np.fromfile(place / "counts.bin", dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """One unit's contribution to a shard."""

    unit: Path
    tokens: Path | None
    masks: Path  # uint64 a document row
    first_position: int  # records of its file in the ranges before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """What a shard is made from; ``cutoffs_us`` are the vintages in the order of the bits."""

    place: Path
    parts: tuple[ShardPart, ...]
    cutoffs_us: tuple[int, ...]
    num_examples: int


def write_shard(job: ShardJob) -> None:
    """Make a shard folder, unless it is there."""
    if is_whole(job.place):
        return
    with whole_folder(job.place) as folder:
        segments: dict[int, _Segment] = {}
        for part in job.parts:
            masks = np.fromfile(part.masks, dtype=np.uint64)
            tokens = None
            if part.tokens is not None:
                tokens = row_groups(part.tokens / "tokens.parquet", None)
            for first, batch in row_groups(part.unit / "documents.parquet", None):
                ids = None if tokens is None else next(tokens)[1].column(0)
                batch = _moved(batch, part.first_position)  # noqa: PLW2901 - where it stands
                here = masks[first : first + batch.num_rows]
                for mask in np.unique(here):
                    if mask == 0:
                        continue
                    rows = pa.array(np.flatnonzero(here == mask))
                    segment = segments.get(int(mask))
                    if segment is None:
                        segment = segments[int(mask)] = _Segment(
                            job, folder, int(mask), ids is not None
                        )
                    segment.add(batch.take(rows), None if ids is None else ids.take(rows))
        stats = {f"{mask:x}": segments[mask].close() for mask in sorted(segments)}
        (folder / "stats.json").write_text(json.dumps(stats), encoding="utf-8")


def _moved(batch: pa.RecordBatch, first_position: int) -> pa.RecordBatch:
    """The batch with positions in the whole file."""
    if first_position == 0:
        return batch
    at = batch.schema.get_field_index("position")
    return batch.set_column(at, "position", pa.compute.add(batch.column(at), first_position))


class _Segment:
    """The documents of a shard that belong to one set of vintages."""

    def __init__(self, job: ShardJob, folder: Path, mask: int, has_tokens: bool) -> None:
        self._documents = pq.ParquetWriter(
            folder / f"{mask:x}.documents.parquet",
            DOCUMENTS,
            compression="zstd",
            use_dictionary=list(REPEATED),
        )
        self._tokens = (
            pq.ParquetWriter(
                folder / f"{mask:x}.tokens.parquet",
                TOKENS,
                compression="zstd",
                use_dictionary=False,
            )
            if has_tokens
            else None
        )
        self._vintages = [
            (bit, cutoff // DAY_US) for bit, cutoff in enumerate(job.cutoffs_us) if mask >> bit & 1
        ]
        self._num_examples = min(job.num_examples, _MAX_EXAMPLES)
        self._months: dict[str, list[int]] = {}
        self._languages: Counter[str] = Counter()
        self._rules: Counter[str] = Counter()
        self._boilerplate: Counter[int] = Counter()
        self._chars = [0, 0, 0]  # sum, shortest, longest
        self._mentions = {bit: MentionCounts() for bit, _ in self._vintages}

    def add(self, batch: pa.RecordBatch, ids: pa.Array | None) -> None:
        documents = batch.select(DOCUMENTS.names)
        self._documents.write_table(pa.Table.from_batches([documents], schema=DOCUMENTS))
        lengths = [0] * batch.num_rows
        if ids is not None and self._tokens is not None:
            lengths = ids.value_lengths().to_pylist()
            arrays = [batch.column("doc_id"), batch.column("available_at"), ids]
            self._tokens.write_table(pa.Table.from_arrays(arrays, schema=TOKENS))
        self._count(batch, lengths)

    def _count(self, batch: pa.RecordBatch, lengths: list[int]) -> None:
        texts = batch.column("text")
        sizes = pa.compute.binary_length(texts).to_pylist()
        chars = pa.compute.utf8_length(texts).to_pylist()
        instants = batch.column("available_at").cast(pa.int64()).to_pylist()
        bounds = batch.column("upper_bound").to_pylist()
        for instant, tokens, size, bound in zip(instants, lengths, sizes, bounds, strict=True):
            month = self._months.setdefault(month_of(instant), [0, 0, 0, 0])
            month[0] += 1
            month[1] += tokens
            month[2] += size
            month[3] += bound
        self._languages.update(batch.column("language").to_pylist())
        self._rules.update(batch.column("available_at_rule").to_pylist())
        self._boilerplate.update(
            int(share * 10) for share in batch.column("boilerplate_share").to_pylist()
        )
        shortest = self._chars[1] or min(chars)
        self._chars = [
            self._chars[0] + sum(chars), min(shortest, *chars), max(self._chars[2], *chars)
        ]  # fmt: skip
        mentions = batch.column("mentions").to_pylist()
        for row, found in enumerate(mentions):
            if found:
                self._mentioned(batch, row, found)

    def _mentioned(self, batch: pa.RecordBatch, row: int, found: list[dict[str, int]]) -> None:
        for bit, cutoff_day in self._vintages:
            later = [mention for mention in found if mention["day"] > cutoff_day]
            if not later:
                continue
            counts = self._mentions[bit]
            best = counts.add(later)
            if best is not None and len(counts.examples) < 4 * self._num_examples + 16:
                text = batch.column("text")[row].as_py()
                counts.examples.append(
                    {
                        "doc_id": batch.column("doc_id")[row].as_py(),
                        "source": batch.column("source")[row].as_py(),
                        "file": batch.column("file")[row].as_py(),
                        "position": batch.column("position")[row].as_py(),
                        "available_at": month_of(
                            batch.column("available_at")[row].cast(pa.int64()).as_py()
                        ),
                        "kind": KINDS[best["kind"]],
                        "snippet": _snippet(text, best["offset"]),
                        "rank": [-best["kind"], best["day"]],
                    }
                )

    def close(self) -> dict[str, Any]:
        self._documents.close()
        if self._tokens is not None:
            self._tokens.close()
        return {
            "months": dict(sorted(self._months.items())),
            "languages": dict(sorted(self._languages.items())),
            "rules": dict(sorted(self._rules.items())),
            "boilerplate_tenths": {str(k): v for k, v in sorted(self._boilerplate.items())},
            "chars": self._chars,
            "mentions": {
                str(bit): counts.to_json(self._num_examples)
                for bit, counts in self._mentions.items()
            },
        }


class MentionCounts:
    """Counts of later mentions for one vintage."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.num_documents = 0  # with any later mention
        self.num_sure = 0  # with a sure one in the body
        self.kinds: Counter[str] = Counter()
        self.years: Counter[str] = Counter()
        self.examples: list[dict[str, Any]] = []

    def add(self, later: list[dict[str, int]]) -> dict[str, int] | None:
        """Count one document's later mentions; its surest body mention, if it has one."""
        self.num_documents += 1
        for mention in later:
            self.kinds[f"{SETTINGS[mention['setting']]}/{KINDS[mention['kind']]}"] += 1
        sure = [m for m in later if m["setting"] == BODY and m["kind"] >= CUED_YEAR]
        if not sure:
            return None
        self.num_sure += 1
        for mention in sure:
            self.years[str(from_microseconds(mention["day"] * DAY_US).year)] += 1
        return max(sure, key=lambda m: (m["kind"], -m["offset"]))

    def merge(self, other: dict[str, Any]) -> None:
        """Add what another shard counted."""
        self.num_documents += other["num_documents"]
        self.num_sure += other["num_sure"]
        self.kinds.update(other["kinds"])
        self.years.update(other["years"])
        self.examples += other["examples"]

    def to_json(self, num_examples: int) -> dict[str, Any]:
        """Counts and the surest examples, in an order that nothing but they decides."""
        examples = sorted(self.examples, key=lambda e: (e["rank"], e["doc_id"], e["snippet"]))
        return {
            "num_documents": self.num_documents,
            "num_sure": self.num_sure,
            "kinds": dict(sorted(self.kinds.items())),
            "years": dict(sorted(self.years.items())),
            "examples": examples[:num_examples],
        }


def _snippet(text: str, offset: int) -> str:
    start, end = max(0, offset - _SNIPPET), min(len(text), offset + _SNIPPET)
    inside = " ".join(text[start:end].split())
    return ("…" if start else "") + inside + ("…" if end < len(text) else "")
