"""Gradients that are summed in place: those of autograd, and of every other use of a weight."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.models.summing import (
    SummingEmbedding,
    SummingLinear,
    add_outer_product,
    bindings,
    handles_for,
    sum_in_place,
)


class Reused(nn.Module):
    """Calls one weight as a module, and reads it beside (as absorbed projections do)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=2)
        self.proj = nn.Linear(4, 4)

    def forward(self, ids, beside=False):
        hidden = self.proj(torch.tanh(self.proj(self.embed(ids))))
        return hidden @ self.proj.weight.T if beside else hidden


IDS = torch.tensor([[1, 2, 1], [6, 0, 2]])


def gradients(module, *, beside, sums):
    """Gradients by name of the summed output, and what reached ``sums``."""
    parameters = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    handles = handles_for(sums, None)
    bound = {**parameters, **bindings(sums, handles)}
    output = torch.func.functional_call(module, bound, (IDS, beside))
    leaves = [*parameters.values(), *handles.values()]
    found = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True)
    return dict(zip(parameters, found, strict=False))


@pytest.mark.parametrize("beside", [False, True])
def test_sums_equal_autograd_for_every_use_of_a_weight(beside):
    module = Reused()
    wanted = gradients(module, beside=beside, sums={})
    names = sum_in_place(module)
    assert sorted(names) == ["embed.weight", "proj.weight"]
    sums = {name: torch.zeros_like(module.get_parameter(name)) for name in names}
    for count in (1, 2):
        found = gradients(module, beside=beside, sums=sums)
        assert (found["proj.weight"] is not None) == beside
        assert found["embed.weight"] is None
        torch.testing.assert_close(found["proj.bias"], wanted["proj.bias"])
        torch.testing.assert_close(sums["embed.weight"], count * wanted["embed.weight"])
        # What autograd returns is added by the caller.
        autograd = found["proj.weight"] if beside else 0.0
        torch.testing.assert_close(
            sums["proj.weight"] + count * autograd, count * wanted["proj.weight"]
        )
    assert not sums["embed.weight"][2].any(), "the padding row is not trained"


def test_without_a_sum_modules_are_what_they_were():
    module, plain = Reused(), Reused()
    module.load_state_dict(plain.state_dict())
    sum_in_place(module)
    assert torch.equal(module(IDS), plain(IDS))
    assert isinstance(module.proj, nn.Linear)
    assert set(module.state_dict()) == set(plain.state_dict())


def test_modules_with_a_forward_of_their_own_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Embed(nn.Embedding):
        def forward(self, x):
            return 2 * super().forward(x)

    renormed = nn.Embedding(3, 2, max_norm=1.0)
    module = nn.ModuleList([Scaled(2, 2), Embed(3, 2), renormed])
    assert sum_in_place(module) == ()
    assert not any(isinstance(m, (SummingLinear, SummingEmbedding)) for m in module)


def test_bf16_products_are_summed_in_float32():
    """1 + 2^-9 has no bf16: a sum in bf16 would lose every small addend."""
    total = torch.ones(3, 5)
    grad, rows = torch.full((2, 3), 2.0**-5).bfloat16(), torch.full((2, 5), 2.0**-5).bfloat16()
    add_outer_product(total, grad, rows)
    assert bool((total == 1 + 2 * 2.0**-10).all())


def test_bias_only_gradients_match():
    linear = nn.Linear(3, 2)
    layer = nn.Sequential(linear)
    rows = torch.randn(4, 3)
    expected = torch.autograd.grad(F.linear(rows, linear.weight, linear.bias).sum(), linear.bias)
    sums = {"0.weight": torch.zeros(2, 3)}
    sum_in_place(layer)
    handles = handles_for(sums, None)
    bound = {**dict(layer.named_parameters()), **bindings(sums, handles)}
    output = torch.func.functional_call(layer, bound, (rows,)).sum()
    found = torch.autograd.grad(output, [linear.bias])
    torch.testing.assert_close(found, expected)
