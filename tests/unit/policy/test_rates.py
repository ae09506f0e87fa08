"""Measured rates, and which placements are worth a measurement."""

import math
from dataclasses import asdict

import pytest
import torch

from headrace.engine import EngineConfig
from headrace.engine.config import AdamWConfig
from headrace.errors import CapacityError
from headrace.models.spec import ModelSpec
from headrace.policy.budget import Workload
from headrace.policy.rates import Effort, _HostUpdate, measure_rates
from headrace.policy.search import Room, best, fitting_choices, shortlist
from headrace.policy.steptime import Rates, predict_step
from headrace.policy.trial import try_steps
from headrace.units import GIB
from tiny import tiny_config

CPU = torch.device("cpu")
WORKLOAD = Workload(tokens=2 * 16, micro_batches=4, sequence_length=16, rows=2)
RATES = Rates(
    flops=1e12, h2d_bytes=1e9, d2h_bytes=1e9, update_parameters=1e9,
    device_update_parameters=1e11, device_bytes=1e12,
)  # fmt: skip
SMALL = Effort(seconds=0.02, tokens=16, parameters=4096, copy_bytes=1 << 16)


@pytest.fixture(scope="module")
def spec():
    return ModelSpec(tiny_config("qwen3"))


def test_every_rate_is_measured_on_the_cpu(spec):
    found = measure_rates(spec, WORKLOAD, device=CPU, num_threads=1, effort=SMALL)
    for name, value in (asdict(found.rates) | found.figures).items():
        assert 0 < value < math.inf, name
    assert found.rates.attention * found.rates.flops == pytest.approx(
        1e12 * found.figures["attention_tflops"]
    )


def test_an_update_that_fails_meanwhile_is_not_hidden(monkeypatch):
    with _HostUpdate(4096, 1) as update:
        found = {}
        with update.running(found):
            pass
        assert found["update"] > 0
        monkeypatch.setattr(update, "run", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError), update.running({}):
            pass


def test_slower_attention_makes_a_longer_step(spec):
    config = EngineConfig(device_units=0, recompute_layers=0)
    slow = Rates(**asdict(RATES) | {"attention": RATES.attention / 2})
    assert (
        predict_step(spec, config, WORKLOAD, slow).compute
        > predict_step(spec, config, WORKLOAD, RATES).compute
    )


@pytest.mark.parametrize("device_bytes", [None, 2 * GIB])
def test_shortlist_begins_with_the_best_and_has_each_kind_once(spec, device_bytes):
    room = Room(device_bytes=device_bytes, host_bytes=GIB)
    choices = fitting_choices(spec, EngineConfig(), "bfloat16", WORKLOAD, room=room, rates=RATES)
    few = shortlist(choices, 3)
    assert few[0] is best(choices)
    assert len(few) == 3
    kinds = {(c.workload.rows, c.workload.num_waves(c.config)) for c in shortlist(choices, 99)}
    assert len(kinds) == len(shortlist(choices, 99))
    if device_bytes is None:  # nothing is placed: its device memory is the host's
        assert {c.config.device_units for c in choices} == {0}
        assert {c.config.offload_layers for c in choices} == {0}


def test_on_the_cpu_device_and_host_share_one_memory(spec):
    config = EngineConfig(activations="keep")
    roomy = Room(device_bytes=None, host_bytes=GIB)
    choices = fitting_choices(spec, config, "bfloat16", WORKLOAD, room=roomy, rates=RATES)
    needed = min(c.budget.device_bytes + c.budget.host_bytes for c in choices)
    tight = Room(device_bytes=None, host_bytes=needed // 2)
    with pytest.raises(CapacityError, match="host memory"):
        fitting_choices(spec, config, "bfloat16", WORKLOAD, room=tight, rates=RATES)


def test_trial_times_real_steps_and_says_when_memory_ran_out(spec, monkeypatch):
    room = Room(device_bytes=None, host_bytes=GIB)
    config = EngineConfig()
    choice = best(fitting_choices(spec, config, "bfloat16", WORKLOAD, room=room, rates=RATES))
    options = {"device": CPU, "optimizer": AdamWConfig(), "max_grad_norm": 1.0, "steps": 2}
    trial = try_steps(spec, choice, "bfloat16", WORKLOAD, **options)
    assert trial.seconds > 0
    assert trial.binding is not None
    assert trial.error is None

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room\nat all")

    monkeypatch.setattr("headrace.engine.Engine.step", full)
    failed = try_steps(spec, choice, "bfloat16", WORKLOAD, **options)
    assert failed.seconds is None
    assert failed.error == "no room"
