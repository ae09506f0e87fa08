"""Slots: views that alias, graphs that keep no weight, accumulators that lose nothing."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.engine.slots import GradientSlot, KeptGraph, Slot
from headrace.store.layout import plan_unit
from tiny import make_batches, make_engine, tiny_config, tiny_state

CPU = torch.device("cpu")
LAYOUT = plan_unit(
    "layer",
    [("m.w", "w", (6, 4), True), ("m.b", "b", (6,), True), ("m.f", "f", (4,), False)],
)
W, B, FROZEN = (next(p for p in LAYOUT.params if p.local_name == name) for name in "wbf")


def filled(seed=0, extra=0):
    """A slot with random parameters."""
    slot = Slot(LAYOUT.size + extra, torch.float32, CPU)
    slot.flat.copy_(torch.randn(slot.flat.numel(), generator=torch.Generator().manual_seed(seed)))
    return slot


# -- weight slots --------------------------------------------------------------------------


def test_parameters_alias_the_slot():
    slot = filled(extra=128)
    parameters = slot.parameters(LAYOUT)
    assert {name: tuple(p.shape) for name, p in parameters.items()} == {
        "w": (6, 4),
        "b": (6,),
        "f": (4,),
    }
    slot.flat.fill_(3.0)
    assert all(bool((p == 3).all()) for p in parameters.values())
    assert [parameters[name].requires_grad for name in "wbf"] == [True, True, False]
    assert all(p.is_leaf for p in parameters.values())


def test_parameters_are_aligned():
    """256 bytes: the compiler copies inputs that are not, and a copy escapes the recognition."""
    slot = Slot(LAYOUT.size, torch.bfloat16, CPU)
    start = slot.flat.data_ptr()
    assert all((p.data_ptr() - start) % 256 == 0 for p in slot.parameters(LAYOUT).values())


def test_parameters_are_made_once_a_structure():
    slot = filled(extra=512)
    first = slot.parameters(LAYOUT)
    again = plan_unit(
        "other", [(f"n.{p.local_name}", p.local_name, p.shape, p.trainable) for p in LAYOUT.params]
    )
    assert slot.parameters(again) is first
    other = plan_unit("other", [("n.w", "w", (6, 4), False)])
    assert slot.parameters(other) is not first
    assert not slot.parameters(other)["w"].requires_grad


def test_poison_reaches_every_parameter():
    slot = filled(extra=10)
    slot.poison()
    assert bool(slot.flat.isnan().all())
    assert all(bool(p.isnan().all()) for p in slot.parameters(LAYOUT).values())


# -- kept graphs ---------------------------------------------------------------------------


def layer(parameters, hidden):
    """Reads its weights in several shapes: as they are, transposed, and as a slice."""
    inner = F.silu(F.linear(hidden, parameters["w"], parameters["b"]))
    outer = inner @ parameters["w"]
    return outer * parameters["w"][2] + outer * parameters["f"]


def forward(slot, hidden, graph=None):
    if graph is None:
        return layer(slot.parameters(LAYOUT), hidden)
    with graph.hooks():
        return layer(slot.parameters(LAYOUT), hidden)


def gradients(slot, output, hidden):
    leaves = [slot.parameters(LAYOUT)[name] for name in "wb"]
    return torch.autograd.grad(output.sum(), [hidden, *leaves])


def test_kept_graph_finds_its_weights_in_another_slot():
    """Forward in one slot, poison it, backward from another: the bits of plain autograd."""
    hidden = torch.randn(5, 4, requires_grad=True)
    plain_slot = filled()
    wanted = gradients(plain_slot, forward(plain_slot, hidden), hidden)
    slot, other = filled(), filled(extra=64)
    graph = KeptGraph(slot)
    output = forward(slot, hidden, graph)
    slot.poison()
    graph.rebind(other)
    found = gradients(slot, output, hidden)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_kept_graph_that_is_not_rebound_reads_the_poison():
    """What the check with poisoned slots sees when backward reads a stale slot."""
    hidden = torch.randn(5, 4, requires_grad=True)
    slot = filled()
    output = forward(slot, hidden, KeptGraph(slot))
    slot.poison()
    assert bool(gradients(slot, output, hidden)[0].isnan().all())


def test_kept_graph_holds_no_weight():
    """Nothing that autograd saved lies in the slot's storage."""
    saved = []
    slot, hidden = filled(), torch.randn(5, 4, requires_grad=True)
    graph = KeptGraph(slot)
    pack = graph._pack

    def packing(tensor):
        saved.append(pack(tensor))
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(packing, graph._unpack):
        layer(slot.parameters(LAYOUT), hidden)
    tensors = [item for item in saved if isinstance(item, torch.Tensor)]
    storage = slot.flat.untyped_storage().data_ptr()
    assert len(tensors) < len(saved)
    assert all(tensor.untyped_storage().data_ptr() != storage for tensor in tensors)


