"""Kernels that add up in one order, for as long as a step runs.

Invariant: what the process had set before is set again afterwards, whatever happens in between.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """PyTorch's own switch, for this step alone: kernels that cannot comply raise an error.

    It asks for a fixed cuBLAS workspace, which cuBLAS reads with a stream's first product. Filling
    what is allocated, its other effect, costs time and is left out.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(_CUBLAS_WORKSPACE)
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        if workspace is None:
            os.environ.pop(_CUBLAS_WORKSPACE, None)
