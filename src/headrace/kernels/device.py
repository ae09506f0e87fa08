"""AdamW on state that lives on the compute device: the operations of ``reference.py``, in order.

Invariant: bitwise the result of the host kernels. Every product, sum, quotient and root is rounded
on its own, so nothing may be contracted into a fused multiply-add: on CUDA one Triton kernel is
compiled without fusion and with correctly rounded division and root; elsewhere torch runs one
operation at a time. (torch's own square root is not correctly rounded on every processor; the
root is taken in float64 there, whose rounding to float32 is exact: Figueroa, 1995.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headrace.kernels.coefficients import Coefficients

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_BLOCK = 1024


def adamw_split(
    hi: torch.Tensor,
    lo: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    *,
    c: Coefficients,
) -> None:
    """One AdamW step, in place, on flat tensors of one device and equal length.

    Args:
        hi: bfloat16 working weights.
        lo: int16 remainders.
        exp_avg: float32 first moments.
        exp_avg_sq: float32 second moments.
        grad: bfloat16 or float32 gradients, known to be finite.
        c: the factors of the call.
    """
    if hi.is_cuda:
        _launch(hi, lo, exp_avg, exp_avg_sq, grad, c=c)
        return
    bits = hi.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(lo.to(torch.int32))
    weight = bits.view(torch.float32)
    _update(weight, exp_avg, exp_avg_sq, grad, c)
    # Half away from zero on the magnitude: +0x8000 on the bits, whatever the sign.
    high = (bits + 0x8000).bitwise_right_shift_(16)
    lo.copy_((bits - high.bitwise_left_shift(16)).to(torch.int16))
    hi.view(torch.int16).copy_(high.to(torch.int16))


def adamw_float32(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    *,
    c: Coefficients,
) -> None:
    """As :func:`adamw_split`, on a plain float32 master."""
    _update(weight, exp_avg, exp_avg_sq, grad, c)


def _update(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    c: Coefficients,
) -> None:
    # Python floats that are exact float32 values: torch rounds scalars to the tensor's type.
    grad = grad.to(torch.float32) * float(c.grad_scale)
    exp_avg += (grad - exp_avg) * float(c.one_minus_beta1)
    _flush(exp_avg)
    exp_avg_sq.copy_(exp_avg_sq * float(c.beta2) + (grad * float(c.one_minus_beta2)) * grad)
    _flush(exp_avg_sq)
    root = exp_avg_sq.double().sqrt_().to(torch.float32)
    direction = exp_avg / (root * float(c.inverse_correction2) + float(c.eps))
    weight -= direction * float(c.step_size) + weight * float(c.decay)


def _flush(moment: torch.Tensor) -> None:
    """Subnormal moments become zero: they cost the host kernels a hundred times a normal one."""
    moment.masked_fill_(moment.abs() < _SMALLEST_NORMAL, 0.0)


def _launch(
    hi: torch.Tensor,
    lo: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    *,
    c: Coefficients,
) -> None:
    from headrace.kernels.triton_adamw import adamw_kernel  # noqa: PLC0415  CUDA only

    count = hi.numel()
    adamw_kernel[(-(-count // _BLOCK),)](
        hi.view(torch.int16), lo, exp_avg, exp_avg_sq, grad, count,
        float(c.grad_scale), float(c.one_minus_beta1), float(c.beta2), float(c.one_minus_beta2),
        float(c.eps), float(c.inverse_correction2), float(c.step_size), float(c.decay),
        BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
