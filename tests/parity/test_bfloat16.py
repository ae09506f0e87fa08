"""A bfloat16 state: what is computed with its high halves, and what stays float32 by its class."""

import pytest
import torch

from families import family_config
from headrace.models.spec import ModelSpec
from headrace.selftest.checks import relative_errors
from headrace.selftest.reference import reference_gradients, reference_model
from headrace.selftest.twin import filled_state, make_batches, tiny_config
from headrace.store.state import ModelState
from tiny import half_away, make_engine, masters, parameters, returned_gradients


def split_state(spec, full):
    """The same masters, split."""
    state = ModelState(spec.units, "bfloat16")
    for (unit, param), (_, source) in zip(parameters(state), parameters(full), strict=True):
        unit.set_master(param, full_value(full, source))
    return state


def full_value(state, param):
    return next(unit.master(p) for unit, p in parameters(state) if p.name == param.name)


def reference(spec, state):
    """transformers' model with the values that compute uses."""
    model = reference_model(spec, state)
    strict = {p.name for unit in spec.units for p in unit.float32_params}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in masters(state) and name not in strict:
                tensor.copy_(half_away(tensor))
    return model, strict


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("family", ["DeepSeek-V3", "GLM-4.5"])
def test_float32_parameters_of_a_bfloat16_model(family, activations):
    """Routers are read whole, low halves included, before and after an update moved them."""
    tiny = tiny_config(ModelSpec.from_config(family_config(family)))
    spec = ModelSpec.from_config(tiny)
    state = split_state(spec, filled_state(spec))
    batches = make_batches(2)
    settings = {"activations": activations, "gradient_dtype": "float32", "poison_slots": True}
    with make_engine(spec, state, **settings) as engine:
        for _ in range(3):
            model, strict = reference(spec, state)
            assert strict
            _, wanted = reference_gradients(model, batches)
            before = masters(state)
            # Small steps move low halves alone: a router whose low half is stale reads as before.
            engine.step(batches, learning_rate=1e-6, max_grad_norm=1.0)
            found = returned_gradients(engine)
            errors = relative_errors(found, wanted)
            assert max(errors.values()) <= 1e-5, max(errors, key=errors.get)
            engine.synchronize()
            moved = [
                name for name, value in masters(state).items() if (value != before[name]).any()
            ]
            assert strict & set(moved)


def test_the_check_of_float32_parameters_can_fail():
    """Rounded to bfloat16, a router's gradients and its neighbours' differ beyond the tolerance."""
    tiny = tiny_config(ModelSpec.from_config(family_config("GLM-4.5")))
    spec = ModelSpec.from_config(tiny)
    state = split_state(spec, filled_state(spec))
    model, strict = reference(spec, state)
    batches = make_batches(2)
    _, wanted = reference_gradients(model, batches)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name in strict:
                tensor.copy_(half_away(tensor))
    _, rounded = reference_gradients(model, batches)
    assert max(relative_errors(rounded, wanted).values()) > 1e-4
