"""Text of an HTML page: tags out, entities resolved, blocks on lines of their own.

Not a readability extractor: navigation stays, and the boilerplate check counts it.
"""

from __future__ import annotations

import html
import re

_DROPPED = re.compile(
    r"<!--.*?-->|<(script|style|noscript|template|head|svg|ix:header)\b.*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
_BLOCK = re.compile(
    r"</?(?:p|div|br|li|ul|ol|tr|table|h[1-6]|section|article|header|footer|nav|blockquote|hr|pre|dd|dt)\b[^>]*>",
    re.IGNORECASE,
)
_CELL = re.compile(r"</t[dh]\s*>", re.IGNORECASE)
_TAG = re.compile(r"<[/!?a-zA-Z][^>]*>")
_SPACES = re.compile(r"[ \t\r\f\v\xa0]+")
_LINES = re.compile(r" ?\n[ \n]*")
_TITLE = re.compile(r"<title\b[^>]*>(.*?)</title", re.DOTALL | re.IGNORECASE)
_LOOKS_LIKE = re.compile(r"<(?:html|body|div|p|table|font|br)\b", re.IGNORECASE)


def looks_like_html(text: str) -> bool:
    """Whether the beginning of a text has the tags of a page."""
    return _LOOKS_LIKE.search(text, 0, 20_000) is not None


def html_title(page: str) -> str:
    """The page's title, or an empty string."""
    match = _TITLE.search(page, 0, 50_000)
    return "" if match is None else " ".join(html.unescape(match[1]).split())


def html_text(page: str) -> str:
    """The visible text, one block a line."""
    text = _DROPPED.sub(" ", page.replace("\n", " "))
    text = _CELL.sub(" ", _BLOCK.sub("\n", text))
    text = html.unescape(_TAG.sub("", text))
    return _LINES.sub("\n", _SPACES.sub(" ", text)).strip()
