"""Marks of tests that need a real device."""

import pytest
import torch

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# The compiler's warnings, made errors, would be reasons to run eagerly.
COMPILED_ON_CUDA = [*ON_CUDA, pytest.mark.filterwarnings("default")]
