"""An error of :mod:`headrace.errors` says what to do about it; every error has its exit code."""

import ast
import errno
import signal
from pathlib import Path

import pytest
import torch

import headrace
from headrace import errors
from headrace.errors import ConfigError, exit_code_of
from headrace.interrupts import Stopped

SOURCE = Path(headrace.__file__).parent
PACKAGES = [
    "audit", "bench", "cli", "corpus", "data", "doctor", "engine", "kernels", "models", "parallel",
    "plan", "policy", "quickstart", "report", "selftest", "store", "trainer",
]  # fmt: skip
# Their remedy is their class's, or the same for all.
OWN = {"ModelRefusedError", "DamagedCheckpointError"}
KINDS = {name for name in vars(errors) if name.endswith("Error")} - OWN
# What it raises is shown as the reason why a file is passed over, with one remedy for all.
SHOWN_BY_OTHERS = {"trainer/tune_file.py"}


def without_remedy(path):
    """Lines on which an error is built without a word on what to do."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            words = {keyword.arg for keyword in node.keywords}
            if node.func.id in KINDS and "remedy" not in words:
                yield node.lineno


@pytest.mark.parametrize("package", PACKAGES)
def test_every_error_has_a_remedy(package):
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in (SOURCE / package).rglob("*.py")
        if path.relative_to(SOURCE).as_posix() not in SHOWN_BY_OTHERS
        for line in without_remedy(path)
    }
    assert found == set()


def test_a_refused_model_has_one_too():
    assert "headrace doctor --model" in errors.ModelRefusedError("it has no layers").remedy


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 2),
        (OSError(errno.ENOSPC, "full"), 3),
        (OSError(errno.ENOENT, "gone"), 1),
        (MemoryError(), 3),
        (torch.OutOfMemoryError("CUDA out of memory"), 3),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3),
        (RuntimeError("another"), 1),
        (KeyboardInterrupt(), 130),
        (Stopped(signal.SIGTERM), 143),
        (SystemExit(7), 7),
        (SystemExit("words"), 1),
    ],
)
def test_every_error_has_the_code_of_what_it_is(error, code):
    """All ranks of a run return that of the one that met it."""
    assert exit_code_of(error) == code
