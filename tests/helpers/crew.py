"""Several ranks that stay for a whole test module: starting one costs seconds of imports."""

from __future__ import annotations

import os
import socket
import traceback
from typing import Any

from preloaded import CONTEXT, one_thread, start

TIMEOUT = 120


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What a launcher sets for one process of a machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ |= environment(rank, size, port)
    one_thread()
    import torch  # noqa: PLC0415 - in the new process

    from headrace.parallel.ranks import Ranks  # noqa: PLC0415 - as above

    ranks = Ranks.started()
    ranks.connect(torch.device("cpu"), timeout_seconds=TIMEOUT)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((True, function(ranks, **arguments)))
        except BaseException:  # noqa: BLE001 - shown by the test
            pipe.send((False, traceback.format_exc()))


class Crew:
    """Ranks that run one function after the other."""

    def __init__(self, size: int) -> None:
        port = free_port()
        self.size = size
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = CONTEXT.Pipe()
            self._pipes.append(mine)
            self._processes.append(start(_serve, rank, size, port, theirs, daemon=True))

    def run(self, function: Any, **arguments: Any) -> list[Any]:
        """``function(ranks, **arguments)`` on every rank; a function of a module."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(TIMEOUT), f"rank {rank} does not answer"
            done, result = pipe.recv()
            assert done, f"rank {rank}:\n{result}"
            results.append(result)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
