"""How many cores the linear algebra of an audit uses.

Owns one thing: the command line starts with single-threaded BLAS, because spinning pools cost
much on small machines that also train; an audit is nothing but dense algebra and wants them all.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def all_cores() -> Iterator[int]:
    """Let BLAS use every core this process may run on; the number is yielded."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = cores or 1
    with threadpool_limits(limits=count, user_api="blas"):
        yield count
