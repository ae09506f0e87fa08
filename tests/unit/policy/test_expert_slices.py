"""Slices of experts: chosen where no whole layer fits, and counted as the engine allocates."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from headrace.engine import Engine, EngineConfig
from headrace.errors import CapacityError, ConfigError
from headrace.models.lora import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.plan.architecture import read_architecture
from headrace.plan.choose import choose as plan_choose
from headrace.plan.job import THIS_VERSION, Job
from headrace.plan.machine import describe_machine
from headrace.plan.memory import footprint
from headrace.policy.budget import Workload, activations_of, step_budget
from headrace.policy.search import choose
from headrace.policy.steptime import Rates, predict_step
from headrace.selftest.twin import filled_state, make_batches
from headrace.units import GIB

# One H200 with 16 Xeon cores (docs/performance.md).
RATES = Rates(
    flops=615e12, h2d_bytes=40e9, d2h_bytes=40e9, update_parameters=3.3e9,
    device_update_parameters=100e9, device_bytes=5e12,
)  # fmt: skip
WORK = Workload(tokens=4096, micro_batches=1, sequence_length=4096)
LARGE = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def large():
    """Four layers of 3.3 billion parameters, six GiB each."""
    return ModelSpec(AutoConfig.for_model(**LARGE))


def chosen(spec, device_gib, config=None, **more):
    limits = {"device_bytes": device_gib * GIB, "host_bytes": 400 * GIB, "rates": RATES}
    return choose(spec, config or EngineConfig(), "bfloat16", WORK, **limits | more)


def test_layers_are_cut_only_where_none_fits_whole(large):
    assert [chosen(large, gib).config.expert_slices for gib in (139, 100, 48, 24, 16)] == [
        1, 1, 2, 4, 8,
    ]  # fmt: skip
    with pytest.raises(CapacityError, match="no placement fits"):
        chosen(large, 24, EngineConfig(expert_slices=1))
    assert chosen(large, 24, num_ranks=2).config.expert_slices == 4
    assert chosen(large, 24, EngineConfig(expert_slices=8), num_ranks=8).config.expert_slices == 8
    with pytest.raises(ConfigError, match="a layer has 32 experts"):
        chosen(large, 24, EngineConfig(expert_slices=33))
    assert chosen(large, 139, EngineConfig(expert_slices=16)).config.expert_slices == 16


def test_a_sliced_layer_recomputes_and_takes_longer(large):
    whole = EngineConfig(device_units=0, activations="recompute")
    sliced = EngineConfig(device_units=0, expert_slices=8)
    assert activations_of(large, sliced) == ("recompute",) * 4
    assert activations_of(large, EngineConfig(device_units=3, expert_slices=8)) == (
        "keep", "keep", "recompute", "recompute",
    )  # fmt: skip
    many = Workload(tokens=1 << 18, micro_batches=4, sequence_length=4096)
    before, after = (predict_step(large, config, many, RATES) for config in (whole, sliced))
    # Attention twice more forward: less than another pass over the layers.
    assert before.compute < after.compute < before.compute * 5 / 4


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("slices", [1, 3, 8])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=3, layers=(1, 2))])
def test_bytes_are_those_the_engine_allocates(slices, waves, lora):
    """Windows and accumulators of a small model, to the byte."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=32, moe_intermediate_size=24, intermediate_size=40, head_dim=16,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=96,
        num_experts=8, num_experts_per_tok=2, mlp_only_layers=[0],
    )  # fmt: skip
    spec = ModelSpec(config, lora=lora)
    state = filled_state(spec)
    settings = EngineConfig(
        expert_slices=slices, micro_batches_per_wave=2 // waves, update_threads=1, device_units=0
    )
    work = Workload(tokens=28, micro_batches=2, sequence_length=14)
    budget = step_budget(spec, settings, "float32", work)
    with Engine(spec, state, "cpu", settings) as engine:
        engine.step(make_batches(2), learning_rate=0.0)
        windows, sums = engine._windows, engine._accumulators
        slots = [windows.embed, windows.head, *windows.layers]
        assert budget.device["weight slots"] == sum(s.flat.nbytes for s in slots)
        accumulators = [sums.embed, sums.head, *sums._layers]
        assert budget.device["gradient accumulators"] == sum(s.flat.nbytes for s in accumulators)
        assert budget.host["returned gradients"] == engine.updater.pending_bytes
        assert budget.host["state"] == sum(unit.num_bytes for unit in state.units)


def test_adapters_beside_experts_leave_room_for_larger_slices():
    """A layer with frozen experts takes windows, and no accumulator of its size."""
    adapted = ModelSpec(AutoConfig.for_model(**LARGE), lora=LoraSettings(rank=8))
    found = [chosen(adapted, gib).config.expert_slices for gib in (48, 24, 16)]
    assert found == sorted(found)
    assert 1 < found[-1] <= 8
    with pytest.raises(CapacityError, match="no placement fits"):
        chosen(adapted, 16, EngineConfig(expert_slices=1))


@pytest.mark.parametrize("slices", [1, 3, 32])
def test_the_plan_counts_what_the_trainer_places_by(large, slices):
    """``headrace plan``, without torch, beside the placement of a run."""
    config = EngineConfig(device_units=0, expert_slices=slices, activations="recompute")
    budget = step_budget(large, config, "bfloat16", WORK)
    model = read_architecture(LARGE)
    job = Job(tokens_per_step=4096, device_units=0, expert_slices=slices)
    machine = describe_machine(gpu="h200", num_gpus=1, host_bytes=None)
    need = footprint(model, job, machine, THIS_VERSION, activations="recompute", waves=1)
    found = {item.kind: item.num_bytes for item in need.device}
    assert found["weight slots"] == pytest.approx(budget.device["weight slots"], rel=0.01)
    assert found["gradients"] == pytest.approx(budget.device["gradient accumulators"], rel=0.01)
    waiting = found["layer inputs"] + found.get("experts' results", 0)
    assert waiting == pytest.approx(budget.device["activations"], rel=0.01)
    if slices == 3:  # with more the head's chunk is larger, which the plan counts by itself
        assert found["layer at work"] == pytest.approx(budget.device["temporaries"], rel=0.05)


def test_the_plan_cuts_layers_where_none_fits_whole():
    model = read_architecture(LARGE)
    found = []
    for card in ("h200", "a6000", "rtx-4090"):
        machine = describe_machine(gpu=card, num_gpus=1, host_bytes=None)
        choice = plan_choose(model, Job(tokens_per_step=4096), machine, THIS_VERSION)
        assert choice.fits
        found.append(choice.slices)
    assert found[0] == 1
    assert 1 < found[1] < found[2]
    machine = describe_machine(gpu="rtx-4090", num_gpus=2, host_bytes=None)
    assert plan_choose(model, Job(tokens_per_step=8192), machine, THIS_VERSION).slices == found[2]
    adapters = Job(tokens_per_step=4096, lora_rank=4)
    machine = describe_machine(gpu="rtx-4090", num_gpus=1, host_bytes=None)
    # Frozen experts return nothing: windows alone must hold a slice, not gradients.
    assert plan_choose(model, adapters, machine, THIS_VERSION).slices == 1
    smaller = replace(machine, memory_bytes=replace(machine.memory_bytes, value=16.0 * GIB))
    assert 1 < plan_choose(model, adapters, smaller, THIS_VERSION).slices <= 4
    with pytest.raises(ConfigError, match=r"expert_slices is 33, and here .* at most 32"):
        plan_choose(model, Job(expert_slices=33), machine, THIS_VERSION)
