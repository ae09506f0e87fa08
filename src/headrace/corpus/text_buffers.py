"""Texts as Arrow columns and as the two buffers behind them, without copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray


def text_column(encoded: list[bytes]) -> pa.LargeStringArray:
    """UTF-8 texts as an Arrow array, without encoding them again."""
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
    return pa.LargeStringArray.from_buffers(
        len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))
    )


def text_buffers(texts: pa.LargeStringArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """UTF-8 of all texts (uint8), and where each begins and ends (int64, N + 1)."""
    assert texts.type == pa.large_string(), "texts have 64-bit offsets"
    _, bounds, data = texts.buffers()
    if data is None or len(texts) == 0:
        return np.empty(0, dtype=np.uint8), np.zeros(len(texts) + 1, dtype=np.int64)
    offsets = np.frombuffer(bounds, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data, dtype=np.uint8), offsets
