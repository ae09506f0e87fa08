"""Page furniture: navigation, notices, archive lists and repeated lines around the text.

Used twice: the share of a document that is furniture, and whether a line in which a year is
mentioned is one (a copyright line of next year says nothing about what the author knew).
"""

from __future__ import annotations

import re

FURNITURE_VERSION = 2

# Plain words: a search for each in a short line is faster than one alternation, and the RE2
# prefilter of whole batches is made from the same list.
CUES = (
    "(c) 19", "(c) 20", "(c)19", "(c)20", "©", "copyright", "all rights reserved",
    "privacy policy", "terms of use", "terms of service", "cookie", "javascript", "subscribe",
    "sign up", "log in", "login", "newsletter", "share this", "share on", "follow us",
    "click here", "read more", "skip to", "powered by", "last updated", "last modified",
    "last revised", "updated on", "posted on", "posted by", "posted in", "page generated",
    "retrieved on", "accessed on", "printed on", "printed from", "archives:", "archive:",
    "related posts", "related articles", "leave a reply", "leave a comment", "permalink",
    "rss feed", "site map", "sitemap", "contact us", "back to top", "previous post",
    "next post", "filed under", "tags:",
)  # fmt: skip
PREFILTER = "|".join(re.escape(cue) for cue in CUES)
"""RE2 expression (to be matched ignoring case) of every text with a cue."""
_DATED = re.compile(
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? (?:\d{1,2},? )?(?:19|20)\d\d",
    re.IGNORECASE,
)
_YEARS = re.compile(r"\b(?:19|20)\d\d\b")
_SENTENCE_END = re.compile(r"[.!?;:][\"')\]]*\s*$|[.!?] +[A-Z]")
_MAX_LINE = 240
_NAVIGATION_CHARS = 48
_FEW_LINES = 8
_DATES_CHARS = 22  # three dates or five years do not fit into less


def _lowered(text: str) -> str:
    """ASCII letters in lower case: cues hold no others."""
    return text.lower() if text.isascii() else text.encode().lower().decode()


def _has_cue(line: str) -> bool:
    lowered = _lowered(line)
    for cue in CUES:  # noqa: SIM110 - a generator costs three times as much, a million times
        if cue in lowered:
            return True
    return False


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
        return _has_cue(near)
    if _has_cue(line):
        return True
    # Both lists need centuries: counting those costs little.
    if (
        len(line) > _DATES_CHARS
        and line.count("19") + line.count("20") >= 3
        and (len(_DATED.findall(line)) >= 3 or len(_YEARS.findall(line)) >= 5)
    ):
        return True
    stripped = line.strip()
    return len(stripped) <= _NAVIGATION_CHARS and _SENTENCE_END.search(stripped) is None


def furniture_share(text: str, *, has_cue: bool) -> float:
    """Share of characters in furniture lines and in lines that repeat.

    Args:
        text: the document.
        has_cue: what the batch's prefilter found; lines are searched only then.
    """
    if not text:
        return 0.0
    count = _cue_chars(_lowered(text)) if has_cue else 0
    lines = text.split("\n")
    if len(lines) > _FEW_LINES:
        count += sum(map(len, lines)) - sum(map(len, set(lines)))
    return min(1.0, count / len(text))


def _cue_chars(lowered: str) -> int:
    """Characters in lines of ordinary length that hold a cue, each line once."""
    counted: set[int] = set()
    count = 0
    for cue in CUES:
        at = lowered.find(cue)
        while at >= 0:
            start = lowered.rfind("\n", 0, at) + 1
            end = lowered.find("\n", at)
            end = len(lowered) if end < 0 else end
            if start not in counted and end - start <= _MAX_LINE:
                counted.add(start)
                count += end - start
            at = lowered.find(cue, end)
    return count
