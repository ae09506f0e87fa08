"""Keep the C heap from growing over what a run holds.

glibc raises the size from which it maps blocks of their own each time such a block is freed, up to
32 MiB; activations then lie in its heap, and freed ones leave holes that no later tensor fits. At
135M parameters the holes were half as large as the state. A fixed limit gives every large tensor a
mapping of its own, which goes back to the system when freed, at the price of page faults: a
quarter more processor time there (``benchmarks/train_memory.py``), so only large models pay it in
training. Conversions and exports make every tensor once, and always have it.
"""

from __future__ import annotations

import ctypes

from headrace.units import GIB, MIB

LARGE_STATE_BYTES = 1 * GIB
_M_MMAP_THRESHOLD = -3  # malloc.h


def map_large_blocks(least_bytes: int = MIB) -> bool:
    """Have malloc map blocks of ``least_bytes`` and more; False where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, least_bytes))
