"""When a document was available, by the rule its source declares, and nothing else.

The invariant is fail closed: a document whose ``available_at`` does not follow from the
declared rule is rejected with a reason, never guessed. The cutoff test compares
``available_at`` with the cutoff and looks at no other instant.

Order of the rule: the latest of ``fields`` (a date without a time means the end of that day)
→ ``delay`` → roll by ``calendar``. Only if no field of ``fields`` is present does the latest of
``upper_bound_fields`` (crawl times) stand in, and the document is flagged.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headrace.corpus.calendars import load_calendar
from headrace.corpus.instants import (
    Instant,
    InstantError,
    end_of_day,
    format_instant,
    parse_instant,
    time_zone,
)
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

RULE_VERSION = 3
"""Changes whenever the same input could be dated differently."""


@dataclass(frozen=True, kw_only=True)
class AvailabilityRule:
    """How a source's documents get their ``available_at``.

    Attributes:
        fields: what dates a document; the latest of those present counts.
        upper_bound_fields: crawl times, used when none of ``fields`` is present.
        fields_are_bounds: ``fields`` themselves are crawl times: every document is flagged.
        format: ``auto``, ``unix``, ``unix_ms``, ``rfc2822`` or a ``strptime`` pattern.
        timezone: what a value without a zone means.
        delay_us: time between the dated event and the first reader, in microseconds.
        calendar: exchange whose sessions decide when it counts; ``None`` for no rolling.
        after: wall-clock time at the exchange after which the next session counts.
        not_before: earlier dates are taken for damage.
        not_after: later dates are taken for damage; ``None`` means the day of the build.
    """

    fields: tuple[str, ...]
    upper_bound_fields: tuple[str, ...] = ()
    fields_are_bounds: bool = False
    format: str = "auto"
    timezone: str = "UTC"
    delay_us: int = 0
    calendar: str | None = None
    after: time | None = None
    not_before: date = date(1900, 1, 1)
    not_after: date | None = None

    def describe(self) -> str:
        """The rule in one sentence, for the manifest and the report."""
        names = ", ".join(self.fields)
        parts = [f"the latest of {names}" if len(self.fields) > 1 else f"the field {names}"]
        if self.format != "auto":
            parts.append(f"read as {self.format}")
        zone = (
            "UTC-12, where a day ends last of all" if self.timezone == "latest" else self.timezone
        )
        parts.append(f"without a zone in {zone}; without a time at the end of its day")
        if self.fields_are_bounds:
            parts.append("a crawl time: an upper bound, flagged")
        if self.delay_us:
            parts.append(f"plus {self.delay_us / 1e6:g} s")
        if self.calendar:
            limit = f"after {self.after:%H:%M}" if self.after else "after the close"
            parts.append(f"{limit} the next session of {self.calendar}")
        if self.upper_bound_fields:
            bounds = ", ".join(self.upper_bound_fields)
            parts.append(f"else {bounds} as an upper bound, flagged")
        return "; ".join(parts)


class Dated(NamedTuple):
    """The instants of one document in microseconds UTC, and how the decisive one was found."""

    available_at: int
    event_time: int | None
    published_at: int | None
    collected_at: int | None
    rule: str
    upper_bound: bool


class _Roller(Protocol):
    def roll(self, instant_us: int) -> int: ...


class Dater:
    """Applies one rule; made once a worker, called once a document."""

    def __init__(self, rule: AvailabilityRule, *, horizon_us: int) -> None:
        """Prepare zone and calendar.

        Args:
            rule: the source's declaration.
            horizon_us: the latest cutoff; what is later needs no rolling, only rejection.
        """
        self.rule = rule
        self._zone = time_zone(rule.timezone)
        self._horizon_us = horizon_us
        self._not_before_us = end_of_day(rule.not_before, self._zone) - 86_400_000_000 + 1
        self._not_after_us = (
            None if rule.not_after is None else end_of_day(rule.not_after, self._zone)
        )
        self._calendar: _Roller | None = (
            None
            if rule.calendar is None
            else load_calendar(
                rule.calendar,
                after=rule.after,
                not_before=rule.not_before,
                horizon_us=horizon_us,
            )
        )

    def date(self, values: Mapping[str, Any]) -> Dated:
        """Date one document.

        Raises:
            InstantError: it cannot be dated by the rule; ``reason`` says why.
        """
        rule = self.rule
        found = self._latest(values, rule.fields)
        bounded = rule.fields_are_bounds
        if found is None:
            found = self._latest(values, rule.upper_bound_fields)
            bounded = True
        if found is None:
            wanted = ", ".join((*rule.fields, *rule.upper_bound_fields))
            raise InstantError("undated", f"none of {wanted} is present")
        instant, name = found
        self._check_range(instant)
        # What the record says besides never decides the cutoff; it can only contradict.
        collected = self._optional(values, "collected_at") if "collected_at" in values else None
        if collected is not None and collected.latest_us < instant.earliest_us:
            raise InstantError(
                "contradictory_times",
                f"collected {format_instant(collected.latest_us)}, before {name} "
                f"{format_instant(instant.latest_us)}",
            )
        published = self._optional(values, "published_at") if "published_at" in values else None
        available = instant.latest_us
        if published is not None and not bounded and published.earliest_us > available:
            raise InstantError(
                "contradictory_times",
                f"published {format_instant(published.latest_us)}, after {name} "
                f"{format_instant(available)}",
            )
        available += rule.delay_us
        if self._calendar is not None and available <= self._horizon_us:
            available = self._calendar.roll(available)
        event = self._optional(values, "event_time") if "event_time" in values else None
        precision = "" if instant.precision == "second" else f" ({instant.precision})"
        return Dated(
            available_at=available,
            event_time=event.latest_us if event else None,
            published_at=published.latest_us if published else None,
            collected_at=collected.latest_us if collected else None,
            rule=f"{name}{precision}",
            upper_bound=bounded,
        )

    def _latest(
        self, values: Mapping[str, Any], names: tuple[str, ...]
    ) -> tuple[Instant, str] | None:
        best: tuple[Instant, str] | None = None
        for name in names:
            value = values.get(name)
            if _is_missing(value):
                continue
            instant = parse_instant(value, self._zone, self.rule.format)
            if best is None or instant.latest_us > best[0].latest_us:
                best = instant, name
        return best

    def _optional(self, values: Mapping[str, Any], name: str) -> Instant | None:
        value = values.get(name)
        if _is_missing(value):
            return None
        form = self.rule.format if name in self.rule.fields else "auto"
        try:
            return parse_instant(value, self._zone, form)
        except InstantError:
            if name in self.rule.fields:
                raise
            return None  # a side note that cannot be read says nothing, and decides nothing

    def _check_range(self, instant: Instant) -> None:
        if instant.latest_us == 0 and instant.precision == "second":
            raise InstantError("unset_clock", "1970-01-01T00:00:00Z, the zero of computer clocks")
        if instant.latest_us < self._not_before_us:
            raise InstantError(
                "before_range",
                f"{format_instant(instant.latest_us)} is before not_before {self.rule.not_before}",
            )
        if self._not_after_us is not None and instant.latest_us > self._not_after_us:
            raise InstantError(
                "future_date",
                f"{format_instant(instant.latest_us)} is after not_after {self.rule.not_after}",
            )


def _is_missing(value: object) -> bool:
    # NaN, which differs from itself, stands for nothing in columns of numbers.
    return value is None or value == "" or value != value  # noqa: PLR0124


@dataclass(frozen=True, kw_only=True)
class Cutoff:
    """A knowledge cutoff: documents with ``available_at <= instant_us`` belong to the vintage."""

    name: str
    given: str
    instant_us: int


def parse_cutoff(given: Any, *, name: str | None = None, timezone: str = "UTC") -> Cutoff:
    """A cutoff from a date (its last microsecond counts), a month, a year or an instant.

    Raises:
        ConfigError: not a date.
    """
    text = str(given)
    try:
        instant = parse_instant(given if isinstance(given, date) else text, time_zone(timezone))
    except InstantError as error:
        raise ConfigError(
            f"cutoff {text!r} is not a date: {error.detail}", remedy="write it as 2017-06-30"
        ) from error
    return Cutoff(name=name or text, given=text, instant_us=instant.latest_us)
