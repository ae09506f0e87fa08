"""A gradient onto its float32 sum in one kernel. Import needs Triton, so only CUDA code does."""

# Triton compiles the bodies: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-not-found"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl


@triton.jit
def sum_kernel(sum_ptr, grad_ptr, count, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """``sum = grad``, or ``sum += grad``, on ``count`` elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(sum_ptr + at, inside, other=0.0)
    tl.store(sum_ptr + at, value, inside)
