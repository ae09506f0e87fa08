"""Compiled layer templates: the same gradients in fp32, without a compiler being installed."""

import pytest

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
