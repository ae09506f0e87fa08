"""Autograd inside an operator of our own, for its backward to differentiate what it runs again.

Below an operator autograd is shut out, and there is no public way to let it in. This module
changes the calling thread's dispatch alone, and only inside the context.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """What runs inside is recorded, or under ``torch.no_grad`` runs as it would outside."""
    keys = torch._C.DispatchKey  # noqa: SLF001 - as said
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),  # noqa: SLF001
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),  # noqa: SLF001
        torch.enable_grad(),
    ):
        yield
