"""Mentions of what comes after the cutoff: years, dates, dated names.

Every mention has the first day it can mean, a kind (how sure it is a date at all) and a
setting: page furniture, talk about the future ("by 2030"), or body. Only body mentions of a
sure kind are evidence that a text was edited, or dated wrongly; the others are counted apart.

Days are int32 since 1970-01-01. One search serves all vintages: mentions after the *earliest*
cutoff are kept with their day, and each vintage counts those after its own.
"""

from __future__ import annotations

import importlib.resources
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

import yaml

from headrace.corpus.checks.furniture import is_furniture
from headrace.corpus.instants import DAY_US
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MENTION_VERSION = 2

LAST_YEAR = 2100
MAX_PER_DOCUMENT = 64
_MAX_YEARS = 256  # a table of years is not read to its end

BARE_YEAR, CUED_YEAR, FULL_DATE, ENTITY = 1, 2, 3, 4
KINDS = {BARE_YEAR: "bare year", CUED_YEAR: "year", FULL_DATE: "date", ENTITY: "dated name"}
BODY, OUTLOOK, FURNITURE = 0, 1, 2
SETTINGS = {BODY: "body", OUTLOOK: "outlook", FURNITURE: "furniture"}
_SHORT_LINE = 120
# Later years are talk of what will be, or numbers: nobody knew them when this was written.
_LAST_KNOWABLE_YEAR = 2060
_BEFORE_DASH = {"mid", "early", "late", "pre", "post", "end", "fy", "cy", "year", "since"}
_EPOCH = date(1970, 1, 1)

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = (
    r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_SOME_MONTH = re.compile("|".join(_MONTHS))
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
# What stands around a year is searched in lower case: ignoring case costs several times as much.
_MONTH_BEFORE = re.compile(rf"(?:{_DAY}(?: of)?[ -])?\b{_MONTH}(?:[ -]{_DAY})?,?[ \n-]$")
_ISO_AFTER = re.compile(r"[-/.](\d{1,2})(?:[-/.](\d{1,2}))?(?!\d)")
_SLASHES_BEFORE = re.compile(r"(?<!\d)(\d{1,2})[-/.](\d{1,2})[-/.]$")
# Units after which four digits are a quantity, whatever stands before them …
_UNIT_AFTER = re.compile(
    r" ?-?(?:%|(?:bits?|bytes?|[kmgt]i?b|px|pixels?|[kmg]?hz|rpm|k?m|cm|mm|kg|lbs?|tons?|miles?"
    r"|feet|ft|dollars?|cents?|euros?|usd|acres|volts?|watts?|copies|votes?|lines?|words?)\b)"
)
# … and nouns that make them one unless a word such as "in" dates them ("in 2019 people …").
_COUNTED_AFTER = re.compile(
    r" ?-?(?:people|persons|shares?|units?|points?|times|hours?|minutes?|seconds?|days?|weeks?"
    r"|years?|users?|employees)\b"
)
_NUMBER_BEFORE = re.compile(
    r"(?:\b(?:pages?|pp?|nos?|number|rfc|iso|din|ieee|ansi|ports?|sections?|sec|room|bugs?|closes"
    r"|issues?|version|v|model|chapter|item|lines?|figure|fig|table|id|code|zip|suite|box|error"
    r"|width|height|size|lp|ms|kb)\b[.:]?|[#$€£¥§№~^=+*<>]) ?#?$"
)
# CVE-2013-2063: the number after a year that belongs to an identifier.
_SERIAL_BEFORE = re.compile(r"[A-Za-z][-/]\d{4}[-\u2013]$")
_CUE_BEFORE = re.compile(
    r"\b(?:in|since|during|until|till|before|after|of|from|to|through|years?|fiscal|fy|early|late"
    r"|mid|spring|summer|autumn|fall|winter|q[1-4]|quarter|half|and|between|around|circa|by|for)"
    r"[ \n-]$|\b[fc]y$|(?<!\d)\d{4}[-\u2013]$"
)
# Talk of what will be: words that bind to the year itself, and words of its sentence.
_OUTLOOK_BEFORE = re.compile(
    r"\b(?:by|until|till|through|before)(?: the)?(?: end of| year| fiscal year| fiscal)?[ \n]$"
)
_OUTLOOK_NEAR = re.compile(
    r"\b(?:will|shall|would|expect\w*|expir\w*|matur\w*|due (?:in|on|by)|plan(?:s|ned|ning)?"
    r"|forecast\w*|project(?:ed|ions?)|goals?|targets?|future|budget\w*|propos\w*|estimated to"
    r"|anticipat\w*|schedul\w*|deadline|horizon|upcoming|coming years?|next|no later than"
    r"|beginning|starting|hopes? to|aims? to|intend\w*|outlook)\b"
)
_SENTENCE = re.compile(r"[.!?][\"')\]]?\s")


@dataclass(frozen=True, slots=True)
class Mention:
    """One mention: the first day it can mean, what it is, where it stands."""

    day: int
    kind: int
    setting: int
    offset: int


def year_expression(first: int, last: int = LAST_YEAR) -> str:
    """A regular expression (for re and RE2) of the years ``first`` to ``last`` as digits."""
    parts: list[str] = []
    year = first
    while year <= last:
        if year % 100 == 0 and year + 99 <= last:
            parts.append(f"{year // 100}[0-9][0-9]")
            year += 100
        elif year % 10 == 0 and year + 9 <= last:
            parts.append(f"{year // 10}[0-9]")
            year += 10
        else:
            parts.append(str(year))
            year += 1
    return "(?:" + "|".join(parts) + ")"


def load_entities(extra: Path | None) -> dict[str, date]:
    """The built-in dated names and those of a YAML file ``name: first public day``.

    Raises:
        ConfigError: the file is not such a mapping.
    """
    built_in = importlib.resources.files("headrace.corpus.checks") / "entities.yaml"
    entities: dict[str, date] = yaml.safe_load(built_in.read_text(encoding="utf-8"))
    if extra is not None:
        try:
            loaded = yaml.safe_load(extra.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(
                f"entities_file {extra} cannot be read: {error}",
                remedy="write it as YAML lines of name: YYYY-MM-DD",
            ) from error
        if not isinstance(loaded, Mapping) or not all(
            isinstance(name, str)
            and name
            and isinstance(day, date)
            and not isinstance(day, datetime)
            for name, day in loaded.items()
        ):
            raise ConfigError(
                f"entities_file {extra} is no mapping of names to days",
                remedy="write lines such as 'ChatGPT: 2022-11-30'",
            )
        entities = {**entities, **loaded}
    return entities


class MentionFinder:
    """Finds mentions after one instant; made once a worker."""

    def __init__(self, cutoff_us: int, entities: Mapping[str, date]) -> None:
        """Prepare expressions for everything later than the (earliest) cutoff."""
        self.cutoff_day = cutoff_us // DAY_US
        moment = datetime.fromtimestamp(0, UTC).date().toordinal() + self.cutoff_day
        first_year = min(date.fromordinal(moment + 1).year, LAST_YEAR)
        later = {
            name: (day - _EPOCH).days
            for name, day in entities.items()
            if (day - _EPOCH).days > self.cutoff_day
        }
        self._entity_days = later
        self.first_year = first_year
        self.later_names = frozenset(later)
        names = "|".join(re.escape(name) for name in sorted(later, key=lambda n: (-len(n), n)))
        self._entity = re.compile(rf"(?<!\w)(?:{names})(?!\w)") if later else None
        years = year_expression(first_year)
        self._year = re.compile(years)
        self.year_prefilter = years
        """RE2 expression that every text with a year after the cutoff matches."""
        self.name_prefilter = "|".join(map(re.escape, sorted(later))) or None
        """The same of dated names; ``None`` if none is later."""

    def find(self, text: str, *, has_entity: bool = True) -> list[Mention]:
        """Mentions in order of offset, at most ``MAX_PER_DOCUMENT``; the surest are kept.

        Args:
            text: the document.
            has_entity: what the batch's prefilter found; names are searched only then.
        """
        found = list(itertools.islice(self._years(text), _MAX_YEARS))
        if has_entity:
            found += self._entities(text)
        if len(found) > MAX_PER_DOCUMENT:
            found.sort(key=lambda m: (m.setting, -m.kind, m.offset))
            del found[MAX_PER_DOCUMENT:]
        found.sort(key=lambda m: (m.offset, m.kind))
        return found

    def _entities(self, text: str) -> Iterator[Mention]:
        if self._entity is None:
            return
        for match in self._entity.finditer(text):
            setting = FURNITURE if is_furniture(text, match.start()) else BODY
            yield Mention(self._entity_days[match[0]], ENTITY, setting, match.start())

    def _years(self, text: str) -> Iterator[Mention]:
        line_end, on_furniture = -1, False
        for match in self._year.finditer(text):
            start, end = match.span()
            found = _judge_year(text, start, end)
            if found is None:
                continue
            kind, day = found
            if day <= self.cutoff_day:
                continue
            if start >= line_end:  # short lines are furniture as a whole: judged once
                on_furniture = is_furniture(text, start)
                following = text.find("\n", start)
                line_end = following if 0 <= following <= start + _SHORT_LINE else end
            if on_furniture:
                setting = FURNITURE
            elif _is_outlook(text, start, end):
                setting = OUTLOOK
            else:
                setting = BODY
            yield Mention(day, kind, setting, start)


def _is_outlook(text: str, start: int, end: int) -> bool:
    """Whether the year at ``start`` is spoken of as still to come, in its own sentence."""
    before, after = text[max(0, start - 80) : start].lower(), text[end : end + 60].lower()
    if before[-1:] in {" ", "\n"} and _OUTLOOK_BEFORE.search(before[-32:]) is not None:
        return True
    sentence = _SENTENCE.split(before)[-1] + "0" + _SENTENCE.split(after)[0]
    return _OUTLOOK_NEAR.search(sentence) is not None


def _judge_year(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Kind and first day of the four digits at ``start``, or ``None`` if they are no year."""
    before = text[max(0, start - 32) : start]
    after = text[end : end + 16]
    previous, following = before[-1:], after[:1]
    if previous.isdigit() or following.isdigit():
        return None
    if following.isalpha() or following == "_" or previous in {"_", "@", "&"}:
        return None
    if previous.isalpha() and before[-2:].lower() not in {"fy", "cy"}:
        return None
    if previous in {"-", "\u2013"} and _SERIAL_BEFORE.search(before):
        return None
    if previous in {".", ","} and before[-2:-1].isdigit() and not _SLASHES_BEFORE.search(before):
        return None
    if following in {".", ",", ":"} and after[1:2].isdigit() and not _iso_day(after):
        return None
    year = int(text[start:end])
    if (identifier := _dated_identifier(before, after)) is not None:
        return (ENTITY, _days(year, 1, 1)) if identifier else None
    if (iso := _iso_day(after)) is not None:
        return FULL_DATE, _days(year, *iso)
    # The windows are as long as what they are searched for; most places have none of it.
    low, low_after = before.lower(), after.lower()
    spaced = previous in {" ", "\n", "-"}
    named = _MONTH_BEFORE.search(low) if spaced and _SOME_MONTH.search(low) else None
    if named is not None:
        month = _MONTHS.index(named[2][:3]) + 1
        day = int(named[3] or named[1] or 1)
        return FULL_DATE, _days(year, month, day if 1 <= day <= 31 else 1)
    slashes = _SLASHES_BEFORE.search(before) if previous in {"-", "/", "."} else None
    if slashes is not None:
        first, second = int(slashes[1]), int(slashes[2])
        month = min(m for m in (first, second, 12) if 1 <= m <= 12)  # the earlier reading
        return FULL_DATE, _days(year, month, 1)
    if _UNIT_AFTER.match(low_after) or _NUMBER_BEFORE.search(low[-16:]):
        return None
    if year <= _LAST_KNOWABLE_YEAR and _CUE_BEFORE.search(low[-12:]):
        return CUED_YEAR, _days(year, 1, 1)
    return None if _COUNTED_AFTER.match(low_after) else (BARE_YEAR, _days(year, 1, 1))


def _dated_identifier(before: str, after: str) -> bool | None:
    """True for CVE-2019-1234 and its like, False for RFC-2046, ``None`` for no identifier."""
    if before[-1:] not in {"-", "/"} or not before[-2:-1].isalpha():
        return None
    prefix = re.search(r"([A-Za-z]+)[-/]$", before)
    if prefix is None:
        return None
    if prefix[1].upper() in {"CVE", "DSA", "USN", "RHSA", "GHSA", "MFSA", "XSA", "SA"}:
        return after[:1] == "-" and after[1:2].isdigit()
    if prefix[1][:3].lower() in _MONTHS or prefix[1].lower() in _BEFORE_DASH:
        return None
    return None if "/" in before[-1:] else False


def _iso_day(after: str) -> tuple[int, int] | None:
    match = _ISO_AFTER.match(after)
    if match is None or not 1 <= int(match[1]) <= 12:
        return None
    if after[0] == "." and match[2] is None:
        return None  # 2019.1 is a version
    day = int(match[2]) if match[2] else 1
    return int(match[1]), day if 1 <= day <= 31 else 1


def _days(year: int, month: int, day: int) -> int:
    try:
        return (date(year, month, day) - _EPOCH).days
    except ValueError:
        return (date(year, month, 1) - _EPOCH).days
