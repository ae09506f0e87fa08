"""Headrace's own compiled kernels: built or not, and what they run on here."""

from __future__ import annotations

import os
import shutil

from headrace.doctor.findings import Finding


def check_kernels() -> list[Finding]:
    """Whether the native host kernels load, their instruction sets, and the thread settings."""
    try:
        from headrace.kernels import native  # noqa: PLC0415 - the import is what is tested
    except ImportError as error:
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        return [
            Finding(
                area="kernels",
                name="host update",
                status="warning",
                value="NumPy reference",
                detail=f"the optimizer runs some 50x slower: {str(error).partition(':')[0]}",
                remedy="pip install --force-reinstall --no-deps headrace (in a clone: "
                "pip install -e .)"
                if compiler
                else "install a C++17 compiler (apt-get install g++), then reinstall headrace",
            ),
            _threads(),
        ]
    sets = native.instruction_sets()
    wanted = os.environ.get(native.ISA_VARIABLE)
    return [
        Finding(
            area="kernels",
            name="host update",
            status="ok",
            value=f"native, {wanted or sets[-1]}",
            detail=f"this build and processor have {', '.join(sets)}; "
            f"{native.ISA_VARIABLE} chooses another",
        ),
        _threads(),
    ]


def _threads() -> Finding:
    policy = os.environ.get("OMP_WAIT_POLICY")
    spinning = (policy or "").upper() == "ACTIVE"
    return Finding(
        area="kernels",
        name="OMP_WAIT_POLICY",
        status="warning" if spinning else "ok",
        value=policy or "unset (headrace sets PASSIVE)",
        detail="pools that spin between regions cost up to 3x on a busy machine"
        if spinning
        else "",
        remedy="export OMP_WAIT_POLICY=PASSIVE" if spinning else None,
    )
