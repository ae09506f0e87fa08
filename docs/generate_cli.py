"""Write ``docs/cli.md``: every help page of the command line, as a terminal shows it.

    python docs/generate_cli.py

A test fails when the page and the program differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from headrace.cli import VERBS

TARGET = Path(__file__).with_name("cli.md")

_HEAD = """# Command line

Every page below is what the program prints; `python docs/generate_cli.py` writes this file.
"""


def help_text(arguments: list[str]) -> str:
    """What ``headrace ARGUMENTS --help`` prints at 88 columns, without colour."""
    plain = {"COLUMNS": "88", "TERM": "dumb", "NO_COLOR": "1", "TYPER_USE_RICH": "0"}
    done = subprocess.run(  # noqa: S603 - this interpreter, arguments of our own
        [sys.executable, "-m", "headrace", *arguments, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **plain},
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def subcommands(text: str) -> list[str]:
    """Names below ``Commands:`` in a help page."""
    _, _, listed = text.partition("\nCommands:\n")
    return re.findall(r"^  ([a-z][a-z-]*)(?:  |$)", listed, flags=re.MULTILINE)


def generate() -> str:
    """The whole page."""
    parts = [_HEAD, f"```text\n{help_text([])}\n```\n"]
    for verb in VERBS:
        text = help_text([verb])
        parts.append(f"## headrace {verb}\n\n```text\n{text}\n```\n")
        parts += [
            f"### headrace {verb} {name}\n\n```text\n{help_text([verb, name])}\n```\n"
            for name in subcommands(text)
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(generate(), encoding="utf-8")
    print(f"wrote {TARGET}")
