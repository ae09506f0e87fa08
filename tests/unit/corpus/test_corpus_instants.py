"""Instants are never read too early, and nothing but an InstantError comes of a bad one."""

# ruff: noqa: DTZ001, PT017 - wall-clock times, and errors that need not come

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.corpus.instants import (
    InstantError,
    end_of_day,
    format_instant,
    from_microseconds,
    localise,
    month_of,
    parse_instant,
    time_zone,
    to_microseconds,
)
from headrace.errors import ConfigError

ZONES = ["UTC", "America/New_York", "Asia/Seoul", "Asia/Kolkata", "Pacific/Apia", "Europe/London"]
zones = st.sampled_from(ZONES).map(time_zone)
days = st.dates(date(1900, 1, 1), date(2100, 12, 31))
moments = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))


def instant(text: object, zone: str = "UTC", form: str = "auto") -> str | None:
    return format_instant(parse_instant(text, time_zone(zone), form).latest_us)


@given(moments)
def test_aware_moments_are_read_exactly(moment: datetime) -> None:
    read = parse_instant(moment.isoformat(), time_zone("Asia/Seoul"))
    assert read.latest_us == to_microseconds(moment)
    assert from_microseconds(read.latest_us) == moment


@given(days, zones, st.times())
def test_a_day_ends_after_every_moment_of_it(day, zone, clock) -> None:
    end = end_of_day(day, zone)
    assert end >= localise(datetime.combine(day, clock), zone)
    following = from_microseconds(end + 1).astimezone(zone)
    assert following.date() > day
    assert parse_instant(day.isoformat(), zone).latest_us == end


@given(st.datetimes(datetime(1950, 1, 1), datetime(2050, 1, 1)), zones)
def test_wall_clock_times_take_the_later_meaning(naive: datetime, zone) -> None:
    read = localise(naive, zone)
    assert read >= to_microseconds(naive.replace(tzinfo=zone, fold=0))
    assert read >= to_microseconds(naive.replace(tzinfo=zone, fold=1))


@given(days, zones)
def test_coarser_values_are_never_earlier(day: date, zone) -> None:
    exact = parse_instant(day.isoformat(), zone).latest_us
    month = parse_instant(f"{day:%Y-%m}", zone)
    year = parse_instant(f"{day:%Y}", zone)
    assert exact <= month.latest_us <= year.latest_us
    assert month.earliest_us <= exact
    assert year.earliest_us <= month.latest_us


@given(
    st.text(max_size=40) | st.from_regex(r"[0-9]{1,4}[-/. ][0-9a-zA-Z:+ -]{0,24}", fullmatch=True)
)
def test_any_text_is_an_instant_or_an_instant_error(text: str) -> None:
    try:
        parse_instant(text, UTC)
    except InstantError as error:
        assert error.reason in {"undated", "unparseable_date", "ambiguous_date"}


@given(st.floats() | st.integers(), st.sampled_from(["auto", "unix", "unix_ms"]))
def test_any_number_is_an_instant_or_an_instant_error(number: float, form: str) -> None:
    try:
        parse_instant(number, UTC, form)
    except InstantError as error:
        assert error.reason in {"unparseable_date", "ambiguous_date"}


