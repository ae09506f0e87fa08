"""The pass over one unit: read, date, check, fingerprint; a pure function of the unit's key.

Leaves a folder with

``documents.parquet``  sound documents available by the latest cutoff
``index.bin``          a row for every sound document, later ones too (they are needed to see
                       near-duplicates across the cutoff, and can never displace an earlier one)
``signatures.bin``     MinHash signatures of the same rows
``rejected.parquet``   everything else, with reason and position
``stats.json``         counts

Memory: a batch of a few MiB of text at a time, whatever the unit.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.corpus.checks.furniture import CUES, furniture_share
from headrace.corpus.checks.languages import LanguageGuesser
from headrace.corpus.checks.mentions import MentionFinder, load_entities
from headrace.corpus.config import CorpusConfig, rule_for
from headrace.corpus.cutoff import Dated, Dater
from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.files import canonical_json, hash_of, is_whole, whole_folder
from headrace.corpus.fingerprints import MinHasher, exact_key, normalise
from headrace.corpus.instants import InstantError
from headrace.corpus.sources import read_part
from headrace.corpus.sources.context import ReadContext
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.corpus.source_config import SourceSettings
    from headrace.corpus.sources.units import Unit

BATCH_DOCUMENTS = 1024
BATCH_CHARS = 2 << 20
DAMAGED_SHARE = 0.01  # of U+FFFD and NUL among the characters: text read in a wrong encoding

INDEX = np.dtype(
    [
        ("text_key", "<u8", (2,)),  # exact key of the normalised text
        ("id_key", "<u8"),
        ("revision_key", "<u8"),  # 0: none
        ("available_at", "<i8"),
        ("row", "<i8"),  # in documents.parquet; -1 - row of rejected.parquet for later ones
        ("num_bytes", "<i8"),
        ("upper_bound", "u1"),
    ]
)

_INSTANT = pa.timestamp("us", "UTC")
_MENTION = pa.struct(
    [
        ("day", pa.int32()),
        ("kind", pa.int8()),
        ("setting", pa.int8()),
        ("offset", pa.int32()),
    ]
)
DOCUMENTS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("source", pa.string()),
        ("text", pa.large_string()),
        ("event_time", _INSTANT),
        ("published_at", _INSTANT),
        ("available_at", _INSTANT),
        ("collected_at", _INSTANT),
        ("available_at_rule", pa.string()),
        ("upper_bound", pa.bool_()),
        ("language", pa.string()),
        ("boilerplate_share", pa.float32()),
        ("revision_key", pa.string()),
        ("metadata", pa.string()),
        ("file", pa.string()),
        ("position", pa.int64()),
    ]
)
UNIT_DOCUMENTS = DOCUMENTS.append(pa.field("mentions", pa.list_(_MENTION)))
REJECTED = pa.schema(
    [
        ("source", pa.string()),
        ("file", pa.string()),
        ("position", pa.int64()),
        ("byte", pa.int64()),
        ("doc_id", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("available_at", _INSTANT),
    ]
)


@dataclass(slots=True, kw_only=True)
class _Candidate:
    raw: RawDocument
    doc_id: str
    file: str
    part: int
    dated: Dated
    normalised: bytes = b""
    language: str = "und"
    boilerplate: float = 0.0


@dataclass(slots=True)
class _Counts:
    num_records: int = 0
    num_text_bytes: int = 0
    num_positions: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)


class UnitPass:
    """Works through units of one source; made once a worker and source."""

    def __init__(self, config: CorpusConfig, source: SourceSettings) -> None:
        """Prepare the rule, the calendar and the checks."""
        cutoffs = config.vintages()
        self._source = source
        self._checks = config.checks
        self._latest_us = cutoffs[-1].instant_us
        rule = rule_for(config, source)
        self._dater = Dater(rule, horizon_us=self._latest_us)
        self._context = ReadContext.for_rule(rule, config.max_document_bytes)
        self._languages = LanguageGuesser()
        extra = config.checks.future_mentions.entities_file
        entities = load_entities(Path(extra) if extra else None)
        self._mentions = MentionFinder(cutoffs[0].instant_us, entities)
        near = config.checks.near_duplicates
        self._hasher = (
            MinHasher(num_perm=near.num_perm, shingle_words=near.shingle_words, seed=near.seed)
            if near.enabled
            else None
        )

    def run(self, unit: Unit, place: Path) -> None:
        """Write the unit's folder, unless it is there already."""
        if is_whole(place):
            return
        stamps = [part.file.path.stat() for part in unit.parts]
        with whole_folder(place) as folder:
            writer = _UnitWriter(folder, self._hasher)
            counts = _Counts()
            for batch, rejected in self._batches(unit, counts):
                self._judge(batch, rejected, writer, counts)
            writer.close()
            stats = {
                "num_records": counts.num_records,
                "num_documents": writer.num_documents,
                "num_rows": writer.num_rows,
                "num_text_bytes": counts.num_text_bytes,
                "num_positions": counts.num_positions,
                "reasons": dict(sorted(counts.reasons.items())),
                "languages": dict(sorted(counts.languages.items())),
            }
            (folder / "stats.json").write_text(json.dumps(stats), encoding="utf-8")
            _assert_unchanged(unit, stamps)

    def _batches(
        self, unit: Unit, counts: _Counts
    ) -> Iterator[tuple[list[_Candidate], list[dict[str, Any]]]]:
        batch: list[_Candidate] = []
        rejected: list[dict[str, Any]] = []
        held = 0
        for number, part in enumerate(unit.parts):
            name = part.file.name
            for item in read_part(self._source, part, self._context):
                counts.num_records += 1
                if isinstance(item, Rejection):
                    rejected.append(self._rejected_row(name, number, item))
                else:
                    counts.num_text_bytes += len(item.text)
                    doc_id = item.doc_id or _position_id(name, item)
                    judged = self._dated(item, doc_id)
                    if isinstance(judged, Rejection):
                        rejected.append(self._rejected_row(name, number, judged))
                    else:
                        batch.append(
                            _Candidate(
                                raw=item, doc_id=doc_id, file=name, part=number, dated=judged
                            )
                        )
                        held += len(item.text)
                if len(batch) + len(rejected) >= BATCH_DOCUMENTS or held >= BATCH_CHARS:
                    yield batch, rejected
                    batch, rejected, held = [], [], 0
            counts.num_positions.append(self._context.num_positions)
        yield batch, rejected

    def _dated(self, item: RawDocument, doc_id: str) -> Dated | Rejection:
        """The document's instants, or the reason why it is damaged or cannot be dated."""
        text = item.text
        reason, detail = "", ""
        if not text or text.isspace():
            reason, detail = "empty_text", "no characters but white space"
        elif not text.isascii():
            damaged = text.count("\ufffd") + text.count("\0")
            if damaged > max(2, DAMAGED_SHARE * len(text)):
                reason, detail = "bad_encoding", f"{damaged} replacement characters"
            elif _has_surrogates(text):
                reason, detail = "bad_encoding", "unpaired surrogates"
        elif "\0" in text:
            reason, detail = "bad_encoding", "NUL characters"
        if not reason:
            try:
                return self._dater.date(item.values)
            except InstantError as error:
                reason, detail = error.reason, error.detail
        return Rejection(
            reason=reason, detail=detail, position=item.position, byte=item.byte, doc_id=doc_id
        )

    def _rejected_row(self, file: str, part: int, item: Rejection) -> dict[str, Any]:
        return {
            "source": self._source.name,
            "file": file,
            "part": part,
            "position": item.position,
            "byte": item.byte,
            "doc_id": None if item.doc_id is None else _printable(item.doc_id),
            "reason": item.reason,
            "detail": _printable(item.detail)[:300],
            "available_at": item.available_at,
        }

    def _judge(
        self,
        batch: list[_Candidate],
        rejected: list[dict[str, Any]],
        writer: _UnitWriter,
        counts: _Counts,
    ) -> None:
        texts = pa.array([item.raw.text for item in batch], pa.large_string())
        has_cue = pc.match_substring_regex(texts, CUES, ignore_case=True).to_pylist()
        kept: list[int] = []
        later: list[_Candidate] = []
        for index, item in enumerate(batch):
            rejection = self._filtered(item, has_cue[index])
            counts.languages[item.language] += 1
            if rejection is None:
                item.normalised = normalise(item.raw.text).encode()
                if item.dated.available_at <= self._latest_us:
                    kept.append(index)
                    continue
                later.append(item)
                rejection = Rejection(
                    reason="after_cutoff",
                    detail=item.dated.rule,
                    position=item.raw.position,
                    byte=item.raw.byte,
                    doc_id=item.doc_id,
                    available_at=item.dated.available_at,
                )
                writer.add_later(item, rejected_row=writer.num_rejected + len(rejected))
            rejected.append(self._rejected_row(item.file, item.part, rejection))
        counts.reasons.update(row["reason"] for row in rejected)
        writer.add_rejected(rejected)
        texts = texts.take(pa.array(kept, pa.int64()))
        suspects = pc.match_substring_regex(texts, self._mentions.prefilter).to_pylist()
        mentions = [
            [
                {"day": m.day, "kind": m.kind, "setting": m.setting, "offset": m.offset}
                for m in self._mentions.find(batch[index].raw.text)
            ]
            if suspect
            else []
            for index, suspect in zip(kept, suspects, strict=True)
        ]
        writer.add_documents(self._source.name, [batch[i] for i in kept], texts, mentions)

    def _filtered(self, item: _Candidate, has_cue: bool) -> Rejection | None:
        text, checks = item.raw.text, self._checks
        reason, detail = "", ""
        length = len(text)
        item.language = self._languages.guess(text)
        item.boilerplate = furniture_share(text, has_cue=has_cue)
        if length < checks.length.min_chars:
            reason, detail = "too_short", f"{length} characters"
        elif checks.length.max_chars is not None and length > checks.length.max_chars:
            reason, detail = "over_length", f"{length} characters"
        elif checks.languages.keep and item.language not in checks.languages.keep:
            reason, detail = "language", item.language
        elif item.boilerplate > checks.boilerplate.max_document_share:
            reason, detail = "boilerplate", f"{item.boilerplate:.2f} of the characters"
        if not reason:
            return None
        return Rejection(
            reason=reason,
            detail=detail,
            position=item.raw.position,
            byte=item.raw.byte,
            doc_id=item.doc_id,
            available_at=item.dated.available_at,
        )


