"""The shape of the code: import contracts, a command line that starts fast, file sizes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli import VERBS

ROOT = Path(__file__).parents[2]
MAX_LINES = 400


def test_import_contracts_hold():
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_is_slow_or_imports_torch():
    times = []
    for _ in range(7):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "headrace", "--help"], capture_output=True, check=True
        )
        times.append(time.perf_counter() - started)
    assert statistics.median(times) < 0.3, times


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_of_every_verb_answers_without_the_heavy_libraries(verb):
    code = (
        "import sys\nfrom headrace.cli import main\n"
        f"try: main([x for x in [{verb!r}, '--help'] if x])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'polars', 'pyarrow', 'sklearn', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plann"], 2, "Did you mean 'plan'?"),
        ([], 2, "Usage"),
        (["plan", "--no-such-option"], 2, "No such option"),
        (["plan", "--model", "nobody/nothing"], 2, "remedy"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(arguments, code, message):
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_version_is_that_of_the_project():
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True, check=True
    )
    assert f'version = "{done.stdout.split()[1]}"' in (ROOT / "pyproject.toml").read_text()


def test_file_holds_two_ideas():
    sources = [
        path
        for folder in ("src", "csrc", "benchmarks", "docs")
        for suffix in ("py", "pyi", "cpp", "h")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    assert sources
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for path in sources
    }
    assert not {name: count for name, count in lengths.items() if count > MAX_LINES}


def test_every_module_says_what_it_owns():
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith('"""'), f"{path} has no module docstring"