@pytest.mark.parametrize(
    ("text", "zone", "expected"),
    [
        ("2017-06-30", "UTC", "2017-06-30T23:59:59.999999Z"),
        ("20170630", "UTC", "2017-06-30T23:59:59.999999Z"),
        ("2017-06-30", "Asia/Seoul", "2017-06-30T14:59:59.999999Z"),
        ("2017-06-30", "latest", "2017-07-01T11:59:59.999999Z"),
        ("2017-06", "UTC", "2017-06-30T23:59:59.999999Z"),
        ("2016-12", "UTC", "2016-12-31T23:59:59.999999Z"),
        ("2017", "UTC", "2017-12-31T23:59:59.999999Z"),
        ("2017-06-30T10", "UTC", "2017-06-30T10:59:59.999999Z"),
        ("20170630T10+0200", "UTC", "2017-06-30T08:59:59.999999Z"),
        ("2017-06-30 10:00", "America/New_York", "2017-06-30T14:00:59.999999Z"),
        ("2017-06-30T10:00+02:00", "latest", "2017-06-30T08:00:59.999999Z"),
        ("20170630T1000Z", "latest", "2017-06-30T10:00:59.999999Z"),
        ("20170630T100005Z", "latest", "2017-06-30T10:00:05Z"),
        ("2017-06-30 UTC", "latest", "2017-06-30T23:59:59.999999Z"),
        ("2017-W26-5", "UTC", "2017-06-30T23:59:59.999999Z"),
        ("2017W265", "UTC", "2017-06-30T23:59:59.999999Z"),
        # ISO 8601 ends a day at 24:00, the next one's midnight.
        ("2016-12-31T24:00:00Z", "UTC", "2017-01-01T00:00:00Z"),
        ("2016-12-31 24:00", "UTC", "2017-01-01T00:00:00Z"),
        ("Sat, 14 Jan 2023 14:54 +0000", "UTC", "2023-01-14T14:54:59.999999Z"),
        ("14 Jan 23 14:54:50 GMT", "latest", "2023-01-14T14:54:50Z"),
        ("2017-06-30T10:00:00.5+09:00", "UTC", "2017-06-30T01:00:00.500000Z"),
        ("2016-12-31T23:59:60Z", "UTC", "2016-12-31T23:59:59.999999Z"),
        ("2017-06-30 10:00:00 UTC", "Asia/Seoul", "2017-06-30T10:00:00Z"),
        ("Sat, 14 Jan 2023 14:54:50 +0100", "UTC", "2023-01-14T13:54:50Z"),
        # "-0000" says that the zone is unknown: the source's zone decides.
        ("Sat, 14 Jan 2023 14:54:50 -0000", "latest", "2023-01-15T02:54:50Z"),
        # The hour that New York repeats means its second pass; the one it skips, the later offset.
        ("2016-11-06T01:30:00", "America/New_York", "2016-11-06T06:30:00Z"),
        ("2016-03-13T02:30:00", "America/New_York", "2016-03-13T07:30:00Z"),
        # Year first there is one reading, whatever stands between.
        ("2016/01/05", "UTC", "2016-01-05T23:59:59.999999Z"),
        ("2016-1-5", "latest", "2016-01-06T11:59:59.999999Z"),
        ("2016.1.5 10:00", "UTC", "2016-01-05T10:00:59.999999Z"),
        ("2016/1/5T10:00:05Z", "latest", "2016-01-05T10:00:05Z"),
        # A day in words ends like every other.
        ("June 30, 2017", "UTC", "2017-06-30T23:59:59.999999Z"),
        ("Mon, 5 Jun 2017", "latest", "2017-06-06T11:59:59.999999Z"),
        ("Sept. 3rd 2016", "UTC", "2016-09-03T23:59:59.999999Z"),
        ("3 march 2016", "UTC", "2016-03-03T23:59:59.999999Z"),
        # Samoa had no 30 December 2011.
        ("2011-12-29", "Pacific/Apia", "2011-12-30T09:59:59.999999Z"),
    ],
)
def test_known_instants(text: str, zone: str, expected: str) -> None:
    assert instant(text, zone) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "undated"),
        ("03/04/2016", "ambiguous_date"),
        ("1497916800", "ambiguous_date"),
        ("2017-13", "unparseable_date"),
        ("2017-W26", "unparseable_date"),
        ("2017-06-30T24:01:00", "unparseable_date"),
        ("2017-06-30T25:00:00", "unparseable_date"),
        ("2017-06-30T10:00:00.", "unparseable_date"),
        ("17-06-30", "unparseable_date"),
        ("June 31, 2017", "unparseable_date"),
        ("Juny 30, 2017", "unparseable_date"),
        ("30/6/2017", "ambiguous_date"),
        ("2017/30/06", "unparseable_date"),
        ("2017-6", "unparseable_date"),
        ("2017-02-30", "unparseable_date"),
        ("0000-00-00", "unparseable_date"),
        ("yesterday", "unparseable_date"),
        ("9999-12-31", "unparseable_date"),
        ("2017-06-30" * 20, "unparseable_date"),
    ],
)
def test_values_that_are_no_instant_say_why(text: str, reason: str) -> None:
    with pytest.raises(InstantError) as caught:
        parse_instant(text, UTC)
    assert caught.value.reason == reason


