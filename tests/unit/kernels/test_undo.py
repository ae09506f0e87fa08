"""Inverting and correcting an early update: how near they come to what they stand for."""

from __future__ import annotations

import numpy as np
import pytest

import planes

NUM = 1 << 16
STEPS = 30
HYPER = {"learning_rate": 1e-4}


def history(kernels, *, split: bool) -> tuple[planes.Planes, list[np.ndarray]]:
    """A state after 29 updates, and the gradient of the 30th, up to 16x the usual size."""
    rng = np.random.default_rng(3)
    scale = (10.0 ** rng.uniform(-6, -2, NUM)).astype(np.float32)
    state = planes.make_planes(NUM, split=split, special=False)
    state.exp_avg[:] = 0
    state.exp_avg_sq[:] = 0
    for step in range(1, STEPS):
        grad = planes.bf16_bits((scale * rng.standard_normal(NUM)).astype(np.float32))
        assert state.call(kernels, "adamw", grad, step=step, **HYPER)
    last = 16 * (scale * rng.standard_normal(NUM)).astype(np.float32)
    return state, planes.bf16_bits(last)


def direction(state: planes.Planes) -> np.ndarray:
    """The bias-corrected step in fp64."""
    first = state.exp_avg.astype(np.float64) / (1 - 0.9**STEPS)
    second = state.exp_avg_sq.astype(np.float64) / (1 - 0.999**STEPS)
    return first / (np.sqrt(second) + 1e-8)


@pytest.mark.parametrize("split", [True, False], ids=["split", "float32"])
def test_inverting_restores_the_state_to_rounding(kernels, split):
    before, grad = history(kernels, split=split)
    after = before.copy()
    assert after.call(kernels, "adamw", grad, step=STEPS, grad_scale=0.5, **HYPER)
    restored = after.copy()
    assert restored.call(kernels, "invert", grad, step=STEPS, grad_scale=0.5, **HYPER)

    # The weight: two more roundings of it than the update made. The moments: what the sum with
    # the gradient rounded away, relative to the larger of both.
    ulp = 2.0**-23 * np.abs(before.master)
    assert (np.abs(restored.master - before.master) <= 2 * ulp + 1e-9).all()
    first = np.abs(restored.exp_avg - before.exp_avg)
    size = np.maximum(np.abs(before.exp_avg), np.abs(after.exp_avg))
    assert np.quantile(first / size, 0.999) < 5e-7
    second = np.abs(restored.exp_avg_sq - before.exp_avg_sq) / before.exp_avg_sq
    assert np.quantile(second, 0.999) < 6e-5
    # The update itself was no smaller than what is left of it by far.
    assert np.abs(after.master - before.master).mean() > 100 * (
        np.abs(restored.master - before.master).mean()
    )


@pytest.mark.parametrize("split", [True, False], ids=["split", "float32"])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.1, 0.7, 0.999])
def test_correcting_equals_clipping_first(kernels, split, scale):
    before, grad = history(kernels, split=split)
    expected, found = before.copy(), before.copy()
    assert expected.call(kernels, "adamw", grad, step=STEPS, grad_scale=scale, **HYPER)
    assert found.call(kernels, "adamw", grad, step=STEPS, **HYPER)
    assert found.call(kernels, "correct", grad, step=STEPS, scale=scale, **HYPER)

    assert np.quantile(np.abs(direction(found) - direction(expected)), 0.999) < 2.7e-6
    tolerance = 2.0**-22 * np.abs(expected.master) + 2.7e-4 * HYPER["learning_rate"]
    assert (np.abs(found.master - expected.master) <= tolerance).all()


def test_correcting_to_the_same_scale_changes_no_moment(kernels):
    state, grad = history(kernels, split=True)
    assert state.call(kernels, "adamw", grad, step=STEPS, **HYPER)
    corrected = state.copy()
    assert corrected.call(kernels, "correct", grad, step=STEPS, scale=1.0, **HYPER)
    assert corrected.same_bits(state)


def test_corrected_second_moment_never_falls_below_its_bound(kernels):
    """Clamping at zero instead gives steps of a million learning rates."""
    state = planes.make_planes(NUM, split=False, special=False)
    state.exp_avg[:] = 0
    state.exp_avg_sq[:] = 0
    grad = planes.make_grad(NUM, bfloat16=False, special=False)
    start = state.weight.copy()
    assert state.call(kernels, "adamw", grad, step=1, **HYPER)
    assert state.call(kernels, "correct", grad, step=1, scale=1e-4, **HYPER)
    assert (np.abs(state.weight - start) < 2 * HYPER["learning_rate"] * 1.1).all()
    clipped = 1e-4 * grad.astype(np.float64)
    assert (state.exp_avg_sq >= 0.99 * 0.001 * clipped**2).all()
