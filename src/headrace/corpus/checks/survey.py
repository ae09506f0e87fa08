"""What the checks ask of every document, for a batch of texts at once.

One answer two ways: the plain functions of this package, and one compiled scan over the buffer
of an Arrow column where that module was built. The invariant: they agree on every text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.corpus.checks import languages
from headrace.corpus.checks.furniture import CUES, PREFILTER, furniture_share
from headrace.corpus.checks.mentions import LAST_YEAR
from headrace.corpus.text_buffers import text_buffers

try:
    from headrace.corpus import _text
except ImportError:  # built without a compiler
    _text = None  # type: ignore[assignment]  # its absence

if TYPE_CHECKING:
    from headrace.corpus.checks.mentions import MentionFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Of each text: its language, the share of furniture, whether mentions are worth a search.

    Attributes:
        languages: ISO 639-1 codes, or ``und``.
        furniture: share of the characters in furniture lines and in lines that repeat.
        has_year: whether the digits of a year after the cutoff stand anywhere in it.
        has_name: whether a name from after the cutoff does.
    """

    languages: list[str]
    furniture: list[float]
    has_year: list[bool]
    has_name: list[bool]


class Surveyor(Protocol):
    """Made once a worker."""

    def survey(self, texts: pa.LargeStringArray) -> Survey:
        """Look at every text of a column."""
        ...


class PlainSurveyor:
    """The plain functions, text by text."""

    def __init__(self, finder: MentionFinder) -> None:
        """Look for what ``finder`` will judge."""
        self._finder = finder
        self._guesser = languages.LanguageGuesser()

    def survey(self, texts: pa.LargeStringArray) -> Survey:
        """Look at every text of a column."""
        finder = self._finder
        has_cue = pc.match_substring_regex(texts, PREFILTER, ignore_case=True).to_pylist()
        given = texts.to_pylist()
        has_name = [False] * len(given)
        if finder.name_prefilter is not None:
            has_name = pc.match_substring_regex(texts, finder.name_prefilter).to_pylist()
        return Survey(
            languages=[self._guesser.guess(text) for text in given],
            furniture=[
                furniture_share(text, has_cue=cue) for text, cue in zip(given, has_cue, strict=True)
            ],
            has_year=pc.match_substring_regex(texts, finder.year_prefilter).to_pylist(),
            has_name=has_name,
        )


class CompiledSurveyor:
    """One scan in C++."""

    def __init__(self, finder: MentionFinder) -> None:
        """Tell the module what to look for."""
        by_words = list(languages.FUNCTION_WORDS)
        codes = dict.fromkeys((*by_words, *(name for _, _, name in languages.SCRIPTS)))
        self._codes = [*dict.fromkeys((*codes, "ru", "uk")), "und"]  # -1 is the last
        index = {code: number for number, code in enumerate(self._codes)}
        self._native = _text.make_surveyor(
            cues=list(CUES),
            names=sorted(finder.later_names),
            first_year=finder.first_year,
            last_year=LAST_YEAR,
            num_languages=len(by_words),
            words=[
                (word, sum(1 << index[code] for code in of))
                for word, of in languages.words_by_language().items()
            ],
            lower=_lower_letters(),
            scripts=[(low, high, index[name]) for low, high, name in languages.SCRIPTS],
            named=(index["ja"], index["cyrillic"], index["ru"], index["uk"]),
            ukrainian_letters=sorted(map(ord, languages.UKRAINIAN_LETTERS)),
        )

    def survey(self, texts: pa.LargeStringArray) -> Survey:
        """Look at every text of a column."""
        chars, furniture, found, holds = self._native.survey(*text_buffers(texts))
        shares = np.minimum(1.0, furniture / np.maximum(chars, 1))
        return Survey(
            languages=[self._codes[number] for number in found.tolist()],
            furniture=shares.tolist(),
            has_year=((holds & 1) != 0).tolist(),
            has_name=((holds & 2) != 0).tolist(),
        )


def _lower_letters() -> list[tuple[int, int]]:
    """Code points that lower to letters of the function words, each with that letter."""
    letters = {letter for words in languages.FUNCTION_WORDS.values() for letter in words}
    lowered = ((code, chr(code).lower()) for code in range(0x2130))
    return [(code, ord(low)) for code, low in lowered if low in letters and chr(code) != low]


def make_surveyor(finder: MentionFinder) -> Surveyor:
    """The compiled scan where it was built, else the plain functions."""
    return PlainSurveyor(finder) if _text is None else CompiledSurveyor(finder)
