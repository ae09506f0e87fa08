"""The device update as one Triton kernel. Import needs Triton, so only CUDA code imports it.

Bitwise the operations of ``reference.py``: launch it with ``enable_fp_fusion=False``.
"""

# Triton compiles the bodies: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-not-found"
# ruff: noqa: ANN001, ANN201, PLR0917

import triton
import triton.language as tl


@triton.jit
def flushed(moment):
    """Subnormal values as zero."""
    bits = moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < 0x00800000, 0.0, moment)


@triton.jit
def adamw_kernel(
    hi_ptr,
    lo_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    count,
    grad_scale,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    inverse_correction2,
    step_size,
    decay,
    BLOCK: tl.constexpr,
):
    """One AdamW step on ``count`` elements of a split master; ``hi_ptr`` is int16 bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    hi = tl.load(hi_ptr + at, inside, other=0).to(tl.int32)
    lo = tl.load(lo_ptr + at, inside, other=0).to(tl.int32)
    weight = ((hi << 16) + lo).to(tl.float32, bitcast=True)
    exp_avg = tl.load(exp_avg_ptr + at, inside, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, inside, other=0.0)
    grad = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32) * grad_scale
    exp_avg = flushed(exp_avg + one_minus_beta1 * (grad - exp_avg))
    exp_avg_sq = flushed(beta2 * exp_avg_sq + (one_minus_beta2 * grad) * grad)
    root = tl.sqrt_rn(exp_avg_sq)
    direction = tl.div_rn(exp_avg, root * inverse_correction2 + eps)
    weight = weight - (step_size * direction + decay * weight)
    bits = weight.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    tl.store(hi_ptr + at, high.to(tl.int16), inside)
    tl.store(lo_ptr + at, (bits - (high << 16)).to(tl.int16), inside)
    tl.store(exp_avg_ptr + at, exp_avg, inside)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq, inside)
