"""Evaluation sets: what is evaluated together and reported under one name.

A set whose documents have dates is cut by month, so that the loss of each month is exact; rows
never hold documents of two months. Evaluates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.data.loader import RowSet
from headrace.data.subsets import by_month
from headrace.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headrace.data.packing import RowSettings
    from headrace.data.tokens import TokenStore


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A dataset to evaluate on.

    Attributes:
        label: what reports call it.
        parts: its rows, with the month (``2016-03``, ``undated``) where documents have dates.
    """

    label: str
    parts: tuple[tuple[str | None, RowSet], ...]

    @classmethod
    def open(
        cls,
        store: TokenStore,
        settings: RowSettings,
        *,
        label: str,
        documents: npt.NDArray[np.int64] | None = None,
    ) -> EvalSet:
        """Plan the rows of a store.

        Args:
            store: the tokens.
            settings: length and packing.
            label: what reports call it.
            documents: which of its documents; all by default.

        Raises:
            DataError: no document of it can be learned from.
        """
        months = by_month(store, documents)
        if not months:
            rows = RowSet.open(store, settings, label=label, documents=documents)
            return cls(label=label, parts=((None, rows),))
        parts: list[tuple[str | None, RowSet]] = []
        for month, chosen in months:
            try:
                rows = RowSet.open(store, settings, label=f"{label} {month}", documents=chosen)
            except DataError:
                continue  # a month of nothing but documents of one token
            parts.append((month, rows))
        if not parts:
            RowSet.open(store, settings, label=label, documents=documents)  # says what is wrong
        return cls(label=label, parts=tuple(parts))

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return sum(rows.plan.num_rows for _, rows in self.parts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts, padding not counted."""
        return sum(rows.plan.num_tokens for _, rows in self.parts)
