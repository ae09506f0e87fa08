"""Readers of every source type, and how its files are cut into units.

A reader turns a part of a file into documents and rejections, in order, in bounded memory.
It judges structure only; dates and texts are judged by the pass over units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.source_config import (
    BaseSource,
    CcNewsSource,
    DebianChangelogSource,
    EdgarSource,
    FineWebSource,
    FolderSource,
    HfDatasetSource,
    JsonlSource,
    MailSource,
    ParquetSource,
    WarcSource,
)
from headrace.corpus.sources.changelog import read_changelog
from headrace.corpus.sources.context import ReadContext
from headrace.corpus.sources.edgar import read_edgar
from headrace.corpus.sources.folder import read_folder
from headrace.corpus.sources.mail import read_mail
from headrace.corpus.sources.rows import read_jsonl, split_jsonl
from headrace.corpus.sources.streams import BrokenStreamError
from headrace.corpus.sources.tables import read_arrow, read_parquet, split_parquet
from headrace.corpus.sources.units import InputFile, Part
from headrace.corpus.sources.warc import read_warc

READER_VERSION = 3
"""Changes whenever the same file could give other documents."""

_Reader = Callable[[Any, Part, ReadContext], Iterator[RawDocument | Rejection]]

_READERS: dict[type[BaseSource], _Reader] = {
    JsonlSource: read_jsonl,
    ParquetSource: read_parquet,
    WarcSource: read_warc,
    EdgarSource: read_edgar,
    MailSource: read_mail,
    DebianChangelogSource: read_changelog,
    FolderSource: read_folder,
}


def _is_parquet(file: InputFile) -> bool:
    with file.path.open("rb") as stream:
        return stream.read(4) == b"PAR1"


def _reader_of(source: BaseSource, file: InputFile) -> _Reader:
    if isinstance(source, (FineWebSource, CcNewsSource)):
        return read_parquet if _is_parquet(file) else read_jsonl
    if isinstance(source, HfDatasetSource):
        return read_parquet if _is_parquet(file) else read_arrow
    return _READERS[type(source)]


def read_part(
    source: BaseSource, part: Part, context: ReadContext
) -> Iterator[RawDocument | Rejection]:
    """Documents and rejections of one part, in order; a broken stream ends in a rejection."""
    if part.file.num_bytes == 0:
        yield Rejection(reason="empty_file", detail="0 bytes", byte=0)
        return
    context.num_positions = 0
    num_seen = 0
    try:
        for item in _reader_of(source, part.file)(source, part, context):
            num_seen += 1
            yield item
    except BrokenStreamError as error:
        yield Rejection(reason=error.reason, detail=error.detail, byte=error.offset)
        return
    if num_seen == 0 and part.whole:
        yield Rejection(reason="empty_file", detail="no record", byte=0)


def split_file(source: BaseSource, file: InputFile) -> list[tuple[int, int, int]]:
    """Ranges of one file that can be read on their own."""
    if file.num_bytes == 0:
        return [(0, -1, 0)]
    if isinstance(source, ParquetSource) or (
        isinstance(source, HfDatasetSource) and _is_parquet(file)
    ):
        return list(split_parquet(file))
    if isinstance(source, (FineWebSource, CcNewsSource)):
        return list(split_parquet(file) if _is_parquet(file) else split_jsonl(file))
    if isinstance(source, JsonlSource):
        return list(split_jsonl(file))
    return [(0, -1, file.num_bytes)]
