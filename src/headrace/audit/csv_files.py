"""CSV files as users bring them.

Owns the reading: which separator a file has, decimal commas, and headers that cannot be told apart.
The invariant: what is read is what a spreadsheet would show, and a column never gets a name that is
not in the file. It knows no column by name.
"""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import polars as pl

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_SEPARATORS = ",;\t|"


def is_csv(path: Path) -> bool:
    """Whether the name says that it is one."""
    return path.name.lower().endswith(SUFFIXES)


def read_csv(path: Path, *, what: str, text: Sequence[str] = ()) -> pl.DataFrame:
    """The file at ``path``, which holds ``what``; UTF-8, gzipped where its name says so.

    The separator is the one of comma, semicolon, tab and bar that the header has most of. With
    another than the comma, numbers may have decimal commas. Names lose the spaces around them.
    Columns of ``text`` stay as written: 007 and 1E5 are codes there, and no numbers.

    Raises:
        DataError: the file is missing, is no CSV in UTF-8, or names two columns alike.
    """
    import polars as pl  # noqa: PLC0415  # half a second; only panels from files need it

    if not path.is_file():
        raise DataError(
            f"no {what} at {path}", remedy="check the path; it is relative to the current directory"
        )
    try:
        header = _header(path)
        separator = max(_SEPARATORS, key=header.count)
        as_text = dict.fromkeys(text, pl.String)
        frame = pl.read_csv(
            path, infer_schema_length=None, separator=separator, schema_overrides=as_text
        )
        if separator != ",":
            comma = pl.read_csv(
                path, infer_schema_length=None, separator=separator, decimal_comma=True
            )
            better = [
                c
                for c in frame.columns
                if c not in text and _text_to_number(frame[c].dtype, comma[c].dtype)
            ]
            frame = frame.with_columns(comma[c] for c in better)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start})",
            remedy=f"save the {what} as UTF-8",
        ) from error
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as CSV: {str(error).splitlines()[0]}",
            remedy="give every line as many fields as the header has, in UTF-8",
        ) from error
    # polars tells columns of one name apart by names of its own.
    repeated = [c for c in frame.columns if "_duplicated_" in c and c not in header]
    if repeated:
        first = repeated[0].rpartition("_duplicated_")[0]
        raise DataError(
            f"{path} has more than one column {first!r}", remedy="name each column once"
        )
    return _without_tail(frame).rename({name: name.strip() for name in frame.columns})


def _without_tail(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows up to the last that holds anything: spreadsheets end files with empty lines."""
    import polars as pl  # noqa: PLC0415  # as above

    if frame.width == 0:
        return frame
    filled = frame.select(pl.any_horizontal(pl.all().is_not_null()).alias("filled"))["filled"]
    return frame[: len(frame) - int(filled.reverse().arg_max() or 0)] if filled.any() else frame[:0]


def _header(path: Path) -> str:
    if path.suffix.lower() == ".gz":
        with gzip.open(path, "rt", encoding="utf-8-sig") as file:
            return file.readline()
    with path.open(encoding="utf-8-sig") as file:
        return file.readline()


def _text_to_number(plain: pl.DataType, comma: pl.DataType) -> bool:
    return not plain.is_numeric() and comma.is_numeric()
