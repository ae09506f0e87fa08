"""Ranks as processes of their own, forked by a server that has imported what takes seconds."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from crew import environment, free_port

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 60.0
_PRELOADED = ["headrace.trainer.run", "headrace.cli.train", "transformers.models.qwen3"]


def _body(command: list[str], environ: dict[str, str], output: str, before: Any) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.enable()
    os.environ |= environ
    from headrace.cli import main  # noqa: PLC0415 - in the new process

    if before is not None:
        before(int(environ["RANK"]))
    main(command)


class Rank:
    """One of them."""

    def __init__(self, process: Any, output: Path) -> None:
        self.process, self._output = process, output

    @property
    def output(self) -> str:
        """What it has written to both streams."""
        return self._output.read_text() if self._output.is_file() else ""

    def wait_for(self, text: str) -> None:
        """Until it has written something."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.output:
            assert self.process.is_alive(), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


class Forked:
    """Starts ``headrace`` as several ranks; ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._folder = folder
        self.ranks: list[Rank] = []

    def start(
        self,
        *command: Any,
        size: int = 2,
        only: tuple[int, str] | None = None,
        before: Any = None,
        environ: dict[int, dict[str, str]] | None = None,
    ) -> list[Rank]:
        """Start them.

        Args:
            command: of all of them.
            size: how many.
            only: a rank, and what it alone is told beside the command.
            before: a function of a module, called with the rank in each process.
            environ: by rank, variables of its own.
        """
        port = free_port()
        self.ranks = []
        for rank in range(size):
            words = [*map(str, command), *([only[1]] if only and only[0] == rank else [])]
            variables = environment(rank, size, port) | {"TORCH_CPP_LOG_LEVEL": "FATAL"}
            variables |= (environ or {}).get(rank, {})
            output = self._folder / f"rank-{rank}.txt"
            output.unlink(missing_ok=True)
            arguments = (words, variables, str(output), before)
            process = self._context.Process(target=_body, args=arguments)
            process.start()
            self.ranks.append(Rank(process, output))
        return self.ranks

    def ends(self) -> tuple[list[int | None], list[str]]:
        """Exit codes and outputs; of those that do not end, where their threads stand."""
        deadline = time.monotonic() + PATIENCE
        for rank in self.ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                sys.stderr.write(f"{rank.process} does not end\n")
                rank.signal(6)
                rank.process.join(PATIENCE)
        return [r.process.exitcode for r in self.ranks], [r.output for r in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
