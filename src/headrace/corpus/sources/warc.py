"""WARC files: HTML responses as documents, dated by ``WARC-Date``, the time of the fetch.

Format: ISO 28500. Only ``response`` records with status 200 and an HTML type are documents;
other record types are no records of the corpus.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.sources.context import ReadContext, decode_declared
from headrace.corpus.sources.html_text import html_text, html_title
from headrace.corpus.sources.streams import BrokenStreamError, read_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.corpus.source_config import WarcSource
    from headrace.corpus.sources.units import Part

_CHARSET = re.compile(rb"charset\s*=\s*[\"']?([A-Za-z0-9_.:-]+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"^transfer-encoding:\s*chunked\s*$", re.IGNORECASE | re.MULTILINE)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[^\r\n]{0,200}\r\n")
_CONTENT_ENCODING = re.compile(rb"^content-encoding:\s*(.*?)\s*$", re.IGNORECASE | re.MULTILINE)
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_MOST_PAGE_BYTES = 64 << 20


class _Stream:
    """Exact reads and skips over pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = b""
        self._at = 0  # what stands before it in ``_held`` is used
        self.offset = 0

    def _fill(self) -> bool:
        piece = next(self._pieces, b"")
        self._held, self._at = self._held[self._at :] + piece, 0
        return bool(piece)

    def line(self) -> bytes | None:
        while (end := self._held.find(b"\n", self._at)) < 0:
            if len(self._held) - self._at > 1 << 20 or not self._fill():
                return None
        line = self._held[self._at : end + 1]
        self._at = end + 1
        self.offset += len(line)
        return line.rstrip(b"\r\n")

    def take(self, size: int, *, keep: bool) -> bytes | None:
        """The next ``size`` bytes (empty when not kept), ``None`` when the stream ends first."""
        kept: list[bytes] = []
        while size:
            if self._at == len(self._held) and not self._fill():
                return None
            here = min(size, len(self._held) - self._at)
            if keep:
                kept.append(self._held[self._at : self._at + here])
            self._at += here
            self.offset += here
            size -= here
        return b"".join(kept)

    def rest(self) -> bytes:
        """The beginning of what no line feed ends."""
        return self._held[self._at : self._at + 64].strip()


def _headers(stream: _Stream) -> dict[str, str] | None:
    headers: dict[str, str] = {}
    while (line := stream.line()) is not None:
        if not line:
            return headers
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers.setdefault(name.strip().lower(), value.strip())
    return None


def read_warc(
    source: WarcSource, part: Part, context: ReadContext
) -> Iterator[RawDocument | Rejection]:
    """HTML responses of one WARC file."""
    stream = _Stream(read_pieces(part.file.path))
    position = 0
    while (line := stream.line()) is not None:
        if not line:
            continue
        start = stream.offset - len(line)
        if not line.startswith(b"WARC/"):
            raise BrokenStreamError("corrupt_file", "no WARC record where one begins", start)
        headers = _headers(stream)
        length = (headers or {}).get("content-length", "")
        if headers is None or not length.isdecimal():
            raise BrokenStreamError("corrupt_file", "a WARC record without a length", start)
        is_response = headers.get("warc-type") == "response"
        position += is_response
        keep = is_response and int(length) <= context.max_bytes
        content = stream.take(int(length), keep=keep)
        if content is None:
            raise BrokenStreamError("truncated_file", "the last WARC record is cut", start)
        if stream.line():  # None: the file may end here
            raise BrokenStreamError("corrupt_file", "a WARC record longer than it says", start)
        if is_response and not keep:
            yield Rejection(
                reason="too_long",
                detail=f"{length} bytes; max_document_bytes is {context.max_bytes}",
                position=position,
                byte=start,
            )
        elif is_response:
            item = _response(source, headers, content, position, start)
            if item is not None:
                yield item

    if stream.rest():
        raise BrokenStreamError("truncated_file", "bytes after the last WARC record", stream.offset)


def _decoded(head: bytes, body: bytes) -> bytes:
    """The page as it was meant, where the crawler kept the bytes of the connection.

    Raises:
        ValueError: chunks that are none, or an encoding that is not known here.
        zlib.error: a compressed body that is damaged.
    """
    if _CHUNKED.search(head):
        body = _unchunked(body)
    encoding = _CONTENT_ENCODING.search(head)
    name = b"identity" if encoding is None else encoding[1].lower()
    if name in {b"gzip", b"x-gzip", b"deflate"}:
        if not body.startswith(_COMPRESSED):  # some crawlers keep the header and not the bytes
            return body
        engine = zlib.decompressobj(wbits=47)  # gzip or zlib, by the first bytes
        body = engine.decompress(body, _MOST_PAGE_BYTES)
        if not engine.eof:
            raise ValueError("the compressed page is cut, or very large")
    elif name not in {b"identity", b"utf-8", b"none", b""}:
        raise ValueError(f"Content-Encoding {name.decode('ascii', 'replace')} is not read")
    return body


def _unchunked(body: bytes) -> bytes:
    first = _CHUNK.match(body)
    if first is None:
        return body  # kept as it was meant, under the header of the connection
    parts: list[bytes] = []
    at = 0
    while (size := _CHUNK.match(body, at)) is not None:
        length = int(size[1], 16)
        if length == 0:
            return b"".join(parts)
        parts.append(body[size.end() : size.end() + length])
        at = size.end() + length + 2
        if at > len(body):
            break
    raise ValueError("a chunked body without its end")


def _response(
    source: WarcSource, headers: dict[str, str], content: bytes, position: int, byte: int
) -> RawDocument | Rejection | None:
    head, _, body = content.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].split(b" ")
    kind = re.search(rb"^content-type:\s*(.*?)\s*$", head, re.IGNORECASE | re.MULTILINE)
    if len(status) < 2 or status[1] != b"200" or kind is None or b"html" not in kind[1].lower():
        return None
    url = headers.get("warc-target-uri", "").strip("<>")
    try:
        body = _decoded(head, body)
    except (ValueError, zlib.error) as error:
        return Rejection(
            reason="bad_encoding",
            detail=f"the body: {error}",
            position=position,
            byte=byte,
            doc_id=url,
        )
    declared = _CHARSET.search(kind[1]) or _CHARSET.search(body, 0, 4096)
    charset = None if declared is None else declared[1].decode("ascii")
    try:
        page = decode_declared(body, charset, source.encodings)
    except UnicodeDecodeError as error:
        return Rejection(
            reason="bad_encoding", detail=str(error), position=position, byte=byte, doc_id=url
        )
    return RawDocument(
        text=html_text(page),
        position=position,
        byte=byte,
        doc_id=headers.get("warc-record-id", "").strip("<>") or None,
        values={"warc_date": headers.get("warc-date")},
        revision_key=url or None,
        metadata={"url": url, "title": html_title(page)},
    )
