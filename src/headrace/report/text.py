"""Numbers, dates and counts as the report writes them; a reader meets one style everywhere."""

from __future__ import annotations

import math

MINUS = "\N{MINUS SIGN}"
MISSING = "\N{EM DASH}"


def number(value: float | None, digits: int = 3) -> str:
    """A statistic to ``digits`` significant digits and at most four decimals: ``0.0123``.

    ``None`` and non-finite values are an em dash: the report never prints "nan".
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(decimals, 4)}f}"
    if float(text.replace(",", "")) == 0:
        text = f"{value:.1e}".replace("e-0", "e-")
    return text.replace("-", MINUS)


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """``0.0090 [0.0010, 0.0290]``: all with the decimals that the largest of them needs."""
    if value is None or low is None or high is None or not _finite(value, low, high):
        return number(value)
    largest = max(abs(value), abs(low), abs(high))
    if largest == 0:
        return "0"
    decimals = min(6, max(0, 2 - math.floor(math.log10(largest))))
    texts = [f"{item:,.{decimals}f}".replace("-", MINUS) for item in (value, low, high)]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def p_value(value: float | None) -> str:
    """``p = 0.41`` or ``p < 0.001``; empty when there is none."""
    if value is None or not math.isfinite(value):
        return ""
    if value < 0.001:
        return "p < 0.001"
    return f"p = {value:.3f}" if value < 0.1 else f"p = {value:.2f}"


def p_cell(value: float | None) -> str:
    """A p-value for a column that is called so: ``0.41``, ``< 0.001`` or an em dash."""
    return p_value(value).removeprefix("p = ").removeprefix("p ") or MISSING


def count(value: float) -> str:
    """An exact count with separators: ``2,332,293``."""
    return f"{round(value):,}"


def percent(share: float, digits: int = 2) -> str:
    """A share as a percentage: 0.0132 is ``1.3%``."""
    return f"{number(100 * share, digits)}%"


def plural(value: float, one: str, many: str | None = None) -> str:
    """``1 document``, ``3 documents``."""
    return f"{count(value)} {one if round(value) == 1 else many or one + 's'}"
