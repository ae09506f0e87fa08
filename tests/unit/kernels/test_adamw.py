"""The update against torch.optim.AdamW, against fp64, and the faults users met elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import planes
from headrace.errors import ConfigError
from headrace.kernels import reference
from headrace.kernels.coefficients import coefficients

NUM = 4096
STEPS = 100


def gradients(steps: int, num: int = NUM) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    scale = 10.0 ** rng.uniform(-6, 0, num)
    return [(scale * rng.standard_normal(num)).astype(np.float32) for _ in range(steps)]


def run_torch(weight, grads, dtype, **changes):
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()).to(dtype))
    hyper = {**planes.HYPERPARAMETERS, **changes}
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=hyper["learning_rate"],
        betas=(hyper["beta1"], hyper["beta2"]),
        eps=hyper["eps"],
        weight_decay=hyper["weight_decay"],
    )
    for grad in grads:
        parameter.grad = torch.from_numpy(grad).to(dtype)
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach().numpy(), state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()


def fresh(num: int = NUM, *, split: bool = True) -> planes.Planes:
    state = planes.make_planes(num, split=split, special=False)
    state.exp_avg[:] = 0
    state.exp_avg_sq[:] = 0
    return state


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_within_rounding_of_torch_and_of_fp64(kernels, weight_decay):
    """Tolerance: a step rounds the weight once (half a unit in the last place, 2^-24 relative)
    and computes its move from a dozen roundings (8 * 2^-23 of at most about 10 * lr); errors of
    100 steps add up at worst. Torch in fp32 rounds the weight twice when it decays.
    """
    state, grads = fresh(), gradients(STEPS)
    start = state.master.copy()
    for step, grad in enumerate(grads, 1):
        assert state.call(kernels, "adamw", grad, step=step, weight_decay=weight_decay)
    exact = run_torch(start, grads, torch.float64, weight_decay=weight_decay)
    single = run_torch(start, grads, torch.float32, weight_decay=weight_decay)

    learning_rate = planes.HYPERPARAMETERS["learning_rate"]
    tolerance = STEPS * (2.0**-24 * np.abs(start).clip(1e-2) * 1.5 + 80 * 2.0**-23 * learning_rate)
    ours = state.master.astype(np.float64)
    assert (np.abs(ours - exact[0]) <= tolerance).all()
    assert (np.abs(ours - single[0]) <= 2 * tolerance).all()
    np.testing.assert_allclose(state.exp_avg, exact[1], rtol=2e-5, atol=2e-7 * 1e-1)
    np.testing.assert_allclose(state.exp_avg_sq, exact[2], rtol=2e-5)
    # Not only within the tolerance: on the whole no farther from the truth than torch is.
    assert np.abs(ours - exact[0]).mean() <= 1.1 * np.abs(single[0] - exact[0]).mean()


def test_small_decay_is_not_rounded_away(kernels):
    """1 - 1e-6 is 1.3% off in fp32; step and decay are added before they meet the weight."""
    state = fresh(split=False)
    start = state.weight.astype(np.float64)
    steps = 300
    for step in range(1, steps + 1):
        assert state.call(
            kernels, "adamw", np.zeros(NUM, np.float32),
            step=step, learning_rate=1e-5, weight_decay=0.1,
        )  # fmt: skip
    decayed = (1 - state.weight / start).mean()
    assert decayed == pytest.approx(steps * 1e-6, rel=5e-3)


def test_bias_correction_per_unit_equals_whole_model(kernels):
    """DeepSpeed#7819: calls a layer must not advance the step of the next layer."""
    state, grads = fresh(), gradients(6)
    whole, units = state.copy(), state.copy()
    bounds = [0, 1, 700, 701, 2048, NUM]
    for step, grad in enumerate(grads, 1):
        assert whole.call(kernels, "adamw", grad, step=step)
        order = range(len(bounds) - 1) if step % 2 else reversed(range(len(bounds) - 1))
        for unit in order:
            part = slice(bounds[unit], bounds[unit + 1])
            assert units.slice(part).call(kernels, "adamw", grad[part], step=step)
    assert units.same_bits(whole)


def test_groups_keep_their_own_settings(kernels):
    """DeepSpeed#7905: two learning rates, two decays, none of them the last one's."""
    settings = [
        {"learning_rate": 1e-3, "weight_decay": 0.1},
        {"learning_rate": 1e-3, "weight_decay": 0.0},
        {"learning_rate": 5e-2, "weight_decay": 0.1},
    ]
    state, grads = fresh(split=False), gradients(5)
    start = state.weight.copy()
    parts = np.array_split(np.arange(NUM), len(settings))
    for step, grad in enumerate(grads, 1):
        for part, changes in zip(parts, settings, strict=True):
            where = slice(part[0], part[-1] + 1)
            assert state.slice(where).call(kernels, "adamw", grad[where], step=step, **changes)
    for part, changes in zip(parts, settings, strict=True):
        expected, _, _ = run_torch(
            start[part], [grad[part] for grad in grads], torch.float32, **changes
        )
        np.testing.assert_allclose(state.weight[part], expected, rtol=2e-6, atol=1e-7)


def test_weights_move_at_low_learning_rates(kernels):
    """torchtune#2254: 100 steps at 1e-5, where bf16 weights alone would stand still."""
    grads = gradients(STEPS)
    state = fresh()
    start = state.master.copy()
    for step, grad in enumerate(grads, 1):
        assert state.call(kernels, "adamw", grad, step=step, learning_rate=1e-5)
    in_fp32, _, _ = run_torch(start, grads, torch.float32, learning_rate=1e-5)
    moved = state.master - start
    assert (moved != 0).mean() > 0.99
    np.testing.assert_allclose(moved, in_fp32 - start, atol=STEPS * 2.0**-24 * 4)
    # The control: kept in bf16 after every step, most weights never move.
    stuck = torch.from_numpy(start).bfloat16().float().numpy()
    control = planes.Planes(
        None, None, stuck.copy(), np.zeros(NUM, np.float32), np.zeros(NUM, np.float32)
    )
    for step, grad in enumerate(grads, 1):
        control.call(kernels, "adamw", grad, step=step, learning_rate=1e-5)
        control.weight[:] = torch.from_numpy(control.weight).bfloat16().float().numpy()
    assert (control.weight == stuck).mean() > 0.5


def test_bf16_gradients_are_their_exact_fp32_values(kernels):
    state = planes.make_planes(NUM, split=True)
    grad = planes.make_grad(NUM, bfloat16=True)
    wide = state.copy()
    assert state.call(kernels, "adamw", grad, step=2)
    assert wide.call(kernels, "adamw", reference.widen(grad), step=2)
    assert state.same_bits(wide)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"step": 0}, "step"),
        ({"learning_rate": -1e-3}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"eps": 0.0}, "eps"),
        ({"eps": 1e-45}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"learning_rate": 1.0, "weight_decay": 1.0}, "weight_decay"),
        ({"grad_scale": float("inf")}, "grad_scale"),
    ],
)
def test_hyperparameters_outside_their_range_are_refused(changes, name):
    with pytest.raises(ConfigError, match=f"^{name} is"):
        coefficients(**{**planes.HYPERPARAMETERS, "step": 1, **changes})
