"""Every choice that shapes an audit, with the reason for its default.

Owns the settings; they are written into the result. It reads no files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from headrace.audit.columns import read_moment
from headrace.errors import ConfigError

_OFFSET = re.compile(r"\d[T ]\d.*(Z|[+-]\d\d(:?\d\d)?)$")
_PERIOD = re.compile(r"\d{4}(-\d{2})?")
_PLAIN = re.compile(r"[\d/.W-]+")


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Settings of :func:`headrace.audit.run_audit`.

    Attributes:
        split_date: last training date of ``chronological`` (ISO); by default the date that
            leaves 70% of the sessions that have a vector for training.
        num_shifts: shifted-date draws; all admissible ones where there are fewer.
        num_blocks: folds of ``purged_kfold``.
        entity_folds: folds of ``group_kfold``.
        embargo_sessions: embargo of ``purged_kfold`` and ``walk_forward``.
        gap_sessions: left out on each side of a cutoff, because a stated cutoff is a month.
        walk_forward_splits: test windows of the walk-forward table.
        embargoes: rows of the embargo table, in sessions.
        min_sessions_a_side: on each side of a cutoff (30 after it: 23% false claims).
        min_dates_common, min_dates_entity: for a channel to be tested.
        min_twins: twins below which their mean is no reference.
        twin_max_dimension: wider twins are projected to this many dimensions by a fixed random
            matrix: a random network followed by a random matrix is a random network.
        level: of tests; intervals have level 0.95.
        positive_control: share of var(y), in each channel, of the leak that is planted to see
            whether it would be found; 0 leaves the control out.
        tables: premium, walk-forward, embargo and evaluation leakage, which carry no verdict.
        seed: of offsets and projections.
        allow_mixed_stacks: compare embeddings of different stacks; the result is marked.
    """

    split_date: str | None = None
    num_shifts: int = 199
    num_blocks: int = 10
    entity_folds: int = 5
    embargo_sessions: int = 5
    gap_sessions: int = 10
    walk_forward_splits: int = 5
    embargoes: tuple[int, ...] = (0, 5, 20)
    min_sessions_a_side: int = 120
    min_dates_common: int = 250
    min_dates_entity: int = 60
    min_twins: int = 4
    twin_max_dimension: int = 512
    level: float = 0.05
    positive_control: float = 0.03
    tables: bool = True
    seed: int = 0
    allow_mixed_stacks: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: a count below its least, a level outside (0, 1), a split date that is none.
        """
        least = {
            "num_shifts": 19, "num_blocks": 4, "entity_folds": 2, "embargo_sessions": 0,
            "gap_sessions": 0, "walk_forward_splits": 1, "min_twins": 1, "twin_max_dimension": 1,
            "min_sessions_a_side": 1, "min_dates_common": 1, "min_dates_entity": 1,
        }  # fmt: skip
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; the least is {lowest}",
                    remedy=f"{name}: {lowest}, or more",
                )
        if not 0 < self.level < 1:
            raise ConfigError(
                f"level is {self.level}; it lies between 0 and 1", remedy="0.05 is usual"
            )
        if not 0 <= self.positive_control < 0.5:
            raise ConfigError(
                f"positive_control is {self.positive_control}; it lies in [0, 0.5)",
                remedy="0.03 is the default; 0 leaves it out",
            )
        if any(embargo < 0 for embargo in self.embargoes):
            raise ConfigError(
                f"embargoes are {self.embargoes}; none may be negative",
                remedy="a list of whole numbers of sessions, such as [0, 5]",
            )
        if self.split_date is not None:
            parse_date(self.split_date, "split_date")


def parse_date(text: str, what: str) -> np.datetime64:
    """ISO text as datetime64[us]; a plain date means the end of that day.

    A month (2020-12) or a year means the end of it; 20201231 and 2020/12/31 are dates too.

    Raises:
        ConfigError: text that is no date.
    """
    stripped = text.strip()
    if _OFFSET.search(stripped):
        raise ConfigError(
            f"{what} is {text!r}, with a time zone, and compared with the panel's dates as written",
            remedy="write it in the time zone of the panel's dates, without an offset",
        )
    if _PERIOD.fullmatch(stripped):
        return _end_of(stripped, what, text)
    moment = read_moment(stripped)
    if moment is None:
        raise _no_date(what, text)
    if _PLAIN.fullmatch(stripped):
        return _end_of(moment.date().isoformat(), what, text)
    return np.datetime64(moment, "us")


def _end_of(period: str, what: str, text: str) -> np.datetime64:
    """The last instant of a year, month or day."""
    try:
        start = np.datetime64(period)
    except ValueError as error:
        raise _no_date(what, text) from error
    last: np.datetime64 = (start + 1).astype("datetime64[us]") - np.timedelta64(1, "us")
    return last


def _no_date(what: str, text: str) -> ConfigError:
    return ConfigError(f"{what} is {text!r}, which is no date", remedy="write it as 2020-12-31")
