"""Panels from Parquet and CSV files.

Owns the columns of the generic panel file: ``entity, date, label_start, label_end, y``, the
optional ``prompt`` (text) and ``embedded`` (boolean: the rows that have an embedding, all where
the column is absent), and any number of numeric features. Every other column is refused by
name. Dates may be dates, times or ISO text, but all of one time zone.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.audit.panel import Panel, make_panel, name_rows
from headrace.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl
    from numpy.typing import NDArray

REQUIRED = ("entity", "date", "label_start", "label_end", "y")
OPTIONAL = ("prompt", "embedded")
_TIMES = ("date", "label_start", "label_end")


def read_panel(path: Path, *, name: str | None = None) -> Panel:
    """Read and check a panel file (``.parquet``, ``.pq`` or ``.csv``).

    Raises:
        DataError: the file is missing or unreadable, or what :func:`panel_from_frame` raises.
    """
    import polars as pl  # noqa: PLC0415  # half a second; only panels from files need it

    if not path.is_file():
        raise DataError(f"no panel file at {path}", remedy="give a .parquet or .csv file")
    try:
        if path.suffix.lower() == ".csv":
            frame = pl.read_csv(path, infer_schema_length=None)
        elif path.suffix.lower() in {".parquet", ".pq"}:
            frame = pl.read_parquet(path)
        else:
            raise DataError(
                f"{path}: a panel is a .parquet or .csv file, not {path.suffix or 'without suffix'}"
            )
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} cannot be read as a panel: {error}") from error
    return panel_from_frame(frame, name=name or path.name)


def panel_from_frame(frame: pl.DataFrame, *, name: str = "panel") -> Panel:
    """Check a polars frame with the columns of the module docstring and build a panel.

    Raises:
        DataError: columns missing or of a wrong type, mixed time zones, and everything that
            :func:`headrace.audit.panel.make_panel` refuses; rows are named, counted from 0.
    """
    import polars as pl  # noqa: PLC0415  # loaded by whoever made the frame

    missing = [column for column in REQUIRED if column not in frame.columns]
    if missing:
        raise DataError(
            f"panel {name!r} lacks {', '.join(map(repr, missing))}; it has: "
            f"{', '.join(frame.columns)}",
            remedy=f"name the columns {', '.join(REQUIRED)} and add any numeric features",
        )
    features = [c for c in frame.columns if c not in REQUIRED + OPTIONAL]
    for column in [*features, "y"]:
        kind = frame[column].dtype
        if not (kind.is_numeric() or kind == pl.Boolean):
            raise DataError(
                f"panel {name!r}: column {column!r} holds {kind}, not numbers",
                remedy="drop it, or encode it as numbers",
            )
    if frame["entity"].null_count():
        empty = name_rows(frame["entity"].is_null().to_numpy())
        raise DataError(
            f"panel {name!r}: column 'entity' is empty in {empty}",
            remedy="name the entity of every row, or drop these rows",
        )
    times = _times(frame, name)
    prompts = embedded = None
    if "prompt" in frame.columns:
        prompts = frame["prompt"].cast(pl.String).fill_null("").to_list()
    if "embedded" in frame.columns:
        embedded = frame["embedded"].cast(pl.Boolean).fill_null(value=False).to_numpy()
    matrix = (
        np.column_stack([_floats(frame[c]) for c in features])
        if features
        else np.zeros((len(frame), 0))
    )
    return make_panel(
        entity=frame["entity"].cast(pl.String).to_numpy(),
        date=times["date"],
        label_start=times["label_start"],
        label_end=times["label_end"],
        y=_floats(frame["y"]),
        features=matrix,
        feature_names=features,
        embedded=embedded,
        prompts=prompts,
        name=name,
    )


def _floats(series: pl.Series) -> NDArray[np.float64]:
    import polars as pl  # noqa: PLC0415  # loaded by whoever made the frame

    return series.cast(pl.Float64).fill_null(float("nan")).to_numpy()


def _times(frame: pl.DataFrame, name: str) -> dict[str, NDArray[np.datetime64]]:
    """The three instants as datetime64[us], after checking that all share one time zone."""
    import polars as pl  # noqa: PLC0415  # loaded by whoever made the frame

    zones: dict[str, str] = {}
    times: dict[str, NDArray[np.datetime64]] = {}
    for column in _TIMES:
        series = frame[column]
        if series.dtype == pl.String:
            series, zones[column] = _parse(series, f"panel {name!r}: column {column!r}")
        elif series.dtype == pl.Date:
            zones[column] = "none"
        elif isinstance(series.dtype, pl.Datetime):
            zones[column] = series.dtype.time_zone or "none"
            series = series.dt.replace_time_zone(None)
        else:
            raise DataError(
                f"panel {name!r}: column {column!r} holds {series.dtype}, not dates",
                remedy="write dates, times, or ISO text (2020-01-31)",
            )
        times[column] = series.cast(pl.Datetime("us")).to_numpy().astype("datetime64[us]")
    if len(set(zones.values())) > 1:
        raise DataError(
            f"panel {name!r} mixes time zones between columns, in rows 0 to {len(frame) - 1}: "
            + ", ".join(f"{column} has {zone}" for column, zone in zones.items()),
            remedy="write all three columns in one time zone, or all as plain dates",
        )
    return times


def _parse(series: pl.Series, where: str) -> tuple[pl.Series, str]:
    """ISO text to times, and its offset from UTC; one column, one offset."""
    import polars as pl  # noqa: PLC0415  # loaded by whoever made the frame

    # A panel repeats few dates many times: each distinct text is read once.
    moments = {text: _moment(text) for text in series.unique().drop_nulls().to_list()}
    unread = np.array([text is not None and moments[text] is None for text in series.to_list()])
    if unread.any():
        first = series[int(np.flatnonzero(unread)[0])]
        raise DataError(
            f"{where} has text that is no date ({first!r}) in {name_rows(unread)}",
            remedy="write ISO text (2020-01-31, or 2020-01-31T15:00:00+09:00)",
        )
    zones = {text: str(moment.tzinfo or "none") for text, moment in moments.items() if moment}
    counts = Counter(zones[text] for text in series.to_list() if text is not None)
    kinds = [zone for zone, _ in counts.most_common()]
    if len(kinds) > 1:
        odd = np.array([text is not None and zones[text] != kinds[0] for text in series.to_list()])
        raise DataError(
            f"{where} mixes time zones ({', '.join(kinds)}): {name_rows(odd)} differ from the rest",
            remedy="write all times in one time zone, or as plain dates",
        )
    plain = [None if t is None else moments[t].replace(tzinfo=None) for t in series.to_list()]
    return pl.Series(series.name, plain, dtype=pl.Datetime("us")), kinds[0] if kinds else "none"


def _moment(text: str) -> Any:
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError:
        return None
