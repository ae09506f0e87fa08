"""EDGAR full-text submissions: one file a filing, dated by its acceptance time.

Source of the format: EDGAR public dissemination specification (SGML header, labelled or
tagged, then ``<DOCUMENT>`` sections). An amendment (form ``10-K/A``) is a filing of its own
with its own acceptance time; filings of the same filer, form and period share a revision key.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.corpus.document import RawDocument, Rejection
from headrace.corpus.sources.context import ReadContext, decode
from headrace.corpus.sources.html_text import html_text, looks_like_html
from headrace.corpus.sources.streams import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.corpus.source_config import EdgarSource
    from headrace.corpus.sources.units import Part

_FIELDS = {
    b"<ACCEPTANCE-DATETIME>": "acceptance_datetime",
    b"ACCESSION NUMBER:": "accession",
    b"CONFORMED SUBMISSION TYPE:": "form",
    b"CONFORMED PERIOD OF REPORT:": "period",
    b"FILED AS OF DATE:": "filed_date",
    b"COMPANY CONFORMED NAME:": "company",
    b"CENTRAL INDEX KEY:": "cik",
    # The same in the tagged header of the dissemination feed's files.
    b"<ACCESSION-NUMBER>": "accession",
    b"<TYPE>": "form",
    b"<PERIOD>": "period",
    b"<FILING-DATE>": "filed_date",
    b"<CONFORMED-NAME>": "company",
    b"<CIK>": "cik",
}
_XBRL_WRAPPER = re.compile(r"</?(?:XBRL|XML|TEXT|PDF)>", re.IGNORECASE)
_HEADER_LINES = 2000
_HEADER_ENDS = {b"</SEC-HEADER>", b"</IMS-HEADER>", b"<DOCUMENT>"}


class _Header:
    """Values of the SGML header; the first filer's where several are named."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def take(self, line: bytes) -> None:
        stripped = line.strip()
        for prefix, name in _FIELDS.items():
            if stripped.startswith(prefix) and name not in self.values:
                self.values[name] = stripped[len(prefix) :].strip().decode("ascii", "replace")

    def revision_key(self) -> str | None:
        form = self.values.get("form", "").removesuffix("/A")
        period = self.values.get("period")
        cik = self.values.get("cik")
        return f"{cik}/{form}/{period}" if cik and form and period else None


def read_edgar(
    source: EdgarSource, part: Part, context: ReadContext
) -> Iterator[RawDocument | Rejection]:
    """The documents of one submission: the main one, or all that hold text."""
    header = _Header()
    lines = read_lines(part.file.path, limit=context.max_bytes)
    for num_lines, line in enumerate(lines):
        if (line.content or b"").strip() in _HEADER_ENDS:
            break
        header.take(line.content or b"")
        if num_lines > _HEADER_LINES:
            break
    if "accession" not in header.values:
        yield Rejection(
            reason="bad_record", detail="no EDGAR header with an accession number", byte=0
        )
        return
    form = header.values.get("form", "")
    wanted = not source.forms or form.removesuffix("/A") in source.forms
    position = 0
    inside, skipping, size, start = False, False, 0, 0
    held: list[bytes] = []
    kind = ""
    for line in lines:
        content = line.content
        if content is not None and content.startswith(b"<TYPE>"):
            kind = content[6:].strip().decode("ascii", "replace")
            continue
        marker = b"" if content is None else content.strip().upper()
        if marker == b"<TEXT>":
            position += 1
            main = position == 1
            inside, start, size, held = True, line.offset, 0, []
            skipping = not wanted or (source.documents == "main" and not main) or _is_binary(kind)
        elif marker == b"</TEXT>" and inside:
            inside = False
            if not skipping:
                yield _document(source, header, kind, held, position=position, byte=start)
        elif inside and not skipping:
            size += line.length + 1
            if content is None or size > context.max_bytes:
                skipping = True
                yield Rejection(
                    reason="too_long",
                    detail=f"document {position} ({kind}) is over {context.max_bytes} bytes",
                    position=position,
                    byte=start,
                )
            else:
                held.append(content)
    if inside:
        yield Rejection(
            reason="truncated_file",
            detail=f"document {position} ({kind}) has no </TEXT>",
            position=position,
            byte=start,
        )


def _is_binary(kind: str) -> bool:
    return kind.upper() in {
        "GRAPHIC",
        "ZIP",
        "EXCEL",
        "PDF",
        "XML",
        "JSON",
    } or kind.upper().startswith(("EX-101", "EX-104"))


def _document(
    source: EdgarSource,
    header: _Header,
    kind: str,
    held: list[bytes],
    *,
    position: int,
    byte: int,
) -> RawDocument | Rejection:
    values = header.values
    doc_id = values["accession"] if position == 1 else f"{values['accession']}/{position}"
    try:
        text = decode(b"\n".join(held), source.encodings)
    except UnicodeDecodeError as error:
        return Rejection(
            reason="bad_encoding", detail=str(error), position=position, byte=byte, doc_id=doc_id
        )
    text = _XBRL_WRAPPER.sub("", text)
    text = html_text(text) if looks_like_html(text) else text.strip()
    revision = header.revision_key()
    return RawDocument(
        text=text,
        position=position,
        byte=byte,
        doc_id=doc_id,
        values={
            "acceptance_datetime": values.get("acceptance_datetime"),
            "filed_date": values.get("filed_date"),
            "event_time": values.get("period"),
        },
        revision_key=revision if revision is None or position == 1 else f"{revision}/{kind}",
        metadata={
            name: values[name] for name in ("form", "company", "cik", "period") if name in values
        },
    )
