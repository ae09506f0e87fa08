"""Panels from Parquet and CSV files.

Owns the columns of the generic panel file: ``entity, date, label_start, label_end, y``, the
optional ``prompt`` (text) and ``embedded`` (boolean: the rows that have an embedding, all where
the column is absent), and any number of numeric features. Every other column is refused by
name, but for row indices that other programs write beside a table, which are left out and noted.
Dates may be dates, times, ISO text or numbers such as 20200131, but all of one time zone; a label
that ends on a plain date lasts to the end of it. Names of entities lose the spaces around them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.columns import flags, instants, names, numbers
from headrace.audit.csv_files import is_csv, read_csv
from headrace.audit.panel import Panel, make_panel, name_rows
from headrace.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl
    from numpy.typing import NDArray

REQUIRED = ("entity", "date", "label_start", "label_end", "y")
OPTIONAL = ("prompt", "embedded")
_TIMES = ("date", "label_start", "label_end")
_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")


def read_panel(path: Path, *, name: str | None = None) -> Panel:
    """Read and check a panel file (``.parquet``, ``.pq``, ``.csv``, ``.tsv``, or these gzipped).

    Raises:
        DataError: the file is missing or unreadable, or what :func:`panel_from_frame` raises.
    """
    import polars as pl  # noqa: PLC0415  # half a second; only panels from files need it

    if not path.is_file():
        raise DataError(f"no panel file at {path}", remedy="give a .parquet or .csv file")
    if is_csv(path):
        frame = read_csv(path, what="panel", text=("entity",))
        return panel_from_frame(frame, name=name or path.name)
    if path.suffix.lower() not in {".parquet", ".pq"}:
        raise DataError(
            f"{path}: a panel is a .parquet or .csv file, not {path.suffix or 'without suffix'}",
            remedy="write it as one of these",
        )
    try:
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as a panel: {error}", remedy="write it again as Parquet or CSV"
        ) from error
    return panel_from_frame(frame, name=name or path.name)


def panel_from_frame(frame: pl.DataFrame, *, name: str = "panel") -> Panel:
    """Check a polars frame with the columns of the module docstring and build a panel.

    Raises:
        DataError: columns missing or of a wrong type, mixed time zones, and everything that
            :func:`headrace.audit.panel.make_panel` refuses; rows are named, counted from 0.
    """
    missing = [column for column in REQUIRED if column not in frame.columns]
    if missing:
        alike = {column.strip().lower(): column for column in frame.columns}
        renames = [f"{alike[column]!r} to {column!r}" for column in missing if column in alike]
        raise DataError(
            f"panel {name!r} lacks {', '.join(map(repr, missing))}; it has: "
            f"{', '.join(frame.columns)}",
            remedy=f"rename {', '.join(renames)}"
            if len(renames) == len(missing)
            else f"name the columns {', '.join(REQUIRED)} and add any numeric features",
        )
    if len(frame) == 0:
        raise DataError(
            f"panel {name!r} has no rows", remedy="write a row for each forecast into it"
        )
    features = [c for c in frame.columns if c not in REQUIRED + OPTIONAL]
    indices = [c for c in features if _INDEX.fullmatch(c) and frame[c].dtype.is_integer()]
    features = [c for c in features if c not in indices]

    def where(column: str) -> str:
        return f"panel {name!r}: column {column!r}"

    entity = names(frame["entity"], where("entity"))
    nameless = np.array([text is None for text in entity])
    if nameless.any():
        raise DataError(
            f"{where('entity')} is empty in {name_rows(nameless)}",
            remedy="name the entity of every row, or drop these rows",
        )
    y = numbers(frame["y"], where("y"))
    columns = [numbers(frame[c], where(c), optional=True) for c in features]
    prompts = embedded = None
    if "prompt" in frame.columns:
        prompts = [text or "" for text in names(frame["prompt"], where("prompt"))]
    if "embedded" in frame.columns:
        embedded = flags(frame["embedded"], where("embedded"))
    times = _times(frame, name)
    notes = [
        f"Column {column!r} is a row index that another program wrote: it is no feature."
        for column in indices
    ]
    if _is_days(times["label_end"]) and not _is_days(times["date"]):
        # As cutoffs are read: a plain date means all of it.
        times["label_end"] = times["label_end"] + np.timedelta64(1, "D") - np.timedelta64(1, "us")
        notes.append(
            "Column 'date' has times of day and 'label_end' has none: labels last to the end of "
            "their day."
        )
    return make_panel(
        entity=np.char.strip(np.array(entity, dtype=np.str_)),
        date=times["date"],
        label_start=times["label_start"],
        label_end=times["label_end"],
        y=y,
        features=np.column_stack(columns) if columns else np.zeros((len(frame), 0)),
        feature_names=features,
        embedded=embedded,
        prompts=prompts,
        name=name,
        notes=notes,
    )


def _is_days(instants: NDArray[np.datetime64]) -> bool:
    """Whether none has a time of day."""
    return bool((instants == instants.astype("datetime64[D]")).all())


def _times(frame: pl.DataFrame, name: str) -> dict[str, NDArray[np.datetime64]]:
    """The three instants as datetime64[us], after checking that all share one time zone."""
    zones: dict[str, str] = {}
    times: dict[str, NDArray[np.datetime64]] = {}
    for column in _TIMES:
        where = f"panel {name!r}: column {column!r}"
        times[column], zones[column] = instants(frame[column], where)
    if len(set(zones.values())) > 1:
        raise DataError(
            f"panel {name!r} mixes time zones between columns, in rows 0 to {len(frame) - 1}: "
            + ", ".join(f"{column} has {zone}" for column, zone in zones.items()),
            remedy="write all three columns in one time zone, or all as plain dates",
        )
    return times
