"""Page furniture: navigation, notices, archive lists and repeated lines around the text.

Used twice: the share of a document that is furniture, and whether a line in which a year is
mentioned is one (a copyright line of next year says nothing about what the author knew).
"""

from __future__ import annotations

import re

FURNITURE_VERSION = 1

# One source for both engines: Python's re and the RE2 prefilter of whole batches.
CUES = (
    r"\(c\) ?(?:19|20)|©|copyright|all rights reserved|privacy policy|terms of (?:use|service)"
    r"|cookie|javascript|subscribe|sign up|log ?in\b|newsletter|share (?:this|on)|follow us"
    r"|click here|read more|skip to|powered by|last (?:updated|modified|revised)|updated on"
    r"|posted (?:on|by|in)|page generated|retrieved on|accessed on|printed (?:on|from)"
    r"|archives?:|related (?:posts|articles)|leave a (?:reply|comment)|permalink|rss feed"
    r"|site ?map|contact us|back to top|previous post|next post|filed under|tags:"
)
_CUE = re.compile(CUES, re.IGNORECASE)
_DATED = re.compile(
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? (?:\d{1,2},? )?(?:19|20)\d\d",
    re.IGNORECASE,
)
_YEARS = re.compile(r"\b(?:19|20)\d\d\b")
_SENTENCE_END = re.compile(r"[.!?;:][\"')\]]*\s*$|[.!?] +[A-Z]")
_MAX_LINE = 240
_NAVIGATION_CHARS = 48


def line_around(text: str, offset: int) -> str:
    """The line of a text that an offset falls into."""
    start = text.rfind("\n", 0, offset) + 1
    end = text.find("\n", offset)
    return text[start : len(text) if end < 0 else end]


def is_furniture(text: str, offset: int) -> bool:
    """Whether what stands at ``offset`` belongs to the page and not to the text.

    A notice (copyright, "last updated"), a list of dates (an archive), or a short line
    without a sentence (a heading, a menu entry).
    """
    line = line_around(text, offset)
    if len(line) > _MAX_LINE:
        # A page flattened to one line: only the cue close to the mention counts.
        near = text[max(0, offset - 40) : offset + 44]
        return _CUE.search(near) is not None
    if _CUE.search(line) is not None:
        return True
    if len(_DATED.findall(line)) >= 3 or len(_YEARS.findall(line)) >= 5:
        return True
    stripped = line.strip()
    return len(stripped) <= _NAVIGATION_CHARS and _SENTENCE_END.search(stripped) is None


def furniture_share(text: str, *, has_cue: bool) -> float:
    """Share of characters in furniture lines and in lines that repeat.

    Args:
        text: the document.
        has_cue: what the batch's prefilter found; lines are searched only then.
    """
    lines = text.split("\n")
    total = len(text)
    if total == 0:
        return 0.0
    count = 0
    if has_cue:
        count = sum(len(line) for line in lines if len(line) <= _MAX_LINE and _CUE.search(line))
    if len(lines) > 8:
        seen: set[str] = set()
        for line in lines:
            if line in seen and len(line) > 3:
                count += len(line)
            seen.add(line)
    return min(1.0, count / total)
