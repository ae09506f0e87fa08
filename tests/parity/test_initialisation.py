"""Random weights are those of transformers: the same distribution for every tensor of a class."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from families import FAMILIES, family_config
from headrace.models.shrink import MAX_LAYERS, shrink
from headrace.models.spec import ModelSpec
from headrace.models.structure import covering_prefix
from headrace.store.loading import initialise
from headrace.store.state import ModelState
from tiny import masters

DEVIATIONS = 6.0  # of an estimate from its mean; some thousand tensors are compared


def fresh(spec, seed):
    state = ModelState(spec.units, "float32")
    initialise(spec, state, seed=seed)
    values = masters(state)
    state.close()
    return values


def tiny_spec(family):
    spec = ModelSpec.from_config(family_config(family))
    depth = covering_prefix(list(spec.parts.layers), MAX_LAYERS)
    config = shrink(spec.config, depth)
    if hasattr(config, "linear_num_value_heads"):
        config.linear_num_value_heads = 32  # some parameters have one value a head
    return ModelSpec.from_config(config)


def moments_differ(one, other):
    """In standard errors of mean and deviation, whichever is larger."""
    mean, std = other.mean().item(), other.std().item()
    # Of a normal sample; a uniform one scatters less.
    error = math.hypot(one.numel() ** -0.5, other.numel() ** -0.5) * max(std, 1e-12)
    return max(abs(one.mean().item() - mean), abs(one.std().item() - std) * 2**0.5) / error


ONE_A_CLASS = {model_type: family for family, (model_type, _) in FAMILIES.items()}


@pytest.mark.parametrize("family", ONE_A_CLASS.values())
def test_fresh_weights_are_drawn_as_transformers_draws_them(family):
    spec = tiny_spec(family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(spec.config, dtype=torch.float32)
    wanted, found = model.state_dict(), fresh(spec, seed=1)
    assert found.keys() <= wanted.keys()
    for name, value in found.items():
        reference = wanted[name]
        if reference.numel() < 2 or bool((reference == reference.flatten()[0]).all()):
            assert torch.equal(value, reference), name
            continue
        assert value.std() > 0, name
        assert moments_differ(value, reference) < DEVIATIONS, name
        # The same support: neither normal where it is uniform nor the other way round.
        ratio = float(value.abs().max() / reference.abs().max())
        assert 0.5 < ratio < 2.0, name


def test_the_comparison_can_fail():
    spec = tiny_spec("Qwen3")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(spec.config, dtype=torch.float32)
    name = "model.embed_tokens.weight"
    wanted, value = model.state_dict()[name], fresh(spec, seed=1)[name]
    assert moments_differ(1.2 * value, wanted) > DEVIATIONS
    assert moments_differ(value + 0.2 * wanted.std(), wanted) > DEVIATIONS
