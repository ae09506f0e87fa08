"""Layouts: aligned, complete, without overlap, and a function of names and shapes alone."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from headrace.store.layout import (
    ALIGNMENT,
    ParamSpec,
    align,
    plan_segments,
    plan_unit,
    split_range,
)
from headrace.store.ranges import norm_grids

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
params = st.lists(st.tuples(shapes, st.booleans()), min_size=0, max_size=12).map(
    lambda items: [(f"m.p{i}", f"p{i}", shape, on) for i, (shape, on) in enumerate(items)]
)


@given(params)
def test_every_parameter_once_aligned_and_apart(given_params):
    layout = plan_unit("unit", given_params)
    assert {(p.name, p.local_name, p.shape, p.trainable) for p in layout.params} == set(
        given_params
    )
    assert len(layout.params) == len(given_params)
    assert all(p.offset % ALIGNMENT == 0 for p in layout.params)
    assert layout.size % ALIGNMENT == 0
    for before, after in itertools.pairwise(layout.params):
        assert before.slice.stop <= after.slice.start < before.slice.stop + ALIGNMENT
    if layout.params:
        assert layout.params[0].offset == 0
        assert layout.size == align(layout.params[-1].slice.stop)
    total = sum(math.prod(shape) for _, _, shape, _ in given_params)
    assert layout.num_parameters == total
    trained = sum(math.prod(shape) for _, _, shape, on in given_params if on)
    assert layout.num_trainable_parameters == trained


@given(params)
def test_trainable_parameters_come_first(given_params):
    layout = plan_unit("unit", given_params)
    assert all(p.trainable == (p.offset < layout.num_trainable) for p in layout.params)
    assert layout.num_trainable % ALIGNMENT == 0


@given(params, st.randoms())
def test_alignment_in_bytes(given_params, random):
    """256 bytes in the slot, for 2 bytes an element and therefore for 4."""
    random.shuffle(given_params)
    layout = plan_unit("unit", given_params)
    assert all(2 * p.offset % 256 == 0 for p in layout.params)


@given(params, st.integers(1, 5))
def test_segments_cover_the_trainable_range(given_params, num_groups):
    layout = plan_unit("unit", given_params)

    def group_of(param: ParamSpec):
        return hash(param.name) % num_groups

    segments = plan_segments(layout, group_of, norm_grids(layout))
    ends = [0, *(segment.stop for segment in segments)]
    assert [segment.start for segment in segments] == ends[:-1]
    assert ends[-1] == layout.num_trainable
    assert all(a.group != b.group for a, b in itertools.pairwise(segments))
    for param in layout.params:
        if param.trainable:
            (segment,) = (s for s in segments if s.start <= param.offset < s.stop)
            assert segment.group == group_of(param)
            assert param.slice.stop <= segment.stop


def test_matrices_and_vectors_form_two_ranges():
    """Weight decay differs between them: two calls of the update a unit, not one a parameter."""
    layout = plan_unit(
        "unit",
        [
            ("a.weight", "a.weight", (8, 16), True),
            ("norm.weight", "norm.weight", (16,), True),
            ("b.weight", "b.weight", (3, 5), True),
            ("b.bias", "b.bias", (3,), True),
        ],
    )
    segments = plan_segments(layout, lambda param: len(param.shape) >= 2, norm_grids(layout))
    assert [segment.group for segment in segments] == [True, False]


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 100))
def test_split_range_cuts_at_multiples(start, length, chunk):
    stop = start + length
    pieces = split_range(start, stop, chunk)
    assert [index for a, b in pieces for index in range(a, b)] == list(range(start, stop))
    assert all(b % chunk == 0 for _, b in pieces[:-1])
    assert all(0 < b - a <= chunk for a, b in pieces)
