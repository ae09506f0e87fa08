"""Columns of a user's table as numbers, flags and instants.

Owns what each kind of column may hold. The invariant: a value is read as what it plainly is or
refused with its row, counted from 0; nothing is guessed between two readings. It knows no column by
name.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.panel import name_rows
from headrace.errors import DataError

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray

# The year stands first, so day and month cannot be taken for each other.
_YEAR_FIRST = re.compile(r"^(\d{4})([-/.])(\d{1,2})\2(\d{1,2})(?!\d)")
_WEEK = re.compile(r"\d{4}-?W\d{2}")
_MISSING = ("", "na", "n/a", "null", "none")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def numbers(series: pl.Series, where: str, *, optional: bool = False) -> NDArray[np.float64]:
    """``(n,)`` floats, NaN where a value is missing; text is read where it is a number.

    Args:
        series: a column.
        where: it is, for the message.
        optional: the table may do without it, which is then the first remedy.

    Raises:
        DataError: values of another kind, or text that is no number.
    """
    import polars as pl  # noqa: PLC0415  # loaded by whoever made the series

    series = _plain_text(series)
    kind = series.dtype
    if kind == pl.String:
        text = series.str.strip_chars()
        text = text.set(text.str.to_lowercase().is_in(_MISSING), None)
        read = text.cast(pl.Float64, strict=False)
        _refuse(
            text.is_not_null() & read.is_null(), series, f"{where} holds text that is no number",
            remedy=("drop the column, or encode it as numbers" if optional else "write numbers")
            + ", without thousands separators or units; leave missing values empty",
        )  # fmt: skip
        series = read
    elif not (kind.is_numeric() or kind in {pl.Boolean, pl.Null}):
        raise DataError(
            f"{where} holds {kind}, not numbers",
            remedy="drop it, or encode it as numbers" if optional else "write numbers",
        )
    return series.cast(pl.Float64).fill_null(float("nan")).to_numpy()


def names(series: pl.Series, where: str) -> list[str | None]:
    """Text of every row; ``None`` where there is none, or nothing but spaces.

    Raises:
        DataError: values that are no names.
    """
    import polars as pl  # noqa: PLC0415  # as above

    if series.dtype.is_nested() or series.dtype == pl.Binary:
        raise DataError(f"{where} holds {series.dtype}, not text", remedy="write text or numbers")
    text = series.cast(pl.String)
    return text.set(text.str.strip_chars() == "", None).to_list()


def flags(series: pl.Series, where: str) -> NDArray[np.bool_]:
    """``(n,)`` true or false; a missing flag is false.

    Raises:
        DataError: values other than true, false, yes, no, 1 and 0.
    """
    import polars as pl  # noqa: PLC0415  # as above

    if series.dtype in {pl.Boolean, pl.Null}:
        return series.cast(pl.Boolean).fill_null(value=False).to_numpy()
    if series.dtype.is_numeric():
        text = series.cast(pl.Float64).cast(pl.Int64, strict=False).cast(pl.String)
        text = text.set(series.cast(pl.Float64) % 1 != 0, "?")
    else:
        text = series.cast(pl.String, strict=False).str.strip_chars().str.to_lowercase()
    read = text.replace_strict(_FLAGS, default=None, return_dtype=pl.Boolean)
    _refuse(
        series.is_not_null() & (text.is_null() | ((text != "") & read.is_null())), series,
        f"{where} holds what is neither true nor false",
        remedy="write true or false",
    )  # fmt: skip
    return read.fill_null(value=False).to_numpy()


def instants(series: pl.Series, where: str) -> tuple[NDArray[np.datetime64], str]:
    """``(n,)`` datetime64[us] as written, and the time zone they are written in.

    Dates, times, ISO text and whole numbers such as 20200131 are dates.

    Raises:
        DataError: another kind, a value that is no date, or several time zones.
    """
    import polars as pl  # noqa: PLC0415  # as above

    zone = "none"
    series = _plain_text(series)
    kind = series.dtype
    if kind == pl.String:
        series, zone = _parse(series, where)
    elif isinstance(kind, pl.Datetime):
        zone = kind.time_zone or "none"
        series = series.dt.replace_time_zone(None)
    elif kind.is_numeric():
        whole = series.cast(pl.Float64)
        text = whole.set(whole % 1 != 0, None).cast(pl.Int64, strict=False).cast(pl.String)
        read = text.str.to_date("%Y%m%d", strict=False)
        read = read.set(text.str.len_chars() != len("20200131"), None)
        _refuse(
            series.is_not_null() & read.is_null(), series, f"{where} has numbers that are no date",
            remedy="write dates, times, ISO text (2020-01-31) or numbers such as 20200131",
        )  # fmt: skip
        series = read
    elif kind not in {pl.Date, pl.Null}:
        raise DataError(
            f"{where} holds {kind}, not dates",
            remedy="write dates, times, or ISO text (2020-01-31)",
        )
    read = series.cast(pl.Datetime("us"), strict=False)
    _refuse(
        series.is_not_null() & read.is_null(), series.to_physical(),
        f"{where} has dates that are beyond any calendar, counted since 1970",
        remedy="write the dates again; look for codes of missing ones",
    )  # fmt: skip
    return read.to_numpy().astype("datetime64[us]"), zone


def _parse(series: pl.Series, where: str) -> tuple[pl.Series, str]:
    """ISO text to times, and its offset from UTC; one column, one offset."""
    import polars as pl  # noqa: PLC0415  # as above

    # A panel repeats few dates many times: each distinct text is read once.
    texts = series.unique().drop_nulls().to_list()
    moments = {text: moment for text in texts if (moment := read_moment(text)) is not None}
    unread = [text for text in texts if text not in moments]
    _refuse(
        series.is_in(unread), series, f"{where} has text that is no date",
        remedy="write ISO text (2020-01-31, or 2020-01-31T15:00:00+09:00)",
    )  # fmt: skip
    zones = {text: str(moment.tzinfo or "none") for text, moment in moments.items()}
    counts: Counter[str] = Counter()
    for text, count in series.drop_nulls().value_counts().iter_rows():
        counts[zones[text]] += count
    kinds = [zone for zone, _ in counts.most_common()]
    if len(kinds) > 1:
        odd = series.is_in([text for text, zone in zones.items() if zone != kinds[0]])
        raise DataError(
            f"{where} mixes time zones ({', '.join(kinds)}): "
            f"{name_rows(odd.fill_null(value=False).to_numpy())} differ from the rest",
            remedy="write all times with one offset (those of summer and winter time are two), "
            "such as UTC, or as plain dates",
        )
    plain = {text: moment.replace(tzinfo=None) for text, moment in moments.items()}
    read = series.replace_strict(plain, default=None, return_dtype=pl.Datetime("us"))
    return read, kinds[0] if kinds else "none"


def _plain_text(series: pl.Series) -> pl.Series:
    """Categories, which other programs make of repeated text, as the text they stand for."""
    import polars as pl  # noqa: PLC0415  # as above

    listed = isinstance(series.dtype, (pl.Categorical, pl.Enum))
    return series.cast(pl.String) if listed else series


def read_moment(text: str) -> datetime | None:
    """An instant of ISO text, or ``None``; dates may be written 2020/1/31, the year first."""
    plain = _YEAR_FIRST.sub(_with_dashes, text.strip())
    if _WEEK.fullmatch(plain):
        return None  # would be its Monday
    try:
        return datetime.fromisoformat(plain)
    except ValueError:
        return None


def _with_dashes(found: re.Match[str]) -> str:
    return f"{found[1]}-{int(found[3]):02}-{int(found[4]):02}"


def _refuse(bad: pl.Series, series: pl.Series, what: str, *, remedy: str) -> None:
    mask = bad.fill_null(value=False).to_numpy()
    if mask.any():
        first = series[int(np.argmax(mask))]
        raise DataError(f"{what} ({first!r}) in {name_rows(mask)}", remedy=remedy)
