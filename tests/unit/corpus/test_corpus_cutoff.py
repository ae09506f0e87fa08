"""available_at follows from the declared rule or the document is refused; sessions roll later."""

# ruff: noqa: DTZ001 - wall-clock times are what is tested

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.corpus.calendars import (
    EdgarCalendar,
    federal_holidays,
    is_edgar_business_day,
    load_calendar,
)
from headrace.corpus.cutoff import AvailabilityRule, Dated, Dater, parse_cutoff
from headrace.corpus.instants import InstantError, format_instant, to_microseconds
from headrace.errors import ConfigError

HORIZON = to_microseconds(datetime(2030, 1, 1, tzinfo=UTC))
EASTERN = ZoneInfo("America/New_York")


def dated(values: dict[str, Any], **rule: Any) -> Dated:
    rule.setdefault("fields", ("date",))
    return Dater(AvailabilityRule(**rule), horizon_us=HORIZON).date(values)


def available(values: dict[str, Any], **rule: Any) -> str | None:
    return format_instant(dated(values, **rule).available_at)


def reason(values: dict[str, Any], **rule: Any) -> str:
    with pytest.raises(InstantError) as caught:
        dated(values, **rule)
    return caught.value.reason


def test_the_latest_of_several_fields_counts() -> None:
    values = {"published": "2017-01-01T00:00:00Z", "modified": "2018-05-05T00:00:00Z"}
    assert available(values, fields=("published", "modified")) == "2018-05-05T00:00:00Z"


def test_one_unreadable_field_of_several_refuses_the_document() -> None:
    values = {"published": "2017-01-01", "modified": "soon"}
    assert reason(values, fields=("published", "modified")) == "unparseable_date"


def test_delay_is_added() -> None:
    assert (
        available({"date": "2017-01-01T00:00:00Z"}, delay_us=900_000_000) == "2017-01-01T00:15:00Z"
    )


def test_a_crawl_time_stands_in_only_as_a_flagged_upper_bound() -> None:
    rule = {"fields": ("date",), "upper_bound_fields": ("crawled",)}
    flagged = dated({"crawled": "2017-01-01T00:00:00Z"}, **rule)
    assert flagged.upper_bound
    assert flagged.rule == "crawled"
    own = dated({"date": "2016-01-01", "crawled": "2017-01-01T00:00:00Z"}, **rule)
    assert not own.upper_bound


def test_what_has_no_date_is_refused() -> None:
    assert reason({}) == "undated"
    assert reason({"date": None}) == "undated"
    assert reason({"other": "2017-01-01"}) == "undated"


def test_range_limits() -> None:
    assert reason({"date": "1899-12-31"}) == "before_range"
    assert available({"date": "1900-01-01"}) == "1900-01-01T23:59:59.999999Z"
    assert available({"date": "1790-01-08"}, not_before=date(1700, 1, 1)) is not None
    assert reason({"date": "2020-01-02"}, not_after=date(2020, 1, 1)) == "future_date"


def test_a_clock_that_was_never_set_is_refused() -> None:
    assert reason({"date": "1970-01-01T00:00:00Z"}) == "unset_clock"
    assert reason({"date": 0}, format="unix") == "unset_clock"
    assert available({"date": "1970-01-01"}) is not None


def test_a_document_collected_before_it_was_available_has_a_wrong_clock() -> None:
    values = {"date": "2017-06-30T12:00:00Z", "collected_at": "2016-01-01T00:00:00Z"}
    assert reason(values) == "contradictory_times"
    # Collected on the day itself, before the day's end: the end is only the safe reading.
    values = {"date": "2017-06-30", "collected_at": "2017-06-30T08:00:00Z"}
    assert available(values) == "2017-06-30T23:59:59.999999Z"


def test_a_document_available_before_it_was_published_is_refused() -> None:
    values = {"date": "2015-01-01T00:00:00Z", "published_at": "2017-06-30T12:00:00Z"}
    assert reason(values) == "contradictory_times"


def test_an_unreadable_side_note_decides_nothing() -> None:
    assert dated({"date": "2017-01-01", "event_time": "in spring"}).event_time is None


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("2017-01-03 16:30:15", "2017-01-03 16:30:15"),
        ("2017-01-03 17:30:00", "2017-01-03 17:30:00"),
        ("2017-01-03 17:30:01", "2017-01-04 06:00:00"),
        ("2017-01-06 18:00:00", "2017-01-09 06:00:00"),  # Friday evening
        ("2017-01-13 18:00:00", "2017-01-17 06:00:00"),  # Martin Luther King Day
        ("2019-12-23 18:00:00", "2019-12-26 06:00:00"),  # Christmas Eve by executive order
        ("2021-12-30 18:00:00", "2022-01-03 06:00:00"),  # New Year's Day 2022 is a Saturday
    ],
)
def test_edgar_acceptance_after_half_past_five_counts_the_next_business_day(
    local: str, expected: str
) -> None:
    moment = datetime.fromisoformat(local).replace(tzinfo=EASTERN)
    rolled = EdgarCalendar().roll(to_microseconds(moment))
    assert rolled == to_microseconds(datetime.fromisoformat(expected).replace(tzinfo=EASTERN))


