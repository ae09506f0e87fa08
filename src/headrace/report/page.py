"""What a report consists of: cards, sections and blocks, all plain data.

Sections are built once as these objects; the HTML and ``report.json`` are two renderings of
them, so that they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.report.figures import theme

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_KEY_COLUMNS = frozenset({"Model", "Channel", "Pair", "Corpus"})


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure in both layouts. ``data`` is what it shows, for ``report.json``."""

    name: str
    wide: str
    narrow: str
    caption: str
    data: Any = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of written cells; ``numeric`` columns are set right."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    caption: str = ""

    @property
    def cells(self) -> list[list[tuple[str, str]]]:
        """Rows of ``(text, CSS classes)``: ``n`` numbers, ``k`` names, ``same`` as above."""
        keys = {index for index, name in enumerate(self.columns) if name in _KEY_COLUMNS}
        rows: list[list[tuple[str, str]]] = []
        for row, cells in enumerate(self.rows):
            styled = []
            for column, text in enumerate(cells):
                style = "n" if column in self.numeric else "k" if column in keys else ""
                repeats = row > 0 and self.rows[row - 1][column] == text
                if column == 0 and column in keys and repeats:
                    style += " same"
                styled.append((text, style))
            rows.append(styled)
        return rows


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Short labelled values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """A sentence set apart. ``kind``: ``"missing"``, ``"warning"`` or ``"failed"``."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A heading inside a section."""

    text: str


Block = Picture | Table | Facts | Paragraph | Note | Heading


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and its blocks. ``short`` names it in the list of sections."""

    name: str
    title: str
    short: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Card:
    """Page one for one model: the verdict, its meaning, and the picture to look at first."""

    model: str
    cutoff: str | None
    verdict: str
    headline: str
    meaning: str
    sentences: Sequence[str]
    cautions: Sequence[str]
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Page:
    """The whole report."""

    title: str
    headline: str
    subtitle: str
    cards: Sequence[Card]
    front: Sequence[Block]
    sections: Sequence[Section]
    footer: Sequence[str] = field(default_factory=tuple)

    def notes(self, kind: str) -> list[str]:
        """Texts of all notes of one kind, in reading order."""
        blocks = [*self.front, *(block for card in self.cards for block in card.blocks)]
        blocks += [block for section in self.sections for block in section.blocks]
        return [block.text for block in blocks if isinstance(block, Note) and block.kind == kind]


def picture(name: str, draw: Callable[[int, str], str], caption: str, data: Any = None) -> Picture:
    """Draw both layouts; ``draw`` takes a width in pixels and an identity for the SVG's ids."""
    return Picture(
        name=name,
        wide=draw(theme.WIDE, f"{name}-w"),
        narrow=draw(theme.NARROW, f"{name}-n"),
        caption=caption,
        data=data,
    )
