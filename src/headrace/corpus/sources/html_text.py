"""Text of an HTML page: tags out, entities resolved, blocks on lines of their own.

Not a readability extractor: navigation stays, and the boilerplate check counts it.
"""

from __future__ import annotations

import html
import re

_HIDDEN = ("script", "style", "noscript", "template", "head", "svg", "ix:header")
_OPENED = re.compile(rf"<!--|<({'|'.join(_HIDDEN)})\b", re.IGNORECASE)
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
    text = _without_hidden(page.replace("\n", " "))
    text = _CELL.sub(" ", _BLOCK.sub("\n", text))
    text = html.unescape(_TAG.sub("", text))
    return _LINES.sub("\n", _SPACES.sub(" ", text)).strip()


def _without_hidden(page: str) -> str:
    """The page without comments and hidden elements; one that is not closed ends the page.

    One walk from left to right: a page of a million open tags takes no longer than another.
    """
    lowered = page.lower() if page.isascii() else page
    kept: list[str] = []
    start = 0
    while (opened := _OPENED.search(page, start)) is not None:
        kept.append(page[start : opened.start()])
        closing = "-->" if opened[1] is None else f"</{opened[1].lower()}"
        end = lowered.find(closing, opened.end())
        if end < 0 and opened[1] is not None:
            end = page.find(f"</{opened[1]}", opened.end())
        if end < 0:
            return " ".join(kept)
        end = page.find(">", end) + 1
        if end == 0:
            return " ".join(kept)
        start = end
    kept.append(page[start:])
    return " ".join(kept)
