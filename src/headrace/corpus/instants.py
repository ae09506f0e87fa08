"""Reading instants: strings, numbers and date objects to microseconds UTC, never too early.

The invariant: where an instant is known only to a day, month or year, or falls into an hour
that its time zone repeats or skips, the *latest* instant it can mean is returned. A reader
who waits that long has certainly had the document.

This module does not know which field dates a document (:mod:`headrace.corpus.cutoff`).
Instants are int64 microseconds since 1970-01-01T00:00Z, negative before; years 1 to 9998.
"""

from __future__ import annotations

import email.utils
import functools
import re
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from headrace.errors import ConfigError

MICROSECONDS = 1_000_000
DAY_US = 86_400 * MICROSECONDS
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_YEAR = re.compile(r"\d{4}")
_MONTH = re.compile(r"(\d{4})-(\d{2})")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}|\d{8}")
_ZONE = r"(?:Z|[+-]\d{2}(?::?\d{2})?)?"
_HOUR = re.compile(r"\d{4}-?\d{2}-?\d{2}[T ]\d{2}" + _ZONE)
_MINUTE = re.compile(r"\d{4}-?\d{2}-?\d{2}[T ]\d{2}:?\d{2}" + _ZONE)
_TO_SECONDS = re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}")
_WEEK = re.compile(r"\d{4}-?W\d{2}")
_LONGEST_DAY = len("2017-06-30")
# Year first, in other words than ISO 8601's: 2016/01/05, 2016-1-5, 2016.1.5 10:00.
_YEAR_FIRST = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})(?=$|[T ])")
# A day in English words: "5 January 2016", "Tue, 5 Jan 2016", "January 5th, 2016".
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH_NAME = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY_NUMBER = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_WORDED_DAYS = tuple(
    re.compile(rf"(?:[a-z]{{3,9}},? +)?{day_and_month},? +(?P<year>\d{{4}})", re.IGNORECASE)
    for day_and_month in (rf"{_DAY_NUMBER} +{_MONTH_NAME}", rf"{_MONTH_NAME} +{_DAY_NUMBER}")
)
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
_LEAP = re.compile(r"([T ]\d{2}:\d{2}):60(?:\.\d+)?")
_MIDNIGHT = re.compile(r"([T ])24:00(?::00(?:\.0+)?)?(?![:.\d])")
_SLASHED = re.compile(r"\d{1,2}[/.]\d{1,2}[/.]\d{2,4}.*")
_NUMERIC = re.compile(r"[+-]?\d+(\.\d+)?")
_SECONDS_OF_NOW = (1e8, 1e10)  # 1973 to 2286; as milliseconds they would all be early 1970
_PATTERNLESS = ("auto", "unix", "unix_ms", "rfc2822")
_MOST_DIGITS = 10**18
LATEST_ZONE = timezone(timedelta(hours=-12), "latest")


class InstantError(ValueError):
    """A value is not an instant; ``reason`` is one of the bad reasons of ``document.py``."""

    def __init__(self, reason: str, detail: str) -> None:
        """Keep the reason apart from the words."""
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Instant(NamedTuple):  # made for every document: half the time of a frozen dataclass
    """The latest instant a value can mean, in microseconds UTC, and how finely it was given.

    ``precision`` is ``second``, ``minute``, ``hour``, ``day``, ``month`` or ``year``.
    """

    latest_us: int
    precision: str

    @property
    def earliest_us(self) -> int:
        """A lower bound of what the value can mean (never above the true one)."""
        return self.latest_us - _SPAN_US[self.precision]


_SPAN_US = {
    "second": 0,
    "minute": 60 * MICROSECONDS,
    "hour": DAY_US // 24,
    "day": 2 * DAY_US,  # zone changes make days of up to 48 hours
    "month": 32 * DAY_US,
    "year": 367 * DAY_US,
}
_REST = {
    "second": timedelta(0),
    "minute": timedelta(minutes=1, microseconds=-1),
    "hour": timedelta(hours=1, microseconds=-1),
}


def time_zone(name: str) -> tzinfo:
    """A zone by IANA name, ``UTC``, or ``latest`` (UTC-12, where a day ends last of all).

    Raises:
        ConfigError: no such zone.
    """
    if name == "latest":
        return LATEST_ZONE
    if name.upper() in {"UTC", "Z"}:
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigError(
            f"time zone {name!r} is not known",
            remedy="use an IANA name such as America/New_York, UTC, or latest",
        ) from error


def to_microseconds(moment: datetime) -> int:
    """An aware ``datetime`` as microseconds since the epoch, exactly."""
    delta = moment - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * MICROSECONDS + delta.microseconds


def from_microseconds(instant_us: int) -> datetime:
    """Microseconds since the epoch as an aware ``datetime`` in UTC."""
    return _EPOCH + timedelta(microseconds=instant_us)


def format_instant(instant_us: int | None) -> str | None:
    """``2017-06-30T23:59:59.999999Z``; whole seconds without a fraction; ``None`` stays."""
    if instant_us is None:
        return None
    return from_microseconds(instant_us).isoformat().replace("+00:00", "Z")


