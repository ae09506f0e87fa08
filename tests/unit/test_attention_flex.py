"""The FlexAttention path, run eagerly on the CPU, against attention written out by document."""

import pytest
import torch
from torch.nn.attention import flex_attention

from headrace.models import attention_flex
from headrace.models.attention_documents import attend_by_document

B, H, T, E, V = 2, 4, 200, 8, 6
# Documents that end inside, at and across blocks of 128; the last bound is repeated as padding.
PACKED = torch.tensor([0, 1, 128, 200, 250, 384, 400, 400], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """torch refuses gradients on the CPU, although its plain implementation has them."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention_flex, "_compiled_kernel", lambda _: attention_flex._flex)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def inputs(num_key_value_heads):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, T, E), (B, num_key_value_heads, T, E), (B, num_key_value_heads, T, V)]
    tensors = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    return [*tensors, torch.randn(H, generator=generator, requires_grad=True)]


@pytest.mark.parametrize("cu_seqlens", [None, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 17, 150])
@pytest.mark.parametrize(
    ("softcap", "sinks", "num_key_value_heads"),
    [(3.0, False, 2), (None, True, 1), (2.0, True, 4), (None, False, 2)],
    ids=["softcap", "sinks", "both", "neither"],
)
def test_results_and_gradients_are_those_by_document(
    cu_seqlens, window, softcap, sinks, num_key_value_heads
):
    *tensors, sinks_H = inputs(num_key_value_heads)
    options = {
        "scaling": 0.3,
        "window": window,
        "softcap": softcap,
        "sinks_H": sinks_H if sinks else None,
    }
    wanted = attend_by_document(*tensors, cu_seqlens, **options)
    got = attention_flex.attend_flex(*tensors, cu_seqlens, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, wanted.numel()).view_as(wanted)
    leaves = [*tensors, sinks_H] if sinks else tensors
    gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in (got, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# Of torch's own, while it traces.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("cu_seqlens", [None, PACKED], ids=["rows", "packed"])
def test_in_a_compiled_layer_the_mask_reads_what_an_operator_wrote(cu_seqlens):
    """Anything else the compiler would put into the attention kernel, and fail."""
    *tensors, sinks_H = inputs(2)
    options = {"scaling": None, "window": 17, "softcap": 3.0, "sinks_H": sinks_H}
    graphs = []

    def layer(*given):
        return attention_flex.attend_flex(*given, cu_seqlens, **options) * 2.0

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    got = torch.compile(layer, fullgraph=True, backend=backend)(*tensors)
    torch.testing.assert_close(got, layer(*tensors))
    (graph,) = graphs
    (call,) = graph.graph.find_nodes(op="call_function", target=flex_attention.flex_attention_hop)
    (captured,) = call.args[-1]
    assert captured.target is torch.ops.headrace.written_v1


LENGTHS = [(1, 1), (2, 64), (1, 128), (1, 129), (2, 200), (3, 700)]


@pytest.mark.parametrize(("num_rows", "length"), LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 257])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_blocks_are_those_of_the_dense_mask(num_rows, length, window, packed):
    """In either direction, and no block whole that is not, nor the other way round."""
    num_real = num_rows * length
    N = num_real + -num_real % 128
    cu_seqlens, document_N = None, torch.arange(N) // length
    if packed:  # documents end anywhere, some have no token, and boundaries are padded
        generator = torch.Generator().manual_seed(num_real)
        cuts = torch.randint(0, num_real + 1, (9,), generator=generator).sort().values.tolist()
        cu_seqlens = torch.tensor([0, *cuts, num_real, num_real], dtype=torch.int32)
        document_N = torch.searchsorted(cu_seqlens, torch.arange(N), right=True)
    visible = document_N[:, None] == document_N
    distance = torch.arange(N)[:, None] - torch.arange(N)
    visible &= (distance >= 0) & (distance < (N if window is None else window))
    first_N = attention_flex.first_visible(
        cu_seqlens, length=length, num_tokens=N, window=window, device=torch.device("cpu")
    )
    mask = attention_flex.block_mask(first_N)
    assert torch.equal(flex_attention.create_mask(mask.mask_mod, 1, 1, N, N, "cpu")[0, 0], visible)
    blocks = visible.view(N // 128, 128, N // 128, 128).transpose(1, 2).flatten(2)
    some, whole = blocks.any(-1), blocks.all(-1)
    wanted = {"kv": some & ~whole, "full_kv": whole}
    wanted |= {name.replace("kv", "q"): marked.T for name, marked in wanted.items()}
    for name, marked in wanted.items():
        counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
        assert counts.dtype == indices.dtype == torch.int32
        assert indices.min() >= 0
        assert indices.max() < N // 128
        for row, count, order in zip(marked, counts[0, 0], indices[0, 0], strict=True):
            assert order[:count].sort().values.tolist() == row.nonzero().flatten().tolist()
