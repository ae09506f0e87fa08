"""The mask of seeded dropout: its bits by numpy, its rate, and independence of everything else."""

import math

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, ModelRefusedError
from headrace.models.dropout import SeededDropout, draw_seeds, kept_elements, seed_names
from headrace.models.lora import LoraSettings
from masks import numpy_kept

NUM = 1 << 18
MAX_DEVIATIONS = 4.5  # seeds are fixed: what passes once passes always


def kept(seeds, probability=0.1, num=NUM):
    return kept_elements(seeds, num, probability=probability).double()


def deviations(one, other, probability):
    """Their correlation, in standard deviations of that of independent masks."""
    stay = 1 - probability
    return (
        float(((one - stay) * (other - stay)).mean())
        * math.sqrt(one.numel())
        / (stay * probability)
    )


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_the_bits_are_those_of_unsigned_words(probability):
    seeds = draw_seeds(-3, 1, num_layers=2, num_rows=5).flatten()
    extremes = torch.tensor([0, -1, 2**63 - 1, -(2**63), 0xFFFFFFFF, 1 << 32])
    for seed in torch.cat([seeds, extremes]):
        found = kept_elements(seed[None], 5000, probability=probability)[0]
        assert np.array_equal(found.numpy(), numpy_kept(int(seed), 5000, probability))


@pytest.mark.parametrize("probability", [1e-3, 0.05, 0.5, 0.99])
def test_the_rate_is_the_probability(probability):
    seeds = draw_seeds(1, 1, num_layers=1, num_rows=8)[0]
    rates = kept(seeds, probability).mean(1)
    error = (rates - (1 - probability)) * math.sqrt(NUM / (probability * (1 - probability)))
    assert error.abs().max() <= MAX_DEVIATIONS


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_neighbours_in_a_row_are_independent(probability):
    mask = kept(draw_seeds(1, 1, num_layers=1, num_rows=1)[0], probability)[0]
    for lag in (*range(1, 10), 16, 31, 32, 64, 255, 256, 1024, 4096, 5120, 14336, 65536):
        found = deviations(mask[:-lag], mask[lag:], probability)
        assert abs(found) <= MAX_DEVIATIONS, lag


def test_rows_layers_steps_runs_and_modules_are_independent():
    masks = {}
    for run, step in ((1, 1), (1, 2), (2, 1)):
        seeds_LR = draw_seeds(run, step, num_layers=2, num_rows=3)
        for name in ("self_attn.q_proj", "self_attn.k_proj"):
            rows = kept(seeds_LR.flatten() ^ SeededDropout(0.1, name).salt)
            masks |= {(run, step, name, place): row for place, row in enumerate(rows)}
    places = list(masks)
    assert len(places) == 36
    for number, one in enumerate(places):
        for other in places[:number]:
            found = deviations(masks[one], masks[other], 0.1)
            assert abs(found) <= MAX_DEVIATIONS, (one, other)


def test_rows_with_overlapping_counters_share_no_sequence():
    seeds = torch.tensor([0x12345678_00001000, 0x6BCDEF01_00001007])
    one, other = kept(seeds)
    assert abs(deviations(one[7:], other[:-7], 0.1)) <= MAX_DEVIATIONS


def test_a_rows_seeds_do_not_depend_on_the_batch():
    few, many = (draw_seeds(5, 9, num_layers=3, num_rows=rows) for rows in (2, 7))
    assert torch.equal(few, many[:, :2])
    assert many.unique().numel() == 21


def test_what_stays_is_scaled_and_gradients_pass_where_values_do():
    module = SeededDropout(0.25, "q")
    values = torch.rand(2, 3, 5, dtype=torch.float64).add_(0.1).requires_grad_()
    assert module(values) is values
    (name,) = seed_names(torch.nn.ModuleDict({"part": module}))
    assert name == "part.row_seeds_B"
    bound = {"row_seeds_B": torch.tensor([11, 12])}
    out = torch.func.functional_call(module, bound, (values,))
    mask = kept_elements(bound["row_seeds_B"] ^ module.salt, 15, probability=0.25).view(2, 3, 5)
    assert 0 < mask.sum() < 30
    assert torch.equal(out, mask * values * (1 / 0.75))
    (gradient,) = torch.autograd.grad(out.sum(), values)
    assert torch.equal(gradient, mask.double() * (1 / 0.75))
    flat = torch.func.functional_call(module, bound, (values.flatten(0, 1),))
    assert torch.equal(flat.view_as(out), out)
    with pytest.raises(ModelRefusedError, match="which row"):
        torch.func.functional_call(module, bound, (torch.ones(3, 5),))


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan")])
def test_a_probability_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match="at least 0 and below 1"):
        LoraSettings(dropout=value)
