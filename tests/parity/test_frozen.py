"""Layers below the first that is trained: no backward, and the same bits above them."""

import pytest
import torch
from transformers import AutoConfig

from headrace.engine import Engine, EngineConfig
from headrace.engine.passes import Passes
from headrace.models.lora import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.selftest.checks import relative_errors, streamed_gradients
from headrace.selftest.reference import reference_gradients, reference_model
from headrace.selftest.twin import filled_state
from headrace.store.loading import initialise
from headrace.store.state import ModelState
from tiny import SIZES, differing, make_batches, planes, tiny_config

MODES = [
    {"activations": "keep"},
    {"activations": "keep", "recompute_layers": 1, "offload_layers": 1},
    {"activations": "offload", "weight_slots": 2},
    {"activations": "recompute", "micro_batches_per_wave": 1},
    {"activations": "recompute", "poison_slots": True, "lane_jitter_seconds": 0.002},
    {"clipping": "optimistic", "gradient_slots": 1},
    {"device_units": 5},
]


def upper(name):
    """Layers 3 and 4 of five, and the head."""
    return "layers.3." in name or "layers.4." in name or "lm_head" in name


@pytest.fixture
def backward_of(monkeypatch):
    """Layers in the order in which their backward runs."""
    seen, run = [], Passes.layer_backward

    def layer_backward(passes, index, *args, **kwargs):
        seen.append(index)
        return run(passes, index, *args, **kwargs)

    monkeypatch.setattr(Passes, "layer_backward", layer_backward)
    return seen


def train(trainable, settings):
    spec = ModelSpec(tiny_config(num_hidden_layers=5), trainable=trainable)
    units = settings.get("device_units", 0)
    state = ModelState.allocate(spec, "bfloat16", device_units=units)
    initialise(spec, state, seed=0)
    with Engine(spec, state, config=EngineConfig(update_threads=1, **settings)) as engine:
        results = [
            engine.step(make_batches(2, seed=seed), learning_rate=1e-3, max_grad_norm=0.5)
            for seed in range(3)
        ]
        engine.synchronize()
    return [(result.loss, result.grad_norm) for result in results], planes(state)


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_they_have_no_backward_and_change_no_bit(settings, backward_of, monkeypatch):
    found = train(upper, settings)
    assert sorted(set(backward_of)) == [3, 4]
    assert len(backward_of) == 2 * 2 * 3  # layers, micro-batches, steps
    monkeypatch.setattr(ModelSpec, "first_trained_layer", 0)
    backward_of.clear()
    wanted = train(upper, settings)
    assert len(backward_of) == 5 * 2 * 3
    assert found[0] == wanted[0]
    assert differing(found[1], wanted[1]) == []


@pytest.mark.parametrize("settings", MODES[:4], ids=str)
def test_a_head_alone_needs_none(settings, backward_of):
    losses = train(lambda name: "lm_head" in name, settings)[0]
    assert backward_of == []
    assert losses[0] != losses[1]


def test_an_embedding_that_is_trained_needs_all(backward_of):
    train(lambda name: "embed_tokens" in name, MODES[0])
    assert set(backward_of) == {0, 1, 2, 3, 4}


def test_adapters_of_upper_layers(backward_of):
    spec = ModelSpec(tiny_config(num_hidden_layers=5), lora=LoraSettings(rank=2, layers=(3,)))
    state = filled_state(spec)
    _, found = streamed_gradients(spec, state, make_batches(1))
    state.close()
    assert spec.first_trained_layer == 3
    assert backward_of == [4, 3]
    assert all(bool(gradient.any()) for gradient in found.values())


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_their_routers_still_count(activations, backward_of):
    """The balancing loss averages over all layers; its slope in a frozen one is not needed."""
    config = AutoConfig.for_model(
        "mixtral", **SIZES, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    spec = ModelSpec(config, trainable=lambda name: "layers.2." in name)
    state, batches = filled_state(spec), make_batches(2)
    loss, wanted = reference_gradients(reference_model(spec, state), batches)
    found_loss, found = streamed_gradients(spec, state, batches, activations=activations)
    state.close()
    assert set(backward_of) == {2}
    assert found_loss == pytest.approx(loss, abs=2e-6)
    errors = relative_errors(found, {name: wanted[name] for name in found})
    assert max(errors.values()) <= 1e-5
    assert any("gate.weight" in name for name in found)
    assert all(isinstance(g, torch.Tensor) and bool(g.any()) for g in found.values())
