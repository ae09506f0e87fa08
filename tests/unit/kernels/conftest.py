"""Every backend and instruction set this machine can run."""

from __future__ import annotations

import pytest

from headrace.kernels import is_native_required
from headrace.kernels.calls import HostKernels
from headrace.kernels.reference import ReferenceBackend

try:
    from headrace.kernels.native import NativeBackend, instruction_sets
except ImportError:
    if is_native_required():
        raise
    NATIVE = []
else:
    NATIVE = [HostKernels(NativeBackend(name)) for name in instruction_sets()]

REFERENCE = HostKernels(ReferenceBackend())


def _name(kernels: HostKernels) -> str:
    return kernels.backend.instruction_set


@pytest.fixture(params=[REFERENCE, *NATIVE], ids=_name)
def kernels(request: pytest.FixtureRequest) -> HostKernels:
    return request.param


@pytest.fixture(params=NATIVE or [None], ids=lambda k: _name(k) if k else "not built")
def native_kernels(request: pytest.FixtureRequest) -> HostKernels:
    if request.param is None:
        pytest.skip("the compiled kernels are not built")
    return request.param