def month_of(instant_us: int) -> str:
    """The UTC month of an instant, ``2017-06``."""
    moment = from_microseconds(instant_us)
    return f"{moment.year:04d}-{moment.month:02d}"


def localise(naive: datetime, zone: tzinfo) -> int:
    """A wall-clock time in a zone as the latest instant it can be.

    An hour that the zone repeats means its second pass; an hour that it skips is read with
    the offset that gives the later instant.
    """
    first = to_microseconds(naive.replace(tzinfo=zone, fold=0))
    second = to_microseconds(naive.replace(tzinfo=zone, fold=1))
    return max(first, second)


def end_of_day(day: date, zone: tzinfo) -> int:
    """The last microsecond of a day in a zone."""
    following = datetime(day.year, day.month, day.day) + timedelta(days=1)  # noqa: DTZ001 - naive on purpose
    return localise(following, zone) - 1


def _end_of_month(year: int, month: int, zone: tzinfo) -> int:
    following = date(year + month // 12, month % 12 + 1, 1)
    return end_of_day(following - timedelta(days=1), zone)


def _checked_year(year: int, value: object) -> None:
    if not 1 <= year <= 9998:
        raise InstantError("unparseable_date", f"year {year} of {value!r} is out of 1..9998")


def parse_instant(value: Any, zone: tzinfo, form: str = "auto") -> Instant:
    """Read one value.

    Args:
        value: ISO 8601 string (also only a date, month or year), RFC 2822 string,
            ``date``, ``datetime``, or a number where ``form`` says what it counts.
        zone: what a value without a zone means.
        form: ``auto``, ``unix`` (seconds), ``unix_ms``, ``rfc2822``, or a ``strptime`` pattern.

    Raises:
        InstantError: the value is not an instant, or can be read in more than one way.
    """
    if isinstance(value, Decimal):
        value = float(value) if value.is_finite() else str(value)
    if isinstance(value, str):
        return _parse_text(value.strip(), zone, form)
    if isinstance(value, datetime):
        _checked_year(value.year, value)
        moment = to_microseconds(value) if value.tzinfo is not None else localise(value, zone)
        return Instant(moment, "second")
    if isinstance(value, date):
        _checked_year(value.year, value)
        return Instant(end_of_day(value, zone), "day")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if form not in _PATTERNLESS and value % 1 == 0 and abs(value) < _MOST_DIGITS:
            return _parse_text(str(int(value)), zone, form)  # 2016 as %Y, 20160105 as %Y%m%d
        return _parse_number(value, form)
    if isinstance(value, bytes):  # a column of text without the note that it is text
        return _parse_text(value.decode("ascii", "backslashreplace").strip(), zone, form)
    raise InstantError("unparseable_date", f"{type(value).__name__} is not an instant")


def _bare_number(value: object) -> InstantError:
    wanted = "format: unix, unix_ms, or a pattern such as '%Y' or '%Y%m%d'"
    return InstantError("ambiguous_date", f"the bare number {value} needs {wanted}")


def _parse_number(value: float, form: str) -> Instant:
    if isinstance(value, int) and abs(value) >= _MOST_DIGITS:
        raise InstantError("unparseable_date", "a number of so many digits is out of range")
    if form not in {"unix", "unix_ms"}:
        raise _bare_number(value)
    if form == "unix_ms" and _SECONDS_OF_NOW[0] <= value <= _SECONDS_OF_NOW[1]:
        raise InstantError(
            "ambiguous_date", f"{value!r} is early 1970 in unix_ms, and a likely date in unix"
        )
    scale = MICROSECONDS if form == "unix" else 1000
    try:
        instant_us = int(value * scale)
        _checked_year(from_microseconds(instant_us).year, value)
    except (OverflowError, ValueError) as error:
        raise InstantError("unparseable_date", f"{value!r} is out of range") from error
    return Instant(instant_us, "second")


# Dates repeat: a day's documents carry the same string. Bounded, so memory is too.
@functools.lru_cache(maxsize=65_536)
def _parse_text(text: str, zone: tzinfo, form: str) -> Instant:
    if not text:
        raise InstantError("undated", "the date field is empty")
    if len(text) > 64:
        raise InstantError("unparseable_date", f"{text[:32]!r}… is not an instant")
    if form in {"unix", "unix_ms"}:
        if not _NUMERIC.fullmatch(text):
            raise InstantError("unparseable_date", f"{text!r} is not a number")
        return _parse_number(float(text) if "." in text else int(text), form)
    try:
        if form == "rfc2822":
            return _parse_rfc2822(text, zone)
        if form != "auto":
            return _parse_pattern(text, zone, form)
        return _parse_auto(text, zone)
    except InstantError:
        raise
    except (ValueError, OverflowError) as error:
        raise InstantError("unparseable_date", f"{text!r} is not an instant: {error}") from error


def _parse_auto(text: str, zone: tzinfo) -> Instant:
    if _TO_SECONDS.match(text):
        return _parse_iso(text, zone)
    if _YEAR.fullmatch(text):
        _checked_year(int(text), text)
        return Instant(_end_of_month(int(text), 12, zone), "year")
    if month := _MONTH.fullmatch(text):
        _checked_year(int(month[1]), text)
        if not 1 <= int(month[2]) <= 12:
            raise InstantError("unparseable_date", f"{text!r} has no such month")
        return Instant(_end_of_month(int(month[1]), int(month[2]), zone), "month")
    if _DAY.fullmatch(text):
        day = date.fromisoformat(text)
        _checked_year(day.year, text)
        return Instant(end_of_day(day, zone), "day")
    if _NUMERIC.fullmatch(text):
        raise _bare_number(repr(text))
    if _SLASHED.fullmatch(text):
        raise InstantError("ambiguous_date", f"{text!r} needs a format such as '%m/%d/%Y'")
    if (first := _YEAR_FIRST.match(text)) is not None:
        written = f"{first[1]}-{first[3]:>02}-{first[4]:>02}{text[first.end() :]}"
        if written != text:
            return _parse_auto(written, zone)
    if text[:4].isdecimal():
        return _parse_iso(text, zone)
    return _parse_rfc2822(text, zone)


def _worded_day(text: str, zone: tzinfo) -> Instant | None:
    """A day in words, at its end."""
    found = next((m for worded in _WORDED_DAYS if (m := worded.fullmatch(text))), None)
    if found is None:
        return None
    month = _MONTHS.index(found["month"][:3].lower()) + 1
    day = date(int(found["year"]), month, int(found["day"]))
    _checked_year(day.year, text)
    return Instant(end_of_day(day, zone), "day")


def _parse_iso(text: str, zone: tzinfo) -> Instant:
    if text.endswith(" UTC"):
        text, zone = text.removesuffix(" UTC"), UTC
    if ":60" in text and (leap := _LEAP.search(text)):
        text = text[: leap.start()] + leap[1] + ":59.999999" + text[leap.end() :]
    whole_day = timedelta(0)
    if "24:00" in text and (midnight := _MIDNIGHT.search(text)):
        text = f"{text[: midnight.start()]}{midnight[1]}00:00:00{text[midnight.end() :]}"
        whole_day = timedelta(days=1)
    precision = "second"
    if not _TO_SECONDS.match(text):
        if _WEEK.fullmatch(text):
            raise InstantError("unparseable_date", f"{text!r} is a week: no day of it is named")
        if len(text) <= _LONGEST_DAY:  # 2017-W26-5, and days that were followed by a zone
            day = date.fromisoformat(text)
            _checked_year(day.year, text)
            return Instant(end_of_day(day, zone), "day")
        if _HOUR.fullmatch(text):
            precision = "hour"
        elif _MINUTE.fullmatch(text):
            precision = "minute"
    moment = datetime.fromisoformat(text) + whole_day + _REST[precision]
    _checked_year(moment.year, text)
    return Instant(
        to_microseconds(moment) if moment.tzinfo is not None else localise(moment, zone),
        precision,
    )


def _parse_rfc2822(text: str, zone: tzinfo) -> Instant:
    clock = _CLOCK.search(text)
    if clock is None:  # the library gives a day's first second: too early
        if (worded := _worded_day(text, zone)) is not None:
            return worded
        raise InstantError("unparseable_date", f"{text!r} is not an instant")
    precision = "second" if clock[1] else "minute"
    leap = timedelta(0)
    if clock[1] == ":60":
        text = f"{text[: clock.start(1)]}:59{text[clock.end(1) :]}"
        leap = timedelta(microseconds=999_999)
    try:
        moment = email.utils.parsedate_to_datetime(text) + leap
    except (TypeError, IndexError) as error:
        raise InstantError("unparseable_date", f"{text!r} is not an instant") from error
    _checked_year(moment.year, text)
    moment += _REST[precision]
    # "-0000" says that the zone is unknown and comes back naive.
    return Instant(
        to_microseconds(moment) if moment.tzinfo is not None else localise(moment, zone), precision
    )


def _parse_pattern(text: str, zone: tzinfo, pattern: str) -> Instant:
    moment = datetime.strptime(text, pattern)  # noqa: DTZ007 - the rule's zone is applied below
    _checked_year(moment.year, text)
    if any(code in pattern for code in ("%H", "%I", "%c", "%X")):
        precision = "hour"
        if any(code in pattern for code in ("%S", "%c", "%X")):
            precision = "second"
        elif "%M" in pattern:
            precision = "minute"
        moment += _REST[precision]
        return Instant(
            to_microseconds(moment) if moment.tzinfo is not None else localise(moment, zone),
            precision,
        )
    if any(code in pattern for code in ("%d", "%j", "%x")):
        return Instant(end_of_day(moment.date(), zone), "day")
    if any(code in pattern for code in ("%m", "%b", "%B")):
        return Instant(_end_of_month(moment.year, moment.month, zone), "month")
    return Instant(_end_of_month(moment.year, 12, zone), "year")
