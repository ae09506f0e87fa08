"""Compiled layer templates: the same gradients in fp32, without a compiler being installed."""

import pytest
from transformers import AutoConfig

from headrace.engine import Engine, EngineConfig
from headrace.models.spec import ModelSpec
from headrace.selftest.checks import relative_errors
from headrace.selftest.reference import reference_gradients
from headrace.selftest.reference import reference_model as plain_model
from headrace.selftest.twin import CUTS, filled_state
from headrace.selftest.twin import make_batches as twin_batches
from headrace.selftest.twin import tiny_config as tiny_twin
from tiny import (
    make_batches,
    make_engine,
    reference_backward,
    reference_model,
    relative_error,
    returned_gradients,
    tiny_config,
    tiny_state,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
COMPILED = {"compile": True, "compile_backend": "aot_eager_decomp_partition"}


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_compiled_layers(activations):
    """Slots poisoned between forward and backward: what the graph recomputes reads fresh weights.

    Within 5e-5: compiled operations round in another order.
    """
    spec, state = tiny_state(tiny_config("llama", tied=True, num_hidden_layers=2))
    model = reference_model(spec, state)
    batches = make_batches(2)
    loss = reference_backward(model, batches)
    settings = {"poison_slots": True, "weight_slots": 2, "activations": activations} | COMPILED
    with make_engine(spec, state, **settings) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        gradients = returned_gradients(engine)
    assert result.loss == pytest.approx(loss, abs=1e-5)
    for name, parameter in model.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 5e-5, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it traces
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_gated_delta_layers_run_eagerly(family):
    """Packed rows, as one graph: transformers' code with headrace's functions in it."""
    config = tiny_twin(ModelSpec.from_config(AutoConfig.for_model(family)))
    # Attention reads document by document on the CPU, which no graph can hold.
    config.layer_types, config.num_hidden_layers = ["linear_attention"] * 2, 2
    spec = ModelSpec.from_config(config)
    state = filled_state(spec)
    batches = twin_batches(2, cuts=CUTS, vocab_size=spec.vocab_size)
    loss, wanted = reference_gradients(plain_model(spec, state), batches)
    settings = EngineConfig(poison_slots=True, weight_slots=2, **COMPILED)
    with Engine(spec, state, "cpu", settings) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        found = returned_gradients(engine)
        counts = engine.compile_counts
    state.close()
    assert counts.eager_calls == {}
    assert result.loss == pytest.approx(loss, abs=1e-5)
    errors = relative_errors(found, wanted)
    assert max(errors.values()) <= 5e-5, max(errors, key=errors.get)
