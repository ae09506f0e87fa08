"""A gradient or a result that is not finite: refused as a whole, the state untouched."""

from __future__ import annotations

import numpy as np
import pytest

import planes
from headrace.errors import NumericsError
from headrace.kernels.coefficients import coefficients
from headrace.kernels.headroom import AMPLE, Headroom, Operation, results_stay_finite

NUM = 200_003  # several blocks
NON_FINITE = [np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("bfloat16", [True, False], ids=["bf16 grad", "fp32 grad"])
@pytest.mark.parametrize("ample", [True, False])
@pytest.mark.parametrize("where", [0, NUM - 1, 131_072])
def test_one_inf_poisons_nothing(kernels, value, bfloat16, ample, where):
    state = planes.make_planes(NUM, split=True, special=False)
    grad = planes.make_grad(NUM, bfloat16=False, special=False)
    headroom = Headroom()
    if ample:
        assert state.call(kernels, "adamw", grad, step=1, headroom=headroom)
        assert headroom.is_ample
    before = state.copy()
    grad[where] = value
    sent = planes.bf16_bits(grad) if bfloat16 else grad
    assert not state.call(kernels, "adamw", sent, step=2, headroom=headroom)
    assert state.same_bits(before)
    assert headroom.is_ample == ample  # nothing changed, nothing was forgotten


@pytest.mark.parametrize("operation", ["adamw", "invert", "correct"])
def test_every_operation_refuses(kernels, operation):
    state = planes.make_planes(NUM, split=False, special=False)
    grad = planes.make_grad(NUM, bfloat16=False, special=False)
    grad[NUM // 2] = np.nan
    before = state.copy()
    scale = {"scale": 0.5} if operation == "correct" else {}
    assert not state.call(kernels, operation, grad, step=2, **scale)
    assert state.same_bits(before)


def test_a_weight_whose_hi_would_be_infinite_is_refused_whole(kernels):
    """0x7f7f7fff is the last fp32 that rounds to a finite bf16; no step may pass it."""
    state = planes.make_planes(NUM, split=True, special=False)
    state.hi[-1], state.lo[-1] = 0x7F7F, 0x7FFF
    state.exp_avg[-1], state.exp_avg_sq[-1] = -2e27, 0.0  # moves the weight by 1.8e35
    grad = np.zeros(NUM, np.float32)
    before = state.copy()
    arguments = {"step": 1000, "learning_rate": 1.0, "weight_decay": 0.0}
    assert not state.call(kernels, "adamw", grad, **arguments)
    assert state.same_bits(before)
    plain = planes.Planes(
        None, None, before.master[-1:].copy(), before.exp_avg[-1:], before.exp_avg_sq[-1:]
    )
    assert plain.call(kernels, "adamw", grad[-1:], **arguments)  # finite as fp32
    assert np.isfinite(plain.weight).all()
    assert plain.weight.view(np.uint32)[0] >= 0x7F7F8000  # but not as the rounded half of it


def test_a_finite_gradient_whose_square_overflows_is_refused(kernels):
    state = planes.make_planes(NUM, split=True, special=False)
    grad = np.zeros(NUM, np.float32)
    headroom = Headroom()
    assert state.call(kernels, "adamw", grad, step=1, headroom=headroom)
    before = state.copy()
    grad[7] = 1e30
    assert not state.call(kernels, "adamw", grad, step=2, headroom=headroom)
    assert state.same_bits(before)
    # ... and the same gradient is applied when it is scaled down first.
    assert state.call(kernels, "adamw", grad, step=2, headroom=headroom, grad_scale=1e-30)


def test_a_bad_state_is_refused_too(kernels):
    for plane in ("exp_avg", "exp_avg_sq"):
        for value in (*NON_FINITE, -1.0 if plane == "exp_avg_sq" else np.inf):
            state = planes.make_planes(100, split=True, special=False)
            getattr(state, plane)[50] = value
            before = state.copy()
            assert not state.call(kernels, "adamw", np.zeros(100, np.uint16), step=2)
            assert state.same_bits(before)


def test_headroom_is_lost_when_the_state_grows_out_of_it(kernels):
    state = planes.make_planes(100, split=False, special=False)
    headroom = Headroom()
    grad = np.zeros(100, np.float32)
    assert state.call(kernels, "adamw", grad, step=1, headroom=headroom)
    assert headroom.is_ample
    state.weight[3] = 1e25
    assert state.call(kernels, "adamw", grad, step=2, headroom=headroom)
    assert not headroom.is_ample


def test_a_wrong_bound_on_the_gradient_raises(kernels):
    state = planes.make_planes(100, split=True, special=False)
    headroom = Headroom()
    grad = planes.make_grad(100, bfloat16=False, special=False)
    assert state.call(kernels, "adamw", grad, step=1, headroom=headroom)
    grad[5] = np.nan
    with pytest.raises(NumericsError, match="bound was wrong"):
        state.call(kernels, "adamw", grad, step=2, headroom=headroom, largest_grad=1.0)


@pytest.mark.parametrize("operation", list(Operation))
def test_a_proof_holds_at_the_edge_of_the_ample_range(kernels, operation):
    """The worst state and gradient that the proof lets through give finite results."""
    limit = np.array([AMPLE.weight, AMPLE.exp_avg, AMPLE.exp_avg_sq], np.int32).view(np.float32)
    name = {0: "adamw", 1: "invert", 2: "correct"}[int(operation)]
    for learning_rate in (1e-5, 1.0, 1e3):
        for eps in (1e-15, 1e-8):
            arguments = {"step": 1, "learning_rate": learning_rate, "eps": eps}
            arguments |= {"weight_decay": 0.5 / learning_rate}
            if operation is Operation.CORRECT:
                arguments["scale"] = 0.0
            hyper = {**planes.HYPERPARAMETERS, **arguments}
            factors = coefficients(**hyper)
            largest = 2.0**80
            while not results_stay_finite(operation, factors, largest):
                largest /= 2
                assert largest > 1e-3
            for signs in np.ndindex(2, 2, 2, 2):
                weight, first, grad = ((-1.0) ** np.array(signs[:3])) * [*limit[:2], largest]
                state = planes.Planes(
                    None, None,
                    np.array([weight], np.float32),
                    np.array([first], np.float32),
                    np.array([signs[3] * limit[2]], np.float32),
                )  # fmt: skip
                sent = np.array([grad], np.float32)
                assert state.call(kernels, name, sent, **arguments)
                assert all(np.isfinite(array).all() for array in state.arrays)
