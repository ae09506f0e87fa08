"""The mask of seeded dropout in numpy's unsigned words, apart from torch."""

from __future__ import annotations

import numpy as np


def numpy_kept(seed: int, num_elements: int, probability: float) -> np.ndarray:
    """Which elements of a row stay, bool ``(num_elements,)``."""
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)
    words = np.arange(num_elements, dtype=np.uint32) + low
    words = (words ^ words >> 16) * np.uint32(0x21F0AAAD)
    words = words ^ words >> 15 ^ high
    words = (words ^ words >> 16) * np.uint32(0x735A2D97)
    words = (words ^ words >> 15) * np.uint32(0x21F0AAAD)
    signed = (words ^ words >> 15).view(np.int32)
    return signed >= round(probability * 2**32) - 2**31