def test_federal_holidays_of_a_known_year() -> None:
    expected = {
        "2021-01-01", "2021-01-18", "2021-02-15", "2021-05-31", "2021-06-18", "2021-07-05",
        "2021-09-06", "2021-10-11", "2021-11-11", "2021-11-25", "2021-12-24", "2021-12-31",
    }  # fmt: skip
    assert {str(day) for day in federal_holidays(2021)} == expected


@given(st.datetimes(datetime(1995, 1, 1), datetime(2028, 1, 1), timezones=st.just(UTC)))
def test_edgar_never_rolls_earlier_and_always_to_a_business_day(moment: datetime) -> None:
    instant = to_microseconds(moment)
    rolled = EdgarCalendar().roll(instant)
    assert rolled >= instant
    local = datetime.fromtimestamp(rolled / 1e6, EASTERN)
    assert is_edgar_business_day(local.date())
    assert EdgarCalendar().roll(rolled) == rolled
    assert rolled - instant <= timedelta(days=6) / timedelta(microseconds=1)


@given(
    st.datetimes(datetime(1995, 1, 1), datetime(2028, 1, 1), timezones=st.just(UTC)),
    st.timedeltas(timedelta(0), timedelta(days=9)),
)
def test_edgar_keeps_the_order_of_instants(moment: datetime, step: timedelta) -> None:
    calendar = EdgarCalendar()
    first, second = to_microseconds(moment), to_microseconds(moment + step)
    assert calendar.roll(first) <= calendar.roll(second)


@pytest.fixture(scope="module")
def new_york() -> Any:
    return load_calendar("XNYS", after=None, not_before=date(2015, 1, 1), horizon_us=HORIZON)


@pytest.mark.parametrize(
    ("utc", "expected"),
    [
        ("2017-07-03T16:59:00Z", "2017-07-03T16:59:00Z"),  # early close at 13:00
        ("2017-07-03T17:00:01Z", "2017-07-05T13:30:00Z"),
        ("2017-07-05T20:00:00Z", "2017-07-05T20:00:00Z"),  # at the close itself
        ("2017-07-05T20:00:01Z", "2017-07-06T13:30:00Z"),
        ("2017-07-08T15:00:00Z", "2017-07-10T13:30:00Z"),  # Saturday
        ("2017-07-06T10:00:00Z", "2017-07-06T13:30:00Z"),  # before the open
        ("2017-07-06T15:00:00Z", "2017-07-06T15:00:00Z"),
    ],
)
def test_after_the_close_the_next_session_counts(new_york: Any, utc: str, expected: str) -> None:
    rolled = new_york.roll(to_microseconds(datetime.fromisoformat(utc)))
    assert format_instant(rolled) == expected


@given(st.datetimes(datetime(2015, 2, 1), datetime(2029, 1, 1), timezones=st.just(UTC)))
def test_sessions_roll_later_and_only_once(new_york: Any, moment: datetime) -> None:
    instant = to_microseconds(moment)
    rolled = new_york.roll(instant)
    assert rolled >= instant
    assert new_york.roll(rolled) == rolled


@given(
    st.datetimes(datetime(2015, 2, 1), datetime(2029, 1, 1), timezones=st.just(UTC)),
    st.timedeltas(timedelta(0), timedelta(days=9)),
)
def test_rolling_keeps_the_order_of_instants(
    new_york: Any, moment: datetime, step: timedelta
) -> None:
    first, second = to_microseconds(moment), to_microseconds(moment + step)
    assert new_york.roll(first) <= new_york.roll(second)


def test_instants_outside_the_calendar_are_refused() -> None:
    rule = {"calendar": "XNYS", "not_before": date(2015, 1, 1)}
    assert reason({"date": "2014-06-30T12:00:00Z"}, **rule) in {
        "before_range",
        "outside_calendar",
    }


def test_after_replaces_the_close() -> None:
    rule = {"calendar": "XNYS", "after": time(9, 0), "not_before": date(2015, 1, 1)}
    assert available({"date": "2017-07-06T14:00:00Z"}, **rule) == "2017-07-07T13:30:00Z"


def test_unknown_calendar_is_refused() -> None:
    with pytest.raises(ConfigError, match="XNYX"):
        load_calendar("XNYX", after=None, not_before=date(2015, 1, 1), horizon_us=HORIZON)


def test_cutoffs_take_the_end_of_what_is_given() -> None:
    assert format_instant(parse_cutoff("2017-06-30").instant_us) == "2017-06-30T23:59:59.999999Z"
    assert (
        format_instant(parse_cutoff(date(2017, 6, 30)).instant_us) == "2017-06-30T23:59:59.999999Z"
    )
    assert format_instant(parse_cutoff("2017-06").instant_us) == "2017-06-30T23:59:59.999999Z"
    assert format_instant(parse_cutoff("2017-06-30T12:00:00Z").instant_us) == "2017-06-30T12:00:00Z"
    assert (
        parse_cutoff("2017-06-30", timezone="Asia/Seoul").instant_us
        < parse_cutoff("2017-06-30").instant_us
    )
    with pytest.raises(ConfigError, match="not a date"):
        parse_cutoff("mid 2017")
