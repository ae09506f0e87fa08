"""Debian changelogs: one document an entry, dated by the entry's trailer line.

Format: deb-changelog(5). An entry without a trailer is a rejection, and so is whatever
stands outside entries; comments and the notes of tools that cut a changelog are no records.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.sources.context import ReadContext, decode
from headrace.corpus.sources.streams import UTF8_BOM, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.corpus.source_config import DebianChangelogSource
    from headrace.corpus.sources.units import Part

_HEADER = re.compile(rb"(\w[-+0-9a-z.]*) \(([^\s()]+)\)((?:\s+[-+0-9a-z.]+)+);(.*)", re.IGNORECASE)
_TRAILER = re.compile(rb" -- (.*) <([^<>]*)>\s*(.*)")
_NO_RECORD = re.compile(
    rb"\s*$|#|/\*|\*/|vim:|\$Id|;;|Local variables:|End:|mode:|[a-z-]+: [a-z0-9-]+$", re.IGNORECASE
)


def read_changelog(
    source: DebianChangelogSource, part: Part, context: ReadContext
) -> Iterator[RawDocument | Rejection]:
    """Entries of one changelog, plain or compressed."""
    position, start, held_bytes = 0, 0, 0
    header: re.Match[bytes] | None = None
    held: list[bytes] = []
    stray: int | None = None

    def unfinished() -> Rejection:
        return Rejection(
            reason="bad_record",
            detail="the entry has no trailer with a date",
            position=position,
            byte=start,
        )

    for line in read_lines(part.file.path, limit=context.max_bytes):
        content = (line.content or b"").rstrip(b"\r").removeprefix(UTF8_BOM)
        opened = _HEADER.fullmatch(content)
        if opened is not None:
            if header is not None:
                yield unfinished()
            position, start, header = position + 1, line.offset, opened
            held, held_bytes, stray = [content], 0, None
            continue
        if header is None:
            if stray is None and not _NO_RECORD.match(content):
                stray, position = line.offset, position + 1
                yield Rejection(
                    reason="bad_record",
                    detail="text outside changelog entries",
                    position=position,
                    byte=line.offset,
                )
            continue
        held_bytes += line.length + 1
        if line.content is None or held_bytes > context.max_bytes:
            yield Rejection(
                reason="too_long",
                detail=f"an entry over {context.max_bytes} bytes",
                position=position,
                byte=start,
            )
            header, held = None, []
            continue
        trailer = _TRAILER.fullmatch(content)
        if trailer is None:
            held.append(content)
            continue
        yield _entry(source, header, held, trailer, position=position, byte=start)
        header, held = None, []
    if header is not None:
        yield unfinished()


def _entry(
    source: DebianChangelogSource,
    header: re.Match[bytes],
    held: list[bytes],
    trailer: re.Match[bytes],
    *,
    position: int,
    byte: int,
) -> RawDocument | Rejection:
    try:
        # The trailer dates the entry and names a person; neither belongs into the text.
        text = decode(b"\n".join(held).strip(), source.encodings)
        package, version = (
            header[1].decode("ascii", "replace"),
            header[2].decode("ascii", "replace"),
        )
    except UnicodeDecodeError as error:
        return Rejection(reason="bad_encoding", detail=str(error), position=position, byte=byte)
    return RawDocument(
        text=text,
        position=position,
        byte=byte,
        doc_id=f"{package}_{version}",
        values={"date": trailer[3].decode("ascii", "replace")},
        metadata={"package": package, "version": version},
    )
