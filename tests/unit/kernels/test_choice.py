"""Which kernels run is explicit, and falling back says what it costs."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import kernels
from headrace.errors import ConfigError

SOURCES = Path(__file__).parents[3] / "csrc"


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


# Hides the compiled module, as where it was not built.
WITHOUT_NATIVE = "import sys; sys.modules['headrace.kernels._native'] = None\n"


def test_every_instruction_set_can_be_asked_for(native_kernels):
    name = native_kernels.backend.instruction_set
    code = "from headrace import kernels; print(kernels.load().backend.instruction_set)"
    done = run(code, HEADRACE_ISA=name)
    assert done.stdout.strip() == name


def test_an_unknown_instruction_set_is_a_configuration_error(native_kernels, monkeypatch):
    monkeypatch.setenv("HEADRACE_ISA", "x86-64-v9")
    with pytest.raises(ConfigError, match="x86-64-v9") as caught:
        _ = type(native_kernels.backend)().instruction_set
    assert native_kernels.backend.instruction_set in str(caught.value)


def test_the_widest_is_the_default(native_kernels, monkeypatch):
    monkeypatch.delenv("HEADRACE_ISA", raising=False)
    native = pytest.importorskip("headrace.kernels.native")
    widest = type(native_kernels.backend)().instruction_set
    assert widest == native.instruction_sets()[-1]


def test_falling_back_warns_of_the_cost():
    code = (
        f"{WITHOUT_NATIVE}import logging; logging.basicConfig()\n"
        "from headrace import kernels; print(kernels.load())"
    )
    done = run(code, HEADRACE_REQUIRE_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout
    assert "9x as long" in done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "from headrace import kernels; kernels.load()",
        "from headrace import kernels; kernels.load('native')",
        "import headrace.kernels.native",
    ],
)
def test_requiring_the_compiled_kernels_fails_without_them(code):
    done = run(WITHOUT_NATIVE + code, HEADRACE_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert "Install a C++17 compiler" in done.stderr


def test_the_reference_can_be_asked_for(caplog):
    kernels.load.cache_clear()
    with caplog.at_level(logging.INFO, logger="headrace.kernels"):
        assert kernels.load("reference").backend.name == "reference"
    assert "reference, as asked" in caplog.text
    kernels.load.cache_clear()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="'cuda'"):
        kernels.load("cuda")


def test_importing_the_package_loads_nothing():
    done = run("import sys, headrace.kernels; print([m for m in ('numpy', 'torch') "
               "if m in sys.modules])")  # fmt: skip
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not SOURCES.exists(), reason="needs the sources")
@pytest.mark.parametrize("name", ["kernels.cpp", "kernels.h"])
def test_kernel_sources_include_no_cxx_standard_header(name):
    """Their inline functions would be compiled with wide instructions and shared by the linker."""
    headers = re.findall(r"#\s*include\s*[<\"]([^>\"]+)", (SOURCES / name).read_text())
    assert set(headers) <= {"stdint.h", "immintrin.h", "kernels.h"}
