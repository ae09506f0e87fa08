"""The chunked head: the value and gradients of cross-entropy, without its logits."""

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.batch import IGNORE_INDEX
from headrace.models.loss import cross_entropy_chunk, linear_cross_entropy

N, D, V = 23, 8, 17


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[[3, 4, 11, 22]] = IGNORE_INDEX
    return hidden, weight, targets


def plain(hidden, weight, targets, scale, dtype=torch.float64):
    hidden = hidden.to(dtype).requires_grad_()
    weight = weight.to(dtype).requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    (scale * loss).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 1000])
def test_value_and_gradients(problem, chunk_tokens):
    hidden, weight, targets = problem
    loss, hidden_grad, weight_grad = plain(*problem, scale=0.25)
    found_weight = torch.zeros(V, D)
    found, found_hidden = linear_cross_entropy(
        hidden, weight, targets, scale=0.25, chunk_tokens=chunk_tokens, weight_grad_VD=found_weight
    )
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(loss), rel=1e-6)
    torch.testing.assert_close(found_hidden.double(), hidden_grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_weight.double(), weight_grad, rtol=1e-5, atol=1e-6)


def test_weight_gradient_is_added_to(problem):
    hidden, weight, targets = problem
    fresh, onto = torch.zeros(V, D), torch.full((V, D), 2.0)
    for accumulator in (fresh, onto):
        linear_cross_entropy(
            hidden, weight, targets, scale=1.0, chunk_tokens=7, weight_grad_VD=accumulator
        )
    torch.testing.assert_close(onto - 2, fresh, rtol=0, atol=5e-6)


def test_inputs_are_left_alone(problem):
    before = [tensor.clone() for tensor in problem]
    hidden, weight, targets = problem
    linear_cross_entropy(
        hidden, weight, targets, scale=1.0, chunk_tokens=7, weight_grad_VD=torch.zeros(V, D)
    )
    assert all(torch.equal(a, b) for a, b in zip(problem, before, strict=True))


def test_loss_alone(problem):
    hidden, weight, targets = problem
    loss, hidden_grad = linear_cross_entropy(
        hidden,
        weight,
        targets,
        scale=0.0,
        chunk_tokens=7,
        weight_grad_VD=None,
        with_hidden_grad=False,
    )
    assert hidden_grad is None
    assert float(loss) == pytest.approx(float(plain(*problem, scale=1.0)[0]), rel=1e-6)


def test_frozen_head_has_a_hidden_gradient_only(problem):
    hidden, weight, targets = problem
    _, found = linear_cross_entropy(
        hidden, weight, targets, scale=1.0, chunk_tokens=7, weight_grad_VD=None
    )
    torch.testing.assert_close(found.double(), plain(*problem, 1.0)[1], rtol=1e-5, atol=1e-6)


def test_nothing_supervised(problem):
    """Pitfall 10. Zero, not 0 / 0."""
    hidden, weight, _ = problem
    targets = torch.full((N,), IGNORE_INDEX)
    weight_grad = torch.zeros(V, D)
    loss, hidden_grad = linear_cross_entropy(
        hidden, weight, targets, scale=1.0, chunk_tokens=7, weight_grad_VD=weight_grad
    )
    assert float(loss) == 0
    assert not hidden_grad.any()
    assert not weight_grad.any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_unsupervised_rows_may_hold_anything(problem, value):
    """Padding that overflowed must not reach loss or gradients: 0 * inf is NaN."""
    hidden, weight, targets = problem
    logits = hidden @ weight.T
    logits[3, 5] = value
    loss, grad = cross_entropy_chunk(logits, targets, torch.tensor(1.0), True)
    reference, hidden_grad, _ = plain(*problem, scale=1.0)
    assert float(loss) == pytest.approx(float(reference), rel=1e-6)
    assert not grad[3].any()
    torch.testing.assert_close((grad @ weight).double(), hidden_grad, rtol=1e-5, atol=1e-6)


def test_supervised_rows_that_overflow_show():
    """A model that diverged is seen: NaN in the loss, not a number that looks fine."""
    hidden = torch.full((2, D), 1e30)
    weight = torch.full((V, D), 1e30)
    loss, _ = linear_cross_entropy(
        hidden,
        weight,
        torch.tensor([1, 2]),
        scale=1.0,
        chunk_tokens=7,
        weight_grad_VD=torch.zeros(V, D),
    )
    assert not math.isfinite(float(loss))


def test_large_logits_do_not_overflow():
    """The maximum is taken out before the exponential."""
    logits = torch.tensor([[1000.0, 0.0, -1000.0]])
    loss, grad = cross_entropy_chunk(logits, torch.tensor([1]), torch.tensor(1.0), True)
    assert float(loss) == 1000
    assert grad.tolist() == [[1.0, -1.0, 0.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bf16 x bf16 to fp32 needs CUDA")
def test_bf16_weights_have_a_float32_gradient(problem):
    """Products are summed in fp32 over all chunks; logits' gradients are rounded once."""
    hidden, weight, targets = (tensor.cuda() for tensor in problem)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    accumulator = torch.zeros(V, D, device="cuda")
    _, hidden_grad = linear_cross_entropy(
        hidden, weight, targets, scale=1.0, chunk_tokens=7, weight_grad_VD=accumulator
    )
    _, _, reference = plain(hidden, weight, targets, scale=1.0)
    assert hidden_grad.dtype == torch.bfloat16
    assert float((accumulator.double() - reference).norm() / reference.norm()) < 1e-2