def test_declared_forms() -> None:
    assert instant("1498780800", form="unix") == "2017-06-30T00:00:00Z"
    assert instant("1498780800000", form="unix_ms") == "2017-06-30T00:00:00Z"
    assert instant("30.06.2017", form="%d.%m.%Y") == "2017-06-30T23:59:59.999999Z"
    assert instant("2017-06-30 16h", form="%Y-%m-%d %Hh") == "2017-06-30T16:59:59.999999Z"
    assert instant("30/06/17 16:05", form="%d/%m/%y %H:%M") == "2017-06-30T16:05:59.999999Z"
    assert instant(2016, form="%Y") == "2016-12-31T23:59:59.999999Z"
    assert instant(2016.0, form="%Y") == "2016-12-31T23:59:59.999999Z"
    assert instant(Decimal(20160105), form="%Y%m%d") == "2016-01-05T23:59:59.999999Z"
    assert instant(b"2016-01-05") == "2016-01-05T23:59:59.999999Z"
    assert instant("Mon, 5 Jun 2017", form="rfc2822") == "2017-06-05T23:59:59.999999Z"
    assert instant("June 2017", form="%B %Y") == "2017-06-30T23:59:59.999999Z"
    assert instant("20170630163015", "America/New_York", "%Y%m%d%H%M%S") == "2017-06-30T20:30:15Z"


def test_seconds_declared_as_milliseconds_are_not_dated_to_1970() -> None:
    for value in ("1498780800", 1498780800, 1498780800.5):
        with pytest.raises(InstantError) as caught:
            parse_instant(value, UTC, "unix_ms")
        assert caught.value.reason == "ambiguous_date"
    for value in (1498780800000, "1498780800000000"):  # milliseconds, microseconds
        with pytest.raises(InstantError) as caught:
            parse_instant(value, UTC, "unix")
        assert caught.value.reason == "unparseable_date"


def test_date_objects_keep_their_precision() -> None:
    assert parse_instant(date(2017, 6, 30), UTC).precision == "day"
    aware = datetime(2017, 6, 30, 12, tzinfo=ZoneInfo("Asia/Seoul"))
    assert parse_instant(aware, UTC).latest_us == to_microseconds(aware)
    assert parse_instant(datetime(2017, 6, 30), UTC).precision == "second"


def test_booleans_and_lists_are_no_instants() -> None:
    for value in (True, [2017], {"y": 1}, Decimal("NaN"), Decimal("Infinity"), 10**5000):
        with pytest.raises(InstantError):
            parse_instant(value, UTC)


def test_unknown_zone_is_refused() -> None:
    with pytest.raises(ConfigError, match="time zone"):
        time_zone("Mars/Olympus")


@given(moments)
def test_months_are_those_of_utc(moment: datetime) -> None:
    assert month_of(to_microseconds(moment)) == f"{moment:%Y-%m}"


def test_a_day_of_summer_time_has_its_own_length() -> None:
    zone = ZoneInfo("America/New_York")
    spring, before = end_of_day(date(2016, 3, 13), zone), end_of_day(date(2016, 3, 12), zone)
    assert timedelta(microseconds=spring - before) == timedelta(hours=23)
