"""Rolling an instant to the next session: what appears after the close counts from then on.

Two kinds of calendar: an exchange by its MIC name (``XNYS``; package exchange_calendars), and
``EDGAR``, the business days of the SEC's filing system. The invariant: an instant never
moves to an earlier one.

Source for EDGAR: Regulation S-T, 17 CFR 232.13 (filings accepted after 17:30 Eastern are
dated the next business day) and the SEC's operating hours (06:00 to 22:00 Eastern).
"""

from __future__ import annotations

import bisect
import warnings
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from headrace.corpus.instants import (
    DAY_US,
    InstantError,
    format_instant,
    from_microseconds,
    to_microseconds,
)
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

EDGAR = "EDGAR"
_EASTERN = ZoneInfo("America/New_York")
_MONDAY, _THURSDAY, _SATURDAY, _SUNDAY = 0, 3, 5, 6

# Days on which federal offices were closed by executive order or for mourning, and no filing
# was disseminated. A day too many only rolls later, which is the safe side.
_CLOSED_BY_ORDER = frozenset(
    map(
        date.fromisoformat,
        (
            "1994-04-27", "2001-09-11", "2001-09-12", "2001-12-24", "2003-12-26", "2004-06-11",
            "2007-01-02", "2007-12-24", "2008-12-26", "2012-10-29", "2012-10-30", "2012-12-24",
            "2014-12-26", "2015-12-24", "2018-12-05", "2018-12-24", "2019-12-24", "2020-12-24",
            "2024-12-24", "2024-12-26", "2025-01-09", "2025-12-24", "2025-12-26",
        ),
    )
)  # fmt: skip


def _nth_weekday(year: int, month: int, weekday: int, count: int) -> date:
    first = date(year, month, 1)
    return first + timedelta(days=(weekday - first.weekday()) % 7 + 7 * (count - 1))


def _last_monday_of_may(year: int) -> date:
    last = date(year, 5, 31)
    return last - timedelta(days=last.weekday())


def federal_holidays(year: int) -> frozenset[date]:
    """United States federal holidays observed in a year (5 U.S.C. 6103)."""
    fixed = [date(year, 1, 1), date(year, 7, 4), date(year, 11, 11), date(year, 12, 25)]
    if year >= 2021:
        fixed.append(date(year, 6, 19))
    # New Year's Day of the next year, when it is a Saturday, is observed in this one.
    fixed.append(date(year + 1, 1, 1))
    observed = set()
    for day in fixed:
        if day.weekday() == _SATURDAY:
            observed.add(day - timedelta(days=1))
        elif day.weekday() == _SUNDAY:
            observed.add(day + timedelta(days=1))
        else:
            observed.add(day)
    if year >= 1986:
        observed.add(_nth_weekday(year, 1, _MONDAY, 3))
    observed |= {
        _nth_weekday(year, 2, _MONDAY, 3),
        _last_monday_of_may(year),
        _nth_weekday(year, 9, _MONDAY, 1),
        _nth_weekday(year, 10, _MONDAY, 2),
        _nth_weekday(year, 11, _THURSDAY, 4),
    }
    return frozenset(day for day in observed if day.year == year)


def is_edgar_business_day(day: date) -> bool:
    """Whether the SEC disseminates filings on this day."""
    return (
        day.weekday() < _SATURDAY
        and day not in federal_holidays(day.year)
        and day not in _CLOSED_BY_ORDER
    )


@dataclass(frozen=True, kw_only=True)
class EdgarCalendar:
    """Business days of EDGAR; ``close`` is the last wall-clock time of a day's filings."""

    close: time = time(17, 30)
    reopen: time = time(6, 0)

    def roll(self, instant_us: int) -> int:
        """The instant itself in a business day's hours, else 06:00 of the next such day."""
        local = from_microseconds(instant_us).astimezone(_EASTERN)
        day = local.date()
        if local.time() > self.close:
            day += timedelta(days=1)
        while not is_edgar_business_day(day):
            day += timedelta(days=1)
        reopened = datetime.combine(day, self.reopen, tzinfo=_EASTERN)
        return max(instant_us, to_microseconds(reopened))


@dataclass(frozen=True, kw_only=True)
class SessionCalendar:
    """Sessions as sorted opens and closes in microseconds UTC.

    ``closes`` may hold another wall-clock time of each session's day, after which what appears
    counts from the next session.
    """

    name: str
    opens: Sequence[int] = field(repr=False)
    closes: Sequence[int] = field(repr=False)

    def roll(self, instant_us: int) -> int:
        """The instant itself inside a session, else the next open.

        Also before the open: otherwise what appears at midnight would count before what
        appeared in the evening, and the order of instants would not be kept.
        """
        if not self.closes or not self.opens[0] <= instant_us <= self.closes[-1]:
            raise InstantError(
                "outside_calendar",
                f"{format_instant(instant_us)} is outside the sessions of {self.name}",
            )
        session = bisect.bisect_left(self.closes, instant_us)  # first close >= the instant
        return max(instant_us, self.opens[session])


def load_calendar(
    name: str, *, after: time | None, not_before: date, horizon_us: int
) -> EdgarCalendar | SessionCalendar:
    """A calendar that covers ``not_before`` to a month after ``horizon_us``.

    Args:
        name: ``EDGAR`` or an exchange's MIC.
        after: wall-clock time at the exchange after which an instant rolls; default the close.
        not_before: first day wanted; clipped to what the exchange's calendar knows.
        horizon_us: the latest cutoff; later instants need no calendar.

    Raises:
        ConfigError: no such calendar, or the package is not installed.
    """
    if name.upper() == EDGAR:
        return EdgarCalendar() if after is None else EdgarCalendar(close=after)
    try:
        import exchange_calendars  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"calendar {name!r} needs the package exchange_calendars",
            remedy="pip install 'headrace[corpus]'",
        ) from error
    known = exchange_calendars.get_calendar_names()
    if name not in known:
        raise ConfigError(
            f"calendar {name!r} is not known",
            remedy=f"use EDGAR or one of: {', '.join(sorted(known)[:12])}, …",
        )
    with warnings.catch_warnings():
        # The package's own use of pandas; nothing that a user of ours could mend.
        warnings.simplefilter("ignore")
        return _exchange(exchange_calendars, name, after, not_before, horizon_us)


def _exchange(
    package: Any, name: str, after: time | None, not_before: date, horizon_us: int
) -> SessionCalendar:
    factory = package.get_calendar(name).__class__
    end = min(
        from_microseconds(horizon_us + 31 * DAY_US).date(),
        factory.bound_max().date() if factory.bound_max() is not None else date.max,
    )
    start = max(
        not_before,
        factory.bound_min().date() if factory.bound_min() is not None else date(1900, 1, 1),
    )
    if start >= end:
        raise ConfigError(
            f"calendar {name!r} has no session between {start} and {end}",
            remedy="correct not_before and the cutoff, or name another calendar",
        )
    calendar = package.get_calendar(name, start=str(start), end=str(end))
    return _from_sessions(name, calendar, after)


def _from_sessions(name: str, calendar: Any, after: time | None) -> SessionCalendar:
    opens, closes = [], []
    frame = calendar.schedule
    for session, opened, closed in zip(frame.index, frame["open"], frame["close"], strict=True):
        last = (
            closed.to_pydatetime()
            if after is None
            else datetime.combine(session.date(), after, tzinfo=calendar.tz)
        )
        opens.append(to_microseconds(opened.to_pydatetime()))
        closes.append(to_microseconds(last))
    return SessionCalendar(name=name, opens=tuple(opens), closes=tuple(closes))
