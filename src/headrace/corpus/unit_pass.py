"""The pass over one unit: read, date, check, fingerprint; a pure function of the unit's key.

The files it leaves are described in :mod:`headrace.corpus.unit_files`. Memory: a batch of a
few MiB of text at a time, whatever the unit.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.corpus.checks.mentions import MentionFinder, load_entities
from headrace.corpus.checks.survey import Survey, make_surveyor
from headrace.corpus.config import CorpusConfig, rule_for
from headrace.corpus.cutoff import Dater
from headrace.corpus.document import Rejection
from headrace.corpus.files import hash_of, is_whole, whole_folder
from headrace.corpus.fingerprints import MinHasher
from headrace.corpus.instants import InstantError
from headrace.corpus.signing import make_signer
from headrace.corpus.sources import read_part
from headrace.corpus.sources.context import ReadContext
from headrace.corpus.text_buffers import text_column
from headrace.corpus.unit_files import Candidate, UnitWriter, printable
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.corpus.document import RawDocument
    from headrace.corpus.source_config import SourceSettings
    from headrace.corpus.sources.units import Unit

BATCH_DOCUMENTS = 1024
BATCH_CHARS = 2 << 20
# U+FFFD and NUL among the characters: text that was read in a wrong encoding.
DAMAGED_SHARE = 0.01
DAMAGED_CHARS = 2


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
        extra = config.checks.future_mentions.entities_file
        entities = load_entities(Path(extra) if extra else None)
        self._mentions = MentionFinder(cutoffs[0].instant_us, entities)
        self._surveyor = make_surveyor(self._mentions)
        near = config.checks.near_duplicates
        self._signed = near.enabled
        self._signer = make_signer(
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
            writer = UnitWriter(folder, signed=self._signed)
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
    ) -> Iterator[tuple[list[Candidate], list[dict[str, Any]]]]:
        batch: list[Candidate] = []
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
                    judged = self._dated(item, doc_id, name, number)
                    if isinstance(judged, Rejection):
                        rejected.append(self._rejected_row(name, number, judged))
                    else:
                        batch.append(judged)
                        held += len(item.text)
                if len(batch) + len(rejected) >= BATCH_DOCUMENTS or held >= BATCH_CHARS:
                    yield batch, rejected
                    batch, rejected, held = [], [], 0
            counts.num_positions.append(self._context.num_positions)
        yield batch, rejected

    def _dated(self, item: RawDocument, doc_id: str, file: str, part: int) -> Candidate | Rejection:
        """The document with its instants, or the reason why it is damaged or not dated."""
        reason, detail, encoded = _damage(item.text)
        if encoded is not None:
            try:
                return Candidate(
                    raw=item,
                    doc_id=doc_id,
                    file=file,
                    part=part,
                    dated=self._dater.date(item.values),
                    encoded=encoded,
                )
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
            "doc_id": None if item.doc_id is None else printable(item.doc_id),
            "reason": item.reason,
            "detail": printable(item.detail)[:300],
            "available_at": item.available_at,
        }

    def _judge(
        self,
        batch: list[Candidate],
        rejected: list[dict[str, Any]],
        writer: UnitWriter,
        counts: _Counts,
    ) -> None:
        texts = text_column([item.encoded for item in batch])
        marks = self._signer.sign(texts)
        early, late, late_rows = [], [], []
        for row, item in enumerate(batch):
            if item.dated.available_at <= self._latest_us:
                early.append(row)
                continue
            late.append(row)
            late_rows.append(writer.num_rejected + len(rejected))
            rejected.append(self._rejected_candidate(item, "after_cutoff", item.dated.rule))
        writer.add_later([batch[row] for row in late], marks.of(late), late_rows)
        if late:
            batch = [batch[row] for row in early]
            texts, marks = texts.take(pa.array(early, pa.int64())), marks.of(early)
        survey = self._surveyor.survey(texts)
        kept: list[int] = []
        for row, item in enumerate(batch):
            item.language = survey.languages[row]
            item.boilerplate = survey.furniture[row]
            refused = self._filtered(item)
            if refused is None:
                kept.append(row)
            else:
                rejected.append(self._rejected_candidate(item, *refused))
        counts.reasons.update(row["reason"] for row in rejected)
        writer.add_rejected(rejected)
        mentions = self._mentioned(batch, kept, survey)
        if len(kept) < len(batch):
            batch = [batch[row] for row in kept]
            texts, marks = texts.take(pa.array(kept, pa.int64())), marks.of(kept)
        writer.add_documents(self._source.name, batch, texts, marks, mentions)

    def _mentioned(
        self, items: list[Candidate], kept: list[int], survey: Survey
    ) -> list[list[dict[str, int]]]:
        mentions: list[list[dict[str, int]]] = []
        for index in kept:
            found: list[dict[str, int]] = []
            has_name = survey.has_name[index]
            if has_name or survey.has_year[index]:
                found = [
                    {"day": m.day, "kind": m.kind, "setting": m.setting, "offset": m.offset}
                    for m in self._mentions.find(items[index].raw.text, has_entity=has_name)
                ]
            mentions.append(found)
        return mentions

    def _filtered(self, item: Candidate) -> tuple[str, str] | None:
        """Reason and detail where a filter wants the document out."""
        checks = self._checks
        length = len(item.raw.text)
        if length < checks.length.min_chars:
            return "too_short", f"{length} characters"
        if checks.length.max_chars is not None and length > checks.length.max_chars:
            return "over_length", f"{length} characters"
        if checks.languages.keep and item.language not in checks.languages.keep:
            return "language", item.language
        if item.boilerplate > checks.boilerplate.max_document_share:
            return "boilerplate", f"{item.boilerplate:.2f} of the characters"
        return None

    def _rejected_candidate(self, item: Candidate, reason: str, detail: str) -> dict[str, Any]:
        return self._rejected_row(
            item.file,
            item.part,
            Rejection(
                reason=reason,
                detail=detail,
                position=item.raw.position,
                byte=item.raw.byte,
                doc_id=item.doc_id,
                available_at=item.dated.available_at,
            ),
        )


def unit_key(settings_key: str, unit: Unit) -> str:
    """The name of a unit's folder."""
    return hash_of([settings_key, unit.content_key()])[:32]


def _damage(text: str) -> tuple[str, str, bytes | None]:
    """Reason and detail of a text that is none, or its UTF-8."""
    if not text or text.isspace():
        return "empty_text", "no characters but white space", None
    damaged = text.count("\0")
    if not text.isascii():
        damaged += text.count("\ufffd")
    if damaged > DAMAGED_CHARS and damaged > DAMAGED_SHARE * len(text):
        return "bad_encoding", f"{damaged} replacement or NUL characters", None
    try:
        return "", "", text.encode()
    except UnicodeEncodeError:
        return "bad_encoding", "unpaired surrogates", None


def _position_id(file: str, item: RawDocument) -> str:
    return f"{file}@{item.byte}" if item.byte is not None else f"{file}#{item.position}"


def _assert_unchanged(unit: Unit, stamps: list[Any]) -> None:
    for part, before in zip(unit.parts, stamps, strict=True):
        now = part.file.path.stat()
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise DataError(
                f"{part.file.path} changed while it was read",
                remedy="build from a copy that nothing writes to",
            )
