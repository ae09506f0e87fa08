"""Commands in processes of their own that begin with everything imported.

A rank's imports take seconds; here they are done once, in the process that the others are forked
from. What a command prints is kept in a file.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["headrace.trainer.run", "torch.distributed", "transformers.models.qwen3.modeling_qwen3"]
)


def start(function: Callable[..., None], *arguments: Any, daemon: bool = False) -> Any:
    """A process that runs a module's function; a daemon ends with this one."""
    process = CONTEXT.Process(target=function, args=arguments, daemon=daemon)
    with pytest.MonkeyPatch.context() as patch:
        # The first one starts the process with the imports; headrace sets this before torch's.
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        process.start()
    return process


class Command:
    """One process."""

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        output: Path,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Start it.

        Args:
            arguments: of ``headrace``, or a script and its own.
            environ: beside this process's.
            output: file for what it prints.
            before: called in the process first; a function of a module, or a partial one.
        """
        self.output = output
        output.touch()
        arguments = [str(argument) for argument in arguments]
        self._process = start(_run, arguments, dict(os.environ) | environ, output, before)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that ended it."""
        return self._process.exitcode

    def said(self) -> str:
        return self.output.read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def end(self, seconds: float) -> None:
        """Wait for its end; of one that does not come, say where its threads stand, and end it."""
        self._process.join(seconds)
        if self.exit_code is None:
            self.send_signal(signal.SIGABRT)
            self._process.join()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def one_thread() -> None:
    """As a launcher has it; OMP_NUM_THREADS comes too late where torch is imported."""
    import torch  # noqa: PLC0415 - in the new process

    torch.set_num_threads(1)


def _run(arguments: list[str], environ: dict[str, str], output: Any, before: Any) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environ)
    one_thread()
    if before is not None:
        before()
    if arguments[0].endswith(".py"):
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        from headrace.cli import main  # noqa: PLC0415 - as above

        main(arguments)
