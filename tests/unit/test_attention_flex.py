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
    monkeypatch.setattr(attention_flex, "_compiled_kernel", lambda: flex_attention.flex_attention)
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


@pytest.mark.parametrize("cu_seqlens", [None, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
def test_blocks_that_are_left_out_hold_no_visible_pair(cu_seqlens, window):
    """And blocks that are said to be visible whole are."""
    document_N = attention_flex.document_numbers(cu_seqlens, B, T, torch.device("cpu"))
    document_N = torch.nn.functional.pad(document_N, (0, -(B * T) % 128), value=-1)
    N = document_N.shape[0]
    mask = attention_flex.block_mask(document_N, window)
    distance = torch.arange(N)[:, None] - torch.arange(N)
    visible = (distance >= 0) & (document_N[:, None] == document_N)
    visible &= distance < (N if window is None else window)
    blocks = visible.view(N // 128, 128, N // 128, 128).transpose(1, 2).flatten(2)

    def listed(counts, indices):
        found = torch.zeros(N // 128, N // 128, dtype=torch.bool)
        for row, (number, order) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
            found[row, order[:number].long()] = True
        return found

    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    assert not (whole & partial).any()
    assert (blocks.any(-1) <= (whole | partial)).all()
    assert (whole <= blocks.all(-1)).all()
