"""FlexAttention in compiled layers on a real device: one graph, nothing eager, exact."""

from __future__ import annotations

import pytest
import torch
from benchmarks.cases.families import family_row

from headrace.models.attention_documents import attend_by_document
from headrace.models.attention_flex import attend_flex
from headrace.models.compiling import Compiler
from on_cuda import COMPILED_ON_CUDA

pytestmark = COMPILED_ON_CUDA


@pytest.fixture(autouse=True)
def _fresh():
    """A test's graphs do not count against the next one's limit; products are not in TF32."""
    torch.compiler.reset()
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def attention_inputs(rows, length, heads, shared, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, count, length, 64) for count in (heads, shared, shared)]
    tensors = [torch.randn(shape, generator=generator) for shape in [*shapes, (heads,)]]
    return [tensor.cuda().to(dtype).requires_grad_() for tensor in tensors]


# Whole blocks of 128 and not, windows within and across them.
@pytest.mark.parametrize(
    ("length", "cuts", "window", "softcap", "sinks"),
    [
        (200, None, 17, 3.0, False),
        (200, (1, 128, 200, 250, 384, 400), None, None, True),
        (256, None, 150, None, True),
        (256, (3, 130, 400, 512, 512), 129, 5.0, True),
        (1024, (700, 1300, 2048), None, 3.0, False),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"]
)
def test_compiled_attention_is_that_by_document(length, cuts, window, softcap, sinks, dtype, limit):
    *tensors, sinks_H = attention_inputs(2, length, 4, 2, dtype)
    cu_seqlens = None if cuts is None else torch.tensor([0, *cuts], dtype=torch.int32).cuda()
    leaves = [*tensors, sinks_H] if sinks else tensors

    def layer(query, key, value, sinks_H, cu_seqlens):
        options = {"scaling": 0.3, "window": window, "softcap": softcap}
        return attend_flex(
            query, key, value, cu_seqlens, **options, sinks_H=sinks_H if sinks else None
        )

    compiler = Compiler("inductor")
    compiled = compiler.compile(layer, "attention")
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    wanted = attend_by_document(
        *exact[:3], cu_seqlens, scaling=0.3, window=window, softcap=softcap,
        sinks_H=exact[3] if sinks else None,
    )  # fmt: skip
    weights = torch.linspace(-1, 1, wanted.numel(), device="cuda").view_as(wanted)
    wanted_gradients = torch.autograd.grad((wanted * weights).sum(), exact)
    for _ in range(2):
        got = compiled(*tensors, sinks_H, cu_seqlens)
        gradients = torch.autograd.grad((got.float() * weights).sum(), leaves)
        for one, other in zip([got, *gradients], [wanted, *wanted_gradients], strict=True):
            error = (one.double() - other).norm() / other.norm()
            assert float(error) <= limit
    assert compiler.counts.row() == {"graphs": 1, "recompilations": 0, "eager_calls": 0}, (
        compiler.counts.eager_calls
    )


# In float32 every layer with documents or a window takes FlexAttention.
@pytest.mark.parametrize("name", ["Gemma 2", "Gemma 3", "gpt-oss", "Mistral", "Qwen3"])
def test_layers_are_compiled_whole_and_their_gradients_are_plain_autograds(name):
    found = family_row(name, compiled=True)["compiled"]
    assert found["reasons"] == []
    assert found["eager_calls"] == 0
    assert found["recompilations"] == 0
    assert found["gradient"] <= 1e-5, found
    assert found["leak"] <= 1e-6, found
