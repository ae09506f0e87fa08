"""CSV files with a column of dates, as users bring losses and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.audit.columns import instants
from headrace.audit.csv_files import read_csv
from headrace.audit.panel import name_rows
from headrace.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl
    from numpy.typing import NDArray


def read_columns(path: Path, columns: tuple[str, ...], *, what: str) -> pl.DataFrame:
    """The CSV at ``path``, which holds ``what`` and must have ``columns``.

    Raises:
        DataError: the file or a column is missing, or it is no CSV.
    """
    frame = read_csv(path, what=what)
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(missing)}; it has {', '.join(frame.columns)}",
            remedy=f"name the columns {', '.join(columns)}",
        )
    return frame


def parse_dates(
    path: Path, column: pl.Series, *, length: int | None = None
) -> NDArray[np.datetime64]:
    """The dates that a column of the file at ``path`` holds, of its first ``length`` characters.

    Raises:
        DataError: one is missing, is no date, or could be two; rows are named.
    """
    import polars as pl  # noqa: PLC0415  # loaded by whoever made the column

    where = f"{path}: column {column.name!r}"
    dates, _ = instants(column.cast(pl.String).str.slice(0, length), where)
    missing = np.isnat(dates)
    if missing.any():
        raise DataError(f"{where} is empty in {name_rows(missing)}", remedy="drop these rows")
    return dates
