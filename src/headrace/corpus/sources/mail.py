"""mbox files and single RFC 822 messages.

The text is the subject and the ``text/plain`` parts (``text/html`` where there is no plain
part). The sender's ``Date`` can lie; the topmost ``Received`` is the receiving server's
clock. The rule that weighs them is the source's, not this reader's.
"""

from __future__ import annotations

import email
import email.errors
import email.header
import email.message
import email.policy
from typing import TYPE_CHECKING

from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.sources.context import ReadContext, decode_declared
from headrace.corpus.sources.html_text import html_text
from headrace.corpus.sources.streams import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.corpus.source_config import MailSource
    from headrace.corpus.sources.units import Part


def read_mail(
    source: MailSource, part: Part, context: ReadContext
) -> Iterator[RawDocument | Rejection]:
    """Messages of one file; a file that does not begin with a ``From `` line is one message."""
    position, start, size = 0, 0, 0
    held: list[bytes] = []
    is_mbox: bool | None = None
    over, after_blank = False, True

    def finish() -> RawDocument | Rejection:
        if over:
            return Rejection(
                reason="too_long",
                detail=f"a message over {context.max_bytes} bytes",
                position=position,
                byte=start,
            )
        return _message(source, b"\n".join(held), position, start)

    for line in read_lines(part.file.path, limit=context.max_bytes):
        content = None if line.content is None else line.content.rstrip(b"\r")
        opens = content is not None and after_blank and content.startswith(b"From ")
        if is_mbox is None:
            is_mbox = opens
            if not opens:
                position, start = 1, 0
        if is_mbox and opens:
            if position:
                yield finish()
            position, start, size, held, over = position + 1, line.offset, 0, [], False
            after_blank = False
            continue
        after_blank = content == b""
        size += line.length + 1
        over = over or content is None or size > context.max_bytes
        if over:
            held = []
        elif content is not None:
            quoted = content.lstrip(b">").startswith(b"From ") and content.startswith(b">")
            held.append(content[1:] if is_mbox and quoted else content)
    if position and (held or over):
        yield finish()


def _message(
    source: MailSource, content: bytes, position: int, byte: int
) -> RawDocument | Rejection:
    try:
        return _document(source, content, position, byte)
    except UnicodeDecodeError as error:
        reason, detail = "bad_encoding", str(error)
    except Exception as error:  # noqa: BLE001 - on damage the library raises what it happens to
        reason, detail = "bad_record", f"no message: {type(error).__name__}: {error}"
    return Rejection(reason=reason, detail=detail, position=position, byte=byte)


def _document(
    source: MailSource, content: bytes, position: int, byte: int
) -> RawDocument | Rejection:
    message = email.message_from_bytes(content, policy=email.policy.compat32)
    if not message.keys():
        return Rejection(
            reason="bad_record", detail="no header fields", position=position, byte=byte
        )
    text = _body(message, source.encodings)
    subject = _header(message, "Subject") or ""
    received = message.get_all("Received") or []
    return RawDocument(
        text=f"{subject}\n\n{text}".strip() if text.strip() else "",
        position=position,
        byte=byte,
        doc_id=(_header(message, "Message-ID") or "").strip("<> \t") or None,
        values={
            "date": _header(message, "Date"),
            "received": str(received[0]).rpartition(";")[2].strip() if received else None,
        },
        metadata={"subject": subject} if subject else None,
    )


def _header(message: email.message.Message, name: str) -> str | None:
    value = message.get(name)
    if value is None:
        return None
    try:
        decoded = email.header.make_header(email.header.decode_header(str(value)))
        return " ".join(str(decoded).split())
    except (LookupError, ValueError, email.errors.MessageError):
        return " ".join(str(value).split())  # as it stands


def _body(message: email.message.Message, encodings: tuple[str, ...]) -> str:
    plain: list[str] = []
    pages: list[str] = []
    for piece in message.walk():
        kind = piece.get_content_type()
        if kind not in {"text/plain", "text/html"} or piece.get_filename():
            continue
        payload = piece.get_payload(decode=True)
        if not isinstance(payload, bytes):
            continue
        declared = piece.get_content_charset()
        text = decode_declared(payload, declared, encodings)
        if kind == "text/plain":
            plain.append(text)
        else:
            pages.append(html_text(text))
    return "\n\n".join(text.strip() for text in (plain or pages))
