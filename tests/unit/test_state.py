"""The state: its size, its planes, and what it refuses to hold."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.errors import CapacityError, DataError
from headrace.models.spec import ModelSpec
from headrace.store.layout import plan_unit
from headrace.store.state import ModelState
from tiny import half_away, planes, tiny_config

LAYOUT = plan_unit(
    "unit", [("w", "w", (3, 5), True), ("b", "b", (7,), True), ("frozen", "frozen", (4, 2), False)]
)
W, B, FROZEN = (next(p for p in LAYOUT.params if p.name == name) for name in ("w", "b", "frozen"))
LARGEST_SPLIT = np.uint32(0x7F7F7FFF).view(np.float32)  # the largest whose bf16 is finite


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request):
    return request.param


@pytest.fixture
def state(dtype):
    return ModelState([LAYOUT], dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_twelve_bytes_a_parameter(dtype, tied):
    spec = ModelSpec(tiny_config(tied=tied))
    state = ModelState(spec.units, dtype)
    assert state.state_bytes == 12 * spec.num_parameters
    # Alignment adds at most 127 elements a parameter.
    num_names = len(list(spec.parameter_names()))
    assert 0 <= state.allocated_bytes - state.state_bytes < 12 * 128 * num_names


def test_frozen_parameters_take_their_weight_only(dtype, state):
    frozen_bytes = 2 if dtype == "bfloat16" else 4
    assert state.state_bytes == 12 * (15 + 7) + frozen_bytes * 8


def test_fresh_state_is_zero(state):
    assert state.optimizer_step == 0
    assert all(not plane.any() for plane in planes(state).values())


def test_planes_do_not_overlap(state):
    """Every plane filled with its own number reads back as that number."""
    (unit,) = state.units
    kinds = [unit.weights, unit.exp_avg, unit.exp_avg_sq]
    kinds += [] if unit.remainder is None else [unit.remainder]
    for number, plane in enumerate(kinds, 1):
        plane.fill_(number)
    for number, plane in enumerate(kinds, 1):
        assert bool((plane == number).all())
    assert unit.weights.numel() == LAYOUT.size
    assert unit.exp_avg.numel() == LAYOUT.num_trainable


def test_kernel_views_share_the_planes(state):
    (unit,) = state.units
    unit.exp_avg.fill_(3.0)
    unit.exp_avg_sq.fill_(4.0)
    assert (unit.arrays.exp_avg == 3).all()
    assert (unit.arrays.exp_avg_sq == 4).all()
    unit.weights.fill_(1.0)
    one = 1 if unit.remainder is None else 0x3F80
    assert (unit.arrays.master[0] == one).all()


@given(
    bits=hnp.arrays(np.uint32, 15, elements=st.integers(0, 0x7F7F7FFF), fill=st.nothing()),
    signs=hnp.arrays(np.bool_, 15),
)
def test_split_master_holds_every_bit_of_float32(bits, signs):
    """Ties, denormals, signed zeros, values next to overflow: what is set is what is read."""
    value = torch.from_numpy((bits | (signs.astype(np.uint32) << 31)).view(np.float32)).view(3, 5)
    state = ModelState([LAYOUT], "bfloat16")
    (unit,) = state.units
    unit.set_master(W, value)
    found = unit.master(W)
    assert torch.equal(found.view(torch.int32), value.view(torch.int32))
    # hi is the value rounded to nearest, ties away from zero.
    hi = unit.weights[W.slice].float().view(3, 5)
    spacing = torch.from_numpy(np.spacing(value.abs().numpy())).double() * 2**16
    assert bool(((hi.double() - value.double()).abs() <= spacing / 2).all())


def test_ties_round_away_from_zero():
    state = ModelState([LAYOUT], "bfloat16")
    (unit,) = state.units
    value = torch.full((3, 5), 1 + 2**-8)  # halfway between two bf16 values; to even is 1
    unit.set_master(W, value)
    assert bool((unit.weights[W.slice].float() == 1 + 2**-7).all())
    unit.set_master(W, -value)
    assert bool((unit.weights[W.slice].float() == -1 - 2**-7).all())


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sources_of_any_float_type(state, source):
    (unit,) = state.units
    value = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(source)
    unit.set_master(W, value)
    assert torch.equal(unit.master(W), value.float())
    unit.set_master(FROZEN, value.flatten()[:8].view(4, 2))
    expected = value.flatten()[:8].view(4, 2).float()
    if unit.weights.dtype == torch.bfloat16:
        expected = half_away(expected)
    assert torch.equal(unit.master(FROZEN), expected)


def test_bf16_source_leaves_no_remainder():
    """Also after other values were there."""
    state = ModelState([LAYOUT], "bfloat16")
    (unit,) = state.units
    unit.set_master(B, torch.full((7,), 1.001))
    assert unit.remainder[B.slice].any()
    unit.set_master(B, torch.full((7,), 1.5, dtype=torch.bfloat16))
    assert not unit.remainder[B.slice].any()


def test_setting_one_parameter_leaves_the_others(state):
    (unit,) = state.units
    unit.set_master(W, torch.ones(3, 5))
    unit.set_master(B, torch.full((7,), 2.0))
    assert bool((unit.master(W) == 1).all())
    assert bool((unit.master(FROZEN) == 0).all())
    inside = W.numel + B.numel
    assert int((unit.weights != 0).sum()) == inside  # alignment gaps stay zero


def test_masters_are_copies(state):
    (unit,) = state.units
    unit.set_master(W, torch.ones(3, 5))
    unit.master(W).zero_()
    assert bool((unit.master(W) == 1).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(state, value):
    (unit,) = state.units
    weights = torch.ones(3, 5)
    unit.set_master(W, weights)
    bad = weights.clone()
    bad[1, 2] = value
    with pytest.raises(DataError, match="w has NaN or infinite"):
        unit.set_master(W, bad)
    assert torch.equal(unit.master(W), weights)


def test_float64_beyond_float32_is_refused(state):
    (unit,) = state.units
    with pytest.raises(DataError, match="w has"):
        unit.set_master(W, torch.full((3, 5), 1e300, dtype=torch.float64))
    assert not unit.master(W).any()


def test_values_that_round_to_infinity_are_refused():
    state = ModelState([LAYOUT], "bfloat16")
    (unit,) = state.units
    unit.set_master(W, torch.full((3, 5), float(LARGEST_SPLIT)))
    for param, shape in ((W, (3, 5)), (FROZEN, (4, 2))):
        with pytest.raises(DataError, match=f"{param.name} has values that round to infinity"):
            unit.set_master(param, torch.full(shape, torch.finfo(torch.float32).max))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_quantised_or_integer_weights_are_refused(state, dtype):
    (unit,) = state.units
    with pytest.raises(DataError, match=f"w holds {dtype}"):
        unit.set_master(W, torch.ones(3, 5).to(dtype))
    assert not unit.master(W).any()


def test_wrong_shape_is_refused(state):
    (unit,) = state.units
    with pytest.raises(DataError, match=r"w has shape \(5, 3\), the model's is \(3, 5\)"):
        unit.set_master(W, torch.ones(5, 3))


def test_non_contiguous_sources(state):
    (unit,) = state.units
    value = torch.arange(15.0).view(5, 3).T
    unit.set_master(W, value)
    assert torch.equal(unit.master(W), value)


def test_pinning_fails_or_the_kernel_kills_the_process(monkeypatch):
    """Pitfall 14. A state that does not fit is refused before anything is touched, with sizes."""
    monkeypatch.setenv("HEADRACE_HOST_MEMORY", "1GiB")
    spec = ModelSpec(tiny_config(vocab_size=20_000_000))
    with pytest.raises(CapacityError, match="GiB"):
        ModelState(spec.units, "bfloat16")
