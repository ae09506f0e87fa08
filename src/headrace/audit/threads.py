"""How many cores the linear algebra of an audit uses.

Owns one choice. Matrices of a few hundred rows are decomposed faster by one thread than by a
pool that spins between them (measured on two busy cores: 17 s against 1.7 s of CPU time for
64 dimensions), while at 2,048 dimensions every core helps.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

_WIDE = 512


@contextmanager
def blas_threads(dimension: int) -> Iterator[int]:
    """Set BLAS threads for matrices of ``dimension``, and put them back; the number is yielded."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = (cores or 1) if dimension >= _WIDE else 1
    with threadpool_limits(limits=count, user_api="blas"):
        yield count
