"""The command line: one thin module a verb, imported when the verb is called.

``headrace --help`` lists the verbs from the table below and imports none of them, so it
answers without torch. Every verb module exposes ``app``, a ``typer.Typer`` with one command
or several. Errors of :mod:`headrace.errors` become one message on stderr and their exit code.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence

from headrace.interrupts import Interrupts, end_of

VERBS = {
    "quickstart": "Corpus, training, audit and report on small real data; a CPU is enough.",
    "plan": "Memory, speed, hours and money of a run before it is paid for.",
    "tune": "Choose engine settings for a run by measuring this machine.",
    "train": "Train from a YAML file: headrace train CONFIG [key=value ...].",
    "export": "Write a checkpoint as a Hugging Face model folder.",
    "convert": "Merge sharded FSDP checkpoints, optimizer included, in one process.",
    "corpus": "Build and inspect point-in-time corpora.",
    "embed": "Embeddings of a panel's prompts, cached with their stack fingerprint.",
    "probe": "What a model states of dated market moves, and its loss by month.",
    "audit": "Measure how much of a forecast comes from the future.",
    "report": "One self-contained HTML file from result records.",
    "bench": "Measured figures with the ceilings of the same run.",
    "doctor": "What works on this machine, what is missing, and how to install it.",
}


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in VERBS.items())
    return (
        "Usage: headrace VERB [OPTIONS] [ARGS]...\n\n"
        "Train all the weights of a large language model on the GPUs you have, and\n"
        "prove what the result knows of the future.\n\n"
        f"Verbs:\n{lines}\n\n"
        "Options:\n"
        "  --version   Print the version.\n"
        "  --help      This text; 'headrace VERB --help' explains a verb.\n\n"
        "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 will not fit,\n"
        "75 saved and wants requeue, 130/143 stopped by a signal.\n"
    )


def _prepare_libraries() -> None:
    # Read when the libraries load, so they are set before any verb imports them. Pools that spin
    # between parallel regions cost 3x on a busy two-core machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Its warnings of a connection that another rank closed are stacks of C++ frames, by the screen.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``headrace``; exits with the codes listed in the help text."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(_usage(), end="")
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        from headrace import __version__

        print(f"headrace {__version__}")
        sys.exit(0)
    verb = arguments[0]
    if verb not in VERBS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        print(f"headrace: no verb '{verb}'.{hint}\n\n{_usage()}", file=sys.stderr, end="")
        sys.exit(2)
    code = 1
    try:
        with Interrupts():
            code = _run(verb, arguments[1:])
    except Exception:
        if not _in_groups():
            raise
        traceback.print_exc()
    if code and _in_groups():
        # Groups that a failed rank leaves have threads that an interpreter cannot end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _in_groups() -> bool:
    """Whether this process still belongs to others of a run, or waits for them."""
    meeting = getattr(sys.modules.get("headrace.parallel.ranks"), "MEETING", None)
    if meeting is None:  # not imported, or not to its end
        return False
    from torch import distributed

    waits = any(thread.name == meeting for thread in threading.enumerate())
    return waits or (distributed.is_available() and distributed.is_initialized())


def _num_processes() -> int:
    """That a launcher has started, as far as they can meet."""
    from headrace.errors import ConfigError
    from headrace.parallel.launch import place_of

    try:
        return place_of().size
    except ConfigError:  # said where the verb meets them
        return 1


def _call(verb: str, arguments: list[str]) -> int:
    module = importlib.import_module(f"headrace.cli.{verb}")
    result = module.app(args=arguments, prog_name=f"headrace {verb}", standalone_mode=True)
    return result if isinstance(result, int) else 0


def _call_as_rank(verb: str, arguments: list[str]) -> int:
    """The same in one of several: what it is refused for before they meet ends all, said once."""
    from headrace.errors import ConfigError, HeadraceError, RankError

    refused: HeadraceError
    try:
        module = importlib.import_module(f"headrace.cli.{verb}")
        result = module.app(args=arguments, prog_name=f"headrace {verb}", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except HeadraceError as error:
        if _in_groups() or isinstance(error, RankError):
            raise
        refused = error
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # A usage error of click's, or of typer's copy of it.
        refused = ConfigError(error.format_message(), remedy=f"headrace {verb} --help")
    from headrace.parallel.ranks import Ranks

    with Ranks.started().joined():
        raise refused


def _interrupted(verb: str, error: KeyboardInterrupt) -> int:
    message, exit_code = end_of(error)
    print(f"headrace {verb}: {message}", file=sys.stderr)
    return exit_code


def _run(verb: str, arguments: list[str]) -> int:
    from headrace.errors import HeadraceError, exit_code_of, is_full_disk, is_out_of_memory

    _prepare_libraries()
    call = _call_as_rank if verb == "train" and _num_processes() > 1 else _call
    try:
        return call(verb, arguments)
    except HeadraceError as error:
        if not error.said:
            print(f"headrace {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        return _interrupted(verb, error)
    except SystemExit as ended:
        # typer makes of an interrupt in a verb an exit that says nothing.
        cause = getattr(ended.__context__, "__cause__", None)
        if isinstance(cause, KeyboardInterrupt):
            return _interrupted(verb, cause)
        raise
    except OSError as error:
        if not is_full_disk(error):
            raise
        # Every file a verb writes may be the one that finds the disk full.
        where = error.filename or "one of the files it writes"
        print(
            f"headrace {verb}: the disk is full ({where})\n  remedy: free space, and start again",
            file=sys.stderr,
        )
        return exit_code_of(error)
    except (MemoryError, RuntimeError) as error:
        # What knows better what to change has said so before.
        if not is_out_of_memory(error):
            raise
        device = type(error).__name__ == "OutOfMemoryError"
        line = (str(error).strip().splitlines() or ["no more of it"])[0]
        print(
            f"headrace {verb}: {'device' if device else 'host'} memory ran out: {line}\n  remedy: "
            "give it more memory, or less to hold",
            file=sys.stderr,
        )
        return exit_code_of(error)
