"""Optimistic clipping: updates applied before the norm is known, corrected to the plain order."""

import math

import pytest
import torch

from headrace.engine import AdamWConfig
from headrace.engine.clipping import (
    FIRST_EARLY_STEP,
    ChunkGate,
    ClippingPolicy,
    clip_coefficient,
)
from tiny import differing, make_batches, make_engine, planes, tiny_config, tiny_state

RATE = 1e-3
WARM = 12


def run(clipping, limits, *, dtype="float32", count=None):
    """Masters after ``WARM`` unclipped steps and one step for each of ``limits``."""
    spec, state = tiny_state(tiny_config(tied=True), dtype)
    optimizer = AdamWConfig(weight_decay=0.1)
    norms = []
    with make_engine(spec, state, clipping=clipping, optimizer=optimizer) as engine:
        if count is not None:
            correct = engine.updater._optimizer.correct

            def counting(*args, **kwargs):
                count.append(1)
                return correct(*args, **kwargs)

            engine.updater._optimizer.correct = counting
        for seed, limit in enumerate([1e9] * WARM + list(limits)):
            result = engine.step(
                make_batches(2, seed=seed), learning_rate=RATE, max_grad_norm=limit
            )
            norms.append(result.grad_norm)
        engine.synchronize()
        masters = [unit.master(p).double() for unit in state.units for p in unit.layout.params]
    return masters, norms, planes(state)


@pytest.mark.parametrize("coefficient", [0.99, 0.5, 0.1, 1e-3])
def test_correction_equals_the_plain_order(coefficient):
    """Within 3e-6 of a step (and the weight's own rounding) for every coefficient."""
    _, norms, _ = run("deferred", [1e9])
    limit = coefficient * norms[-1]
    count = []
    plain, plain_norms, _ = run("deferred", [limit])
    early, early_norms, _ = run("optimistic", [limit], count=count)
    assert count, "nothing was corrected: the check saw no early update"
    assert early_norms == plain_norms
    for mine, theirs in zip(early, plain, strict=True):
        rounding = 2 * torch.finfo(torch.float32).eps * theirs.abs()
        assert bool(((mine - theirs).abs() <= 3e-6 * RATE + rounding).all())


def test_unclipped_steps_are_bitwise_those_of_the_plain_order():
    count = []
    plain = run("deferred", [1e9] * 3, dtype="bfloat16")
    early = run("optimistic", [1e9] * 3, dtype="bfloat16", count=count)
    assert differing(early[2], plain[2]) == []
    assert not count


def test_later_steps_stay_close():
    """Clipped and unclipped steps in turn: the corrections do not build up."""
    limits = [0.5, 1e9, 0.3, 0.3, 1e9, 0.1]
    plain, _, _ = run("deferred", limits)
    early, _, _ = run("optimistic", limits)
    worst = max(float((a - b).abs().max()) for a, b in zip(early, plain, strict=True))
    assert worst < 0.02 * RATE


def test_gate_turns_away_what_a_correction_could_not_repair():
    gate = ChunkGate()
    assert not gate.admits(1.0, 100)  # nothing known yet
    gate.observe(1.0, 100)
    assert gate.admits(1.0, 100)
    assert gate.admits(15.9, 100)
    assert not gate.admits(16.1, 100)
    assert not gate.admits(math.inf, 100)
    assert not gate.admits(math.nan, 100)


def test_coefficient_is_that_of_clip_grad_norm():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 4.0, 12.0])
    norm = torch.nn.utils.clip_grad_norm_([parameter], 2.0)
    assert torch.allclose(
        parameter.grad, torch.tensor([3.0, 4.0, 12.0]) * clip_coefficient(float(norm), 2.0)
    )
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(5.0, None) == 1.0


def policy_after(*, clipped, exposed, host_computes=False, mode="auto"):
    policy = ClippingPolicy(mode, host_computes=host_computes)
    for _ in range(60):
        policy.observe(
            coefficient=0.5 if clipped else 1.0, exposed_update=exposed, step_seconds=1.0
        )
    return policy


def test_auto_changes_over_when_waiting_costs_and_clipping_is_rare():
    assert policy_after(clipped=False, exposed=0.2).may_update_early(FIRST_EARLY_STEP)
    assert not policy_after(clipped=False, exposed=0.2).may_update_early(FIRST_EARLY_STEP - 1)
    assert not policy_after(clipped=True, exposed=0.2).may_update_early(100)
    assert not policy_after(clipped=False, exposed=0.001).may_update_early(100)
    assert not policy_after(clipped=False, exposed=0.2, host_computes=True).may_update_early(100)
    assert not policy_after(clipped=False, exposed=0.2, mode="deferred").may_update_early(100)
    assert policy_after(clipped=True, exposed=0.0, mode="optimistic").may_update_early(100)


def test_auto_returns_to_deferred_when_clipping_becomes_the_rule():
    policy = policy_after(clipped=False, exposed=0.2)
    for _ in range(30):
        policy.observe(coefficient=0.5, exposed_update=0.0, step_seconds=1.0)
    assert not policy.may_update_early(100)
