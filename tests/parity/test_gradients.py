"""The gradient that returns to the host is plain autograd's, parameter by parameter."""

import pytest
import torch

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

CASES = [
    pytest.param(family, tied, cuts, id=f"{family}-{'tied' if tied else 'untied'}-{name}")
    for family in ("qwen3", "llama", "llama-bias", "mistral", "qwen2")
    for tied in (True, False)
    for name, cuts in (("rows", ()), ("packed", (4, 11)))
]


@pytest.mark.parametrize(("family", "tied", "cuts"), CASES)
def test_first_step_gradients(family, tied, cuts):
    """In fp32 within 1e-5: the sums are taken in another order."""
    spec, state = tiny_state(tiny_config(family, tied=tied))
    model = reference_model(spec, state)
    batches = make_batches(3, cuts=cuts)
    loss = reference_backward(model, batches)
    with make_engine(spec, state) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        gradients = returned_gradients(engine)
    assert result.loss == pytest.approx(loss, abs=2e-6)
    reference = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == reference.keys()
    errors = {name: relative_error(gradients[name], reference[name]) for name in reference}
    assert max(errors.values()) <= 1e-5, errors
    norm = torch.nn.utils.get_total_norm(reference.values())
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-6)


def test_gradients_of_some_parameters_only():
    """Frozen parameters have no gradient, no update, and do not change the others' gradients."""
    config = tiny_config("qwen3", tied=True)
    frozen = ("embed_tokens", "layers.1.", "norm.weight")

    def trainable(name):
        return not any(part in name for part in frozen)

    spec, state = tiny_state(config, trainable=trainable)
    model = reference_model(spec, state)
    batches = make_batches(2)
    reference_backward(model, batches)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with make_engine(spec, state, activations="keep") as engine:
        engine.step(batches, learning_rate=1e-3, max_grad_norm=1.0)
        gradients = returned_gradients(engine)
        engine.synchronize()
    assert gradients.keys() == {name for name in before if trainable(name)}
    for unit in state.units:
        for param in unit.layout.params:
            unchanged = torch.equal(unit.master(param), before[param.name])
            assert unchanged == (not param.trainable), param.name
    reference = {name: p.grad for name, p in model.named_parameters()}
    assert max(relative_error(g, reference[name]) for name, g in gradients.items()) <= 1e-5
