"""Units whose state is on the device: the same bits as in host memory."""

import numpy as np
import pytest
import torch

from headrace import kernels
from headrace.engine import AdamWConfig, Engine, EngineConfig
from headrace.engine.schedule import plan_uses
from headrace.errors import ConfigError
from headrace.kernels import device
from headrace.kernels.coefficients import coefficients
from headrace.models.spec import ModelSpec
from headrace.store.checkpoint import load_checkpoint, save_checkpoint
from headrace.store.state import ModelState
from tiny import differing, make_batches, planes, tiny_config, tiny_state

RATE = 1e-3


def placed(config, dtype, device_units):
    """The state of ``tiny_state`` with its first units on the device."""
    spec, host = tiny_state(config, dtype)
    state = ModelState.allocate(spec, dtype, device_units=device_units)
    for mine, theirs in zip(state.units, host.units, strict=True):
        for param in theirs.layout.params:
            mine.set_master(param, theirs.master(param))
    return spec, state


def train(config, dtype, device_units, *, limit=0.5, **settings):
    spec, state = placed(config, dtype, device_units)
    optimizer = AdamWConfig(weight_decay=0.1)
    settings = EngineConfig(device_units=device_units, **settings)
    with Engine(spec, state, config=settings, optimizer=optimizer) as engine:
        losses = [
            engine.step(make_batches(2, seed=seed), learning_rate=RATE, max_grad_norm=limit)
            for seed in range(4)
        ]
        engine.synchronize()
    return [(result.loss, result.grad_norm) for result in losses], planes(state), spec, state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_placement_changes_no_bit(dtype, tied):
    config = tiny_config(tied=tied)
    expected = train(config, dtype, 0)
    num_units = len(expected[3].units)
    for device_units in (1, 3, num_units):
        run = train(config, dtype, device_units)
        assert run[0] == expected[0]
        assert differing(run[1], expected[1]) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_slots": 2, "poison_slots": True, "lane_jitter_seconds": 0.002},
        {"micro_batches_per_wave": 1},
        {"recompute_layers": 2},
        {"limit": None},
    ],
)
def test_placement_under_every_schedule(settings):
    config = tiny_config(tied=False)
    expected = train(config, "float32", 0, **({"limit": None} if "limit" in settings else {}))
    run = train(config, "float32", 2, **settings)
    assert run[0] == expected[0]
    assert differing(run[1], expected[1]) == []


def test_placement_on_resume(tmp_path):
    """A checkpoint does not know where units were: save with one placement, go on with another."""
    config = tiny_config(tied=True)
    _, bits, spec, state = train(config, "bfloat16", 2)
    path = save_checkpoint(tmp_path, spec, state, step=4, trainer_state={})
    other = ModelState.allocate(spec, "bfloat16", device_units=4)
    load_checkpoint(path, spec, other)
    assert differing(planes(other), bits) == []


def test_placement_of_more_units_than_there_are():
    spec = ModelSpec(tiny_config(tied=True))
    with pytest.raises(ConfigError, match="device_units is 99"):
        ModelState.allocate(spec, device_units=99)


def test_placement_must_be_that_of_the_state():
    spec, state = placed(tiny_config(tied=True), "float32", 2)
    with pytest.raises(ConfigError, match="allocated with 2 units"):
        Engine(spec, state, config=EngineConfig(device_units=1))


def test_resident_layers_are_never_sent():
    plan = plan_uses(5, 2, 2, resident={0: 2, 1: 3})
    assert {use.slot for use in plan if use.layer in (0, 1)} == {2, 3}
    assert not any(use.fetch for use in plan if use.layer in (0, 1))
    assert all(use.slot < 2 for use in plan if use.layer > 1)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_device_update_equals_the_host_kernel(weight_decay):
    """Bitwise, with subnormal moments, zeros and every sign."""
    host = kernels.load()
    rng = np.random.default_rng(5)
    n = 1 << 16
    weight = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 2, n)).astype(np.float32)
    weight[:4] = [0.0, -0.0, 1.00390625, -1.00390625]  # ties of the bf16 rounding
    hi, lo = np.empty(n, np.uint16), np.empty(n, np.int16)
    assert host.split_float32(weight, hi, lo)
    exp_avg = (rng.standard_normal(n) * 1e-3).astype(np.float32)
    exp_avg_sq = (rng.standard_normal(n) ** 2 * 1e-6).astype(np.float32)
    exp_avg[:100] *= 1e-36
    exp_avg_sq[:200] *= 1e-33
    tensors = [
        torch.from_numpy(hi.copy()).view(torch.bfloat16),
        *(torch.from_numpy(array.copy()) for array in (lo, exp_avg, exp_avg_sq)),
    ]
    for step in range(1, 4):
        grad = torch.from_numpy(rng.standard_normal(n).astype(np.float32) * 1e-3)
        grad = grad.to(torch.bfloat16)
        settings = {
            "step": step, "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
            "weight_decay": weight_decay, "grad_scale": 0.37,
        }  # fmt: skip
        bits = grad.view(torch.uint16).numpy()
        assert host.adamw_split(hi, lo, exp_avg, exp_avg_sq, bits, **settings)
        device.adamw_split(*tensors, grad, c=coefficients(**settings))
        for mine, theirs in zip(tensors, (hi, lo, exp_avg, exp_avg_sq), strict=True):
            assert mine.view(torch.uint8).numpy().tobytes() == theirs.tobytes()
