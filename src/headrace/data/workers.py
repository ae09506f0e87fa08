"""Tokenising in several processes, in the order of one.

Owns the processes. The invariant: chunks come out in the order of the parts whatever the number
of workers, and no more than a few parts wait; a worker ends with the process that asked for it,
however that one ends. Workers are spawned, never forked: a process that holds device memory or
threads must not be copied.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TYPE_CHECKING, Any

from headrace.data.formats import RowEncoder
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from multiprocessing.connection import Connection

    from headrace.data.parts import Part
    from headrace.data.rows import TokenChunk
    from headrace.data.sources import DatasetSource

# A spawned worker imports for some seconds; smaller datasets are done before.
_WORTH_BYTES = 96 << 20
_MOST_WORKERS = 16
_encoder: RowEncoder | None = None


def choose_workers(asked: int | None, num_bytes: int) -> int:
    """Processes for a dataset: what was asked for, or what its size is worth; 0 is this one.

    Never more than cores: a worker computes all the time.
    """
    cores = len(os.sched_getaffinity(0))
    if asked is not None:
        return min(asked, cores)
    if num_bytes < _WORTH_BYTES:
        return 0
    return min(cores, _MOST_WORKERS, num_bytes // (_WORTH_BYTES // 4))


def encode_parts(
    parts: Sequence[Part], source: DatasetSource, tokenizer: Any, num_workers: int
) -> Iterator[list[TokenChunk]]:
    """The chunks of each part, in order.

    Args:
        parts: what to read.
        source: the dataset.
        tokenizer: a Hugging Face tokenizer, or ``None`` for ``tokens`` rows.
        num_workers: processes; 0 or 1 stays in this one.

    Raises:
        DataError: an unusable row, or a worker that died.
    """
    if num_workers <= 1 or len(parts) <= 1:
        encoder = RowEncoder(source, tokenizer)
        for part in parts:
            yield list(encoder.encode(part))
        return
    context = multiprocessing.get_context("spawn")
    alive, wanted = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        min(num_workers, len(parts)),
        mp_context=context,
        initializer=_start,
        initargs=(source, tokenizer, alive),
    )
    waiting: deque[Future[list[TokenChunk]]] = deque()
    left = iter(parts)

    def submit(count: int) -> None:
        # This process answers Ctrl-C. A worker it starts inherits the mask, and has no other
        # answer than a traceback while it imports.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            waiting.extend(pool.submit(_encode, part) for part in islice(left, count))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        submit(2 * num_workers)
        while waiting:
            yield waiting.popleft().result()
            submit(1)
    except BrokenProcessPool as error:
        raise DataError(
            f"a process that tokenised dataset {source.label!r} died (killed from outside, most "
            "likely for memory)",
            remedy=f"lower dataset_num_proc (it was {num_workers}); the parts that are done are "
            "kept, and the same command goes on from them",
        ) from error
    finally:
        wanted.close()  # workers end at once
        alive.close()
        pool.shutdown(cancel_futures=True)  # what is left open is warned of by Python


def _start(source: DatasetSource, tokenizer: Any, alive: Connection) -> None:
    global _encoder  # noqa: PLW0603 - a worker has one dataset
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
    _encoder = RowEncoder(source, tokenizer)


def _end_with(alive: Connection) -> None:
    """End this process once the one that asked for it is gone, or wants no more of it.

    The queue of its work would not tell: workers themselves hold both ends.
    """
    with contextlib.suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)


def _encode(part: Part) -> list[TokenChunk]:
    assert _encoder is not None
    return list(_encoder.encode(part))