def test_kept_graph_refuses_a_reinterpreted_weight():
    slot = filled()
    graph = KeptGraph(slot)
    with pytest.raises(AssertionError, match="another dtype"):
        graph._pack(slot.flat.view(torch.int32))


# -- gradient slots ------------------------------------------------------------------------


def test_accumulator_sums_and_overwrites():
    slot = GradientSlot(LAYOUT.num_trainable, CPU)
    slot.flat.fill_(float("nan"))  # what an earlier layer left
    ones = [torch.ones(6, 4), torch.full((6,), 2.0)]
    slot.begin(LAYOUT, ())
    slot.add(LAYOUT, ones)
    slot.add(LAYOUT, ones)
    slot.finish()
    assert bool((slot.flat[W.slice] == 2).all())
    assert bool((slot.flat[B.slice] == 4).all())
    # Alignment gaps are zero: they are part of what returns, and of its norm.
    assert float(slot.flat.sum()) == 24 * 2 + 6 * 4


@pytest.mark.parametrize("summed", [(), ("w",)])
def test_idle_parameters_have_zero_gradients(summed):
    """Not missing ones: what an earlier layer left must not count as theirs."""
    layout = plan_unit("layer", [("m.w", "w", (8, 16), True), ("m.v", "v", (8, 16), True)])
    slot = GradientSlot(layout.num_trainable, CPU)
    slot.flat.fill_(7.0)
    slot.begin(layout, summed)
    slot.add(layout, [None, torch.ones(8, 16)])
    slot.finish()
    assert not slot.views(layout)["w"].any()
    slot.begin(layout, summed)
    slot.add(layout, [None, torch.ones(8, 16)])
    slot.add(layout, [torch.ones(8, 16), None])  # idle in the first micro-batch only
    slot.finish()
    assert all(bool((view == 1).all()) for view in slot.views(layout).values())


def test_summed_parameters_begin_at_zero():
    layout = plan_unit("layer", [("m.w", "w", (8, 16), True), ("m.v", "v", (8, 16), True)])
    slot = GradientSlot(layout.num_trainable, CPU)
    slot.flat.fill_(float("nan"))
    slot.begin(layout, ("w",))
    slot.views(layout)["w"].add_(1.0)
    slot.add(layout, [torch.ones(8, 16), torch.ones(8, 16)])
    slot.finish()
    assert bool((slot.views(layout)["w"] == 2).all())
    assert bool((slot.views(layout)["v"] == 1).all())


def test_accumulator_without_gaps_is_overwritten_whole():
    layout = plan_unit("layer", [("m.w", "w", (8, 16), True)])
    slot = GradientSlot(layout.num_trainable + 256, CPU)
    slot.flat.fill_(float("nan"))
    slot.begin(layout, ())
    slot.add(layout, [torch.ones(8, 16)])
    assert bool((slot.flat[: layout.num_trainable] == 1).all())


def test_bf16_gradients_are_summed_in_float32():
    slot = GradientSlot(LAYOUT.num_trainable, CPU)
    one, small = torch.ones(6, 4), torch.full((6, 4), 2.0**-12)
    slot.begin(LAYOUT, ())
    for number in range(5):
        gradient = (one if number == 0 else small).bfloat16()
        slot.add(LAYOUT, [gradient, None])
    assert bool((slot.flat[W.slice] == 1 + 4 * 2.0**-12).all())  # bf16 would have stayed at 1


# -- in the engine -------------------------------------------------------------------------


def test_accumulation_holds_unsharded_gradients():
    """Pitfall 4. One wave: gradient bytes on the device do not grow with layers or micro-batches.

    On the host they are one gradient of the model, in the dtype that returns.
    """
    found = []
    for num_layers, num_batches in ((4, 1), (4, 6), (8, 6)):
        spec, state = tiny_state(tiny_config(num_hidden_layers=num_layers), "bfloat16")
        with make_engine(spec, state, gradient_slots=2) as engine:
            engine.step(make_batches(num_batches), learning_rate=1e-3)
            found.append([slot.flat.numel() for slot in engine._accumulators._layers])
            trained = sum(unit.num_trainable for unit in spec.units)
            assert engine.updater.pending_bytes == 2 * trained
            leaves = [
                p
                for slot in engine._windows.layers
                for p in slot.parameters(spec.units[1]).values()
            ]
            assert all(leaf.grad is None for leaf in leaves)
    assert found[0] == found[1] == found[2] == [spec.units[1].num_trainable] * 2
