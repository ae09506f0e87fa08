"""``headrace`` as several ranks, of which single ones may be told, or find, something else."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from crew import environment, free_port
from preloaded import Command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATIENCE = 120.0


class Forked:
    """Starts them; ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ranks: list[Command] = []

    def start(
        self,
        *command: Any,
        size: int = 2,
        only: str | None = None,
        before: Callable[[int], None] | None = None,
        environ: dict[int, dict[str, str]] | None = None,
    ) -> list[Command]:
        """Start them.

        Args:
            command: of all of them.
            size: how many.
            only: what the last one alone is told beside the command.
            before: a function of a module, called with the rank in each process.
            environ: by rank, variables of its own.
        """
        port = free_port()
        self.ranks = []
        for rank in range(size):
            words = [*command, *([only] if only and rank == size - 1 else [])]
            variables = environment(rank, size, port) | (environ or {}).get(rank, {})
            output = self._folder / f"rank-{rank}.txt"
            output.unlink(missing_ok=True)
            first = None if before is None else functools.partial(before, rank)
            self.ranks.append(Command(words, variables, output, first))
        return self.ranks

    def ends(self) -> tuple[list[int | None], list[str]]:
        """Exit codes and outputs; of those that do not end, where their threads stand."""
        deadline = time.monotonic() + PATIENCE
        for rank in self.ranks:
            rank.end(max(0.0, deadline - time.monotonic()))
        return [rank.exit_code for rank in self.ranks], [rank.said() for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()


def wait_for(rank: Command, text: str) -> None:
    """Until a rank has said something."""
    deadline = time.monotonic() + PATIENCE
    while text not in rank.said():
        assert rank.exit_code is None, rank.said()
        assert time.monotonic() < deadline, rank.said()
        time.sleep(0.01)