class _UnitWriter:
    """Streams the unit's files; row groups are batches."""

    def __init__(self, folder: Path, hasher: MinHasher | None) -> None:
        self._folder = folder
        self._hasher = hasher
        self._documents = pq.ParquetWriter(
            folder / "documents.parquet", UNIT_DOCUMENTS, compression="zstd", compression_level=1
        )
        self._rejected = pq.ParquetWriter(
            folder / "rejected.parquet",
            REJECTED.append(pa.field("part", pa.int32())),
            compression="zstd",
        )
        self._index = (folder / "index.bin").open("wb")
        self._signatures = (folder / "signatures.bin").open("wb") if hasher is not None else None
        self.num_documents = 0
        self.num_rejected = 0
        self.num_rows = 0

    def add_rejected(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            schema = REJECTED.append(pa.field("part", pa.int32()))
            self._rejected.write_table(pa.Table.from_pylist(rows, schema=schema))
            self.num_rejected += len(rows)

    def add_later(self, item: _Candidate, *, rejected_row: int) -> None:
        self._add_rows([item], [-1 - rejected_row])

    def add_documents(
        self,
        source: str,
        items: list[_Candidate],
        texts: pa.Array,
        mentions: list[list[dict[str, int]]],
    ) -> None:
        if not items:
            return
        rows = range(self.num_documents, self.num_documents + len(items))
        self._add_rows(items, list(rows))
        self.num_documents += len(items)
        dated = [item.dated for item in items]
        columns = {
            "doc_id": [_printable(item.doc_id) for item in items],
            "source": [source] * len(items),
            "text": texts,
            "event_time": [d.event_time for d in dated],
            "published_at": [d.published_at for d in dated],
            "available_at": [d.available_at for d in dated],
            "collected_at": [d.collected_at for d in dated],
            "available_at_rule": [d.rule for d in dated],
            "upper_bound": [d.upper_bound for d in dated],
            "language": [item.language for item in items],
            "boilerplate_share": [item.boilerplate for item in items],
            "revision_key": [item.raw.revision_key for item in items],
            "metadata": [
                None if item.raw.metadata is None else canonical_json(item.raw.metadata)
                for item in items
            ],
            "file": [item.file for item in items],
            "position": [item.raw.position for item in items],
            "mentions": mentions,
        }
        arrays = [
            column
            if isinstance(column, pa.Array)
            else pa.array(column, UNIT_DOCUMENTS.field(n).type)
            for n, column in columns.items()
        ]
        self._documents.write_table(pa.Table.from_arrays(arrays, schema=UNIT_DOCUMENTS))

    def _add_rows(self, items: list[_Candidate], rows: list[int]) -> None:
        index = np.zeros(len(items), dtype=INDEX)
        keys = b"".join(exact_key(item.normalised) for item in items)
        index["text_key"] = np.frombuffer(keys, dtype="<u8").reshape(-1, 2)
        index["id_key"] = [_key64(item.doc_id) for item in items]
        index["revision_key"] = [_key64(item.raw.revision_key) for item in items]
        index["available_at"] = [item.dated.available_at for item in items]
        index["row"] = rows
        index["num_bytes"] = [len(item.raw.text.encode()) for item in items]
        index["upper_bound"] = [item.dated.upper_bound for item in items]
        self._index.write(index.tobytes())
        self.num_rows += len(items)
        if self._hasher is not None and self._signatures is not None:
            signatures = self._hasher.signatures([item.normalised for item in items])
            self._signatures.write(signatures.tobytes())

    def close(self) -> None:
        self._documents.close()
        self._rejected.close()
        self._index.close()
        if self._signatures is not None:
            self._signatures.close()


def read_index(place: Path) -> NDArray[np.void]:
    """The index rows of a unit's folder."""
    return np.fromfile(place / "index.bin", dtype=INDEX)


def unit_key(settings_key: str, unit: Unit) -> str:
    """The name of a unit's folder."""
    return hash_of([settings_key, unit.content_key()])[:32]


def _position_id(file: str, item: RawDocument) -> str:
    return f"{file}@{item.byte}" if item.byte is not None else f"{file}#{item.position}"


def _key64(text: str | None) -> int:
    if text is None:
        return 0
    key = exact_key(text.encode("utf-8", "surrogatepass"))[:8]
    return int.from_bytes(key, "little") or 1


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _assert_unchanged(unit: Unit, stamps: list[Any]) -> None:

    for part, before in zip(unit.parts, stamps, strict=True):
        now = part.file.path.stat()
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise DataError(
                f"{part.file.path} changed while it was read",
                remedy="build from a copy that nothing writes to",
            )
