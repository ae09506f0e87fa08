"""CSV files with a column of dates, as users bring losses and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.audit.csv_files import read_csv
from headrace.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl


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


def parse_dates(path: Path, column: pl.Series, *, length: int | None = None) -> pl.Series:
    """The dates that a column of the file at ``path`` holds, of its first ``length`` characters.

    Raises:
        DataError: one is no date.
    """
    import polars as pl  # noqa: PLC0415  # as above

    try:
        return column.cast(pl.String).str.slice(0, length).str.to_date()
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"{path}: column 'date' holds text that is no date ({error})",
            remedy="write dates as YYYY-MM-DD",
        ) from error
