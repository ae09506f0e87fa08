"""The extra kernel of gated DeltaNet: used only where it is right, and then the same rule.

flash-linear-attention is not needed: a stand-in with its signature takes one row of packed tokens
and counts its calls.
"""

import pytest
import torch

from headrace.models.families import gated_delta_kernel
from headrace.models.families.gated_delta import (
    chunk_gated_delta_rule,
    prepare,
    torch_gated_delta_rule,
)

CPU = torch.device("cpu")
PACKED = torch.tensor([0, 70, 71, 100, 130, 200, 200], dtype=torch.int32)  # padded at its end


@pytest.fixture(autouse=True)
def _verdicts(monkeypatch):
    monkeypatch.setattr(gated_delta_kernel, "_verdicts", {})


@pytest.fixture
def calls(monkeypatch):
    """A right kernel; the list grows with its calls."""
    seen = []

    def kernel(q, k, v, *, g, beta, cu_seqlens, use_qk_l2norm_in_kernel):
        assert use_qk_l2norm_in_kernel
        assert q.shape == k.shape
        assert q.shape[2] == v.shape[2]
        if cu_seqlens is not None:
            assert q.shape[0] == 1
            assert cu_seqlens.dtype == torch.long
            assert (cu_seqlens.diff() > 0).all()
        seen.append(cu_seqlens)
        out, _ = plain(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)
        return out.to(v.dtype), None

    def plain(*args, **options):
        known = dict(gated_delta_kernel._verdicts)
        gated_delta_kernel._verdicts.clear()  # the stand-in computes by the torch path
        try:
            return chunk_gated_delta_rule(*args, **options)
        finally:
            gated_delta_kernel._verdicts.update(known)

    monkeypatch.setattr(gated_delta_kernel, "_kernel", lambda: kernel)
    return seen


def inputs(*, heads=2, rows=2, length=100):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(rows, length, *shape, generator=generator)

    tensors = [draw(heads, 8), draw(heads, 8), draw(4, 6), -draw(4).abs(), torch.sigmoid(draw(4))]
    return [tensor.requires_grad_() for tensor in tensors]


def rule(tensors, cu_seqlens):
    query, key, value, g, beta = tensors
    out, _ = chunk_gated_delta_rule(
        query, key, value, g=g, beta=beta, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True
    )
    return out


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("cu_seqlens", [None, PACKED], ids=["rows", "packed"])
def test_the_operator_is_the_rule(calls, cu_seqlens, heads):
    results = []
    for used in (False, True):
        gated_delta_kernel._verdicts = {"cpu": None if used else "not now"}
        tensors = inputs(heads=heads)
        out = rule(tensors, cu_seqlens)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    assert len(calls) == 2  # forward, and again in backward
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_operator_stays_in_one_graph(calls):
    gated_delta_kernel._verdicts = {"cpu": None}
    compiled = torch.compile(rule, backend="aot_eager", fullgraph=True, dynamic=False)
    tensors = inputs()
    wanted, found = rule(tensors, PACKED), compiled(tensors, PACKED)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(out.square().sum(), tensors) for out in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_right_kernel_passes_its_check(calls):
    assert gated_delta_kernel.check(CPU, torch_gated_delta_rule) is None
    assert len(calls) == 4


def _lost_state(kernel):
    """Documents are told to the kernel, which forgets them."""
    return lambda *args, cu_seqlens, **options: kernel(*args, cu_seqlens=None, **options)


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


def _wrong_gradient(kernel):
    """Right results, and a gradient of keys that is wrong: the fault on Hopper."""
    return lambda q, k, v, **options: kernel(q, _HalfGradient.apply(k), v, **options)


def _broken(_kernel):
    def fail(*_, **__):
        raise RuntimeError("no such instruction")

    return fail


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (_lost_state, "the kernel's result differs"),
        (_wrong_gradient, "the kernel's key differs"),
        (_broken, "does not run here: RuntimeError: no such instruction"),
    ],
)
def test_a_wrong_kernel_is_found_out(calls, monkeypatch, fault, reason):
    right = gated_delta_kernel._kernel()
    monkeypatch.setattr(gated_delta_kernel, "_kernel", lambda: fault(right))
    assert reason in gated_delta_kernel.check(CPU, torch_gated_delta_rule)


@pytest.mark.parametrize(
    ("capability", "triton", "faulty"),
    [
        ((9, 0), "3.3.1", False),
        ((9, 0), "3.4.0", True),
        ((9, 0), "3.5.1+git1234", True),
        ((9, 0), "3.7.0", True),
        ((9, 0), "3.7.1", False),
        ((8, 0), "3.5.1", False),
        ((10, 0), "3.5.1", False),
    ],
)
def test_versions_with_a_known_fault(capability, triton, faulty):
    assert (gated_delta_kernel.known_fault(capability, triton) is not None) == faulty


def test_without_a_gpu_or_the_package_thetorch_gated_delta_rule_stays(monkeypatch):
    gated_delta_kernel.prepare(CPU, compare=torch_gated_delta_rule)
    assert not gated_delta_kernel.is_used(CPU)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(gated_delta_kernel.importlib.util, "find_spec", lambda _: None)
    gated_delta_kernel.prepare(cuda, compare=torch_gated_delta_rule)
    assert "not installed" in gated_delta_kernel._verdicts["cuda:0"]
    assert not gated_delta_kernel.is_used(cuda)


def test_a_model_without_the_mixer_asks_for_nothing():
    prepare(torch.nn.Linear(2, 2), torch.device("cuda", 0))
    assert gated_delta_kernel._verdicts == {}
