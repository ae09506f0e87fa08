"""Arrays that a compiled loop would misread are refused by name, before anything is stored."""

from __future__ import annotations

import numpy as np
import pytest

import planes

NUM = 100


def call(kernels, changes, **arguments):
    state = planes.make_planes(NUM, split=True, special=False)
    arrays = {
        "hi": state.hi, "lo": state.lo, "exp_avg": state.exp_avg,
        "exp_avg_sq": state.exp_avg_sq, "grad": np.zeros(NUM, np.uint16),
    }  # fmt: skip
    arrays |= {name: change(arrays) for name, change in changes.items()}
    before = [array.copy() for array in arrays.values() if isinstance(array, np.ndarray)]
    try:
        return kernels.adamw_split(**arrays, step=1, **planes.HYPERPARAMETERS, **arguments)
    finally:
        after = [array for array in arrays.values() if isinstance(array, np.ndarray)]
        assert all((a == b).all() for a, b in zip(before, after, strict=True))


def _read_only(arrays):
    array = arrays["exp_avg"].copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hi": lambda a: a["hi"].view(np.int16)}, TypeError, "hi holds int16.*uint16"),
        ({"lo": lambda a: a["lo"].view(np.uint16)}, TypeError, "lo holds uint16.*int16"),
        ({"grad": lambda _: np.zeros(NUM)}, TypeError, "grad holds float64.*uint16 or float32"),
        ({"grad": lambda _: np.zeros(NUM, ">f4")}, TypeError, "grad holds >f4"),
        ({"grad": lambda _: [0.0] * NUM}, TypeError, "grad is a list"),
        ({"exp_avg": lambda a: a["exp_avg"][:-1]}, ValueError, "has 99 elements and|has 100"),
        ({"grad": lambda _: np.zeros(2 * NUM, np.uint16)[::2]}, ValueError, "grad.*strides"),
        ({"grad": lambda _: np.zeros((NUM, 1), np.uint16)}, ValueError, "grad has shape"),
        ({"exp_avg": _read_only}, ValueError, "exp_avg is read-only"),
        ({"exp_avg_sq": lambda a: a["exp_avg"]}, ValueError, "overlap"),
        ({"grad": lambda a: a["hi"]}, ValueError, "overlap"),
        (
            {"exp_avg": lambda _: np.zeros(4 * NUM + 1, np.uint8)[1:].view(np.float32)},
            ValueError,
            "exp_avg does not start at a multiple of 4",
        ),
    ],
)
def test_unusable_arrays_are_refused_by_name(kernels, changes, error, message):
    with pytest.raises(error, match=message):
        call(kernels, changes)


def test_a_read_only_gradient_is_fine(kernels):
    def read_only(arrays):
        arrays["grad"].flags.writeable = False
        return arrays["grad"]

    state = planes.make_planes(NUM, split=True, special=False)
    grad = read_only({"grad": np.zeros(NUM, np.uint16)})
    assert state.call(kernels, "adamw", grad, step=1)


def test_no_elements_is_no_work(kernels):
    state = planes.make_planes(0, split=True)
    assert state.call(kernels, "adamw", np.zeros(0, np.float32), step=1)


def test_a_misspelt_setting_is_an_error(kernels):
    with pytest.raises(TypeError):
        call(kernels, {}, scale=0.5)


def test_touch_reaches_every_page(kernels):
    data = np.full(10 * 4096 + 7, 255, np.uint8)
    kernels.touch(data)
    assert (data[::4096] == 0).all()
