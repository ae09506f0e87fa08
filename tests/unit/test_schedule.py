"""The plan of a step: every use finds its layer, no slot is refilled too early, little is sent."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.schedule import fetches_after, plan_uses, split_waves

layers = st.integers(0, 9)
waves = st.integers(1, 4)
slots = st.integers(2, 12)


def expected_order(num_layers, num_waves, *, backward):
    order = []
    for wave in range(num_waves):
        order += [(layer, wave, "forward") for layer in range(num_layers)]
        if backward:
            order += [(layer, wave, "backward") for layer in reversed(range(num_layers))]
    return order


@given(layers, waves, slots, st.booleans(), st.booleans())
def test_every_use_finds_its_layer(num_layers, num_waves, num_slots, backward, reuse):
    plan = plan_uses(num_layers, num_waves, num_slots, backward=backward, reuse=reuse)
    found = [(use.layer, use.wave, use.phase) for use in plan]
    assert found == expected_order(num_layers, num_waves, backward=backward)
    held = {}
    for use in plan:
        assert 0 <= use.slot < num_slots
        if use.fetch:
            held[use.slot] = use.layer
        assert held[use.slot] == use.layer
    if not reuse:
        assert all(use.fetch for use in plan)


@given(layers, waves, slots, st.integers(0, 12), st.booleans())
def test_backward_ends_with_the_first_layer_that_needs_one(
    num_layers, num_waves, num_slots, first, reuse
):
    first = min(first, num_layers)
    plan = plan_uses(num_layers, num_waves, num_slots, first=first, reuse=reuse)
    backward = [(use.wave, use.layer) for use in plan if use.phase == "backward"]
    layers_of = reversed(range(first, num_layers))
    assert backward == list(itertools.product(range(num_waves), list(layers_of)))
    held = {}
    for use in plan:
        if use.fetch:
            held[use.slot] = use.layer
        assert held[use.slot] == use.layer


@given(layers, waves, slots, st.booleans(), st.booleans())
def test_no_slot_is_refilled_before_its_last_use(num_layers, num_waves, num_slots, backward, reuse):
    plan = plan_uses(num_layers, num_waves, num_slots, backward=backward, reuse=reuse)
    issue = fetches_after(plan)
    issued_after = {index: done for done, indices in issue.items() for index in indices}
    assert sorted(issued_after) == [index for index, use in enumerate(plan) if use.fetch]
    for index, use in enumerate(plan):
        if not use.fetch:
            continue
        users = [i for i in range(index) if plan[i].slot == use.slot]
        assert use.fetch_after == (users[-1] if users else -1)
        # The transfer starts after the slot's last reader, and before it is needed.
        assert use.fetch_after <= issued_after[index] < index


@given(layers, waves, slots, st.booleans(), st.booleans())
def test_fetches_are_issued_in_order_of_need(num_layers, num_waves, num_slots, backward, reuse):
    plan = plan_uses(num_layers, num_waves, num_slots, backward=backward, reuse=reuse)
    issue = fetches_after(plan)
    order = [index for done in sorted(issue) for index in issue[done]]
    assert order == sorted(order)


@given(st.integers(1, 9), waves, slots)
def test_a_layer_is_sent_at_most_once_a_pass(num_layers, num_waves, num_slots):
    """And less often with more slots: at the turns layers are used again as they lie there."""
    counts = [
        sum(use.fetch for use in plan_uses(num_layers, num_waves, number))
        for number in range(2, num_slots + 1)
    ]
    assert all(count <= 2 * num_layers * num_waves for count in counts)
    assert all(b <= a for a, b in itertools.pairwise(counts))
    if num_slots >= num_layers:
        assert counts[-1] == num_layers


@given(st.integers(1, 7), st.integers(1, 2), st.integers(2, 5))
def test_no_plan_sends_less(num_layers, num_waves, num_slots):
    """Against a search over all evictions (Belady's choice is optimal)."""
    order = [layer for layer, _, _ in expected_order(num_layers, num_waves, backward=True)]
    states = {frozenset(): 0}
    for layer in order:
        following = {}
        for held, cost in states.items():
            if layer in held:
                options = [(held, cost)]
            elif len(held) < num_slots:
                options = [(held | {layer}, cost + 1)]
            else:
                options = [(held - {victim} | {layer}, cost + 1) for victim in held]
            for state, total in options:
                following[state] = min(total, following.get(state, total))
        states = following
    plan = plan_uses(num_layers, num_waves, num_slots)
    assert sum(use.fetch for use in plan) == min(states.values())


def test_turn_from_forward_to_backward_sends_nothing():
    plan = plan_uses(6, 1, 3)
    sent = [use.layer for use in plan if use.fetch]
    # Forward sends all; backward finds the last ones and sends the rest, in reverse.
    assert sent[:6] == [0, 1, 2, 3, 4, 5]
    assert sorted(sent[6:], reverse=True) == sent[6:]
    assert len(sent) == 6 + 6 - 3


def test_look_ahead_without_reuse():
    """Checks with poisoned slots send every time, and still send one layer ahead."""
    plan = plan_uses(5, 1, 2, reuse=False)
    assert [use.slot for use in plan] == [0, 1] * 5
    issue = fetches_after(plan)
    assert issue[-1] == [0, 1]
    assert all(issue[done] == [done + 2] for done in range(8))


def test_forward_only():
    plan = plan_uses(4, 2, 3, backward=False)
    assert {use.phase for use in plan} == {"forward"}
    assert len(plan) == 8


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 12)))
def test_waves_are_consecutive_and_complete(num_micro_batches, per_wave):
    found = split_waves(num_micro_batches, per_wave)
    assert [m for wave in found for m in wave] == list(range(num_micro_batches))
    size = per_wave or num_micro_batches
    assert all(len(wave) == size for wave in found[:-1])
    assert 1 <= len(found[-1]) <= size


@pytest.mark.parametrize("num_layers", [0, 1])
def test_smallest_models(num_layers):
    plan = plan_uses(num_layers, 1, 2)
    assert len(plan) == 2 * num_layers
    assert sum(use.fetch for use in plan) == num_layers
    assert fetches_after(plan) == ({-1: [0]} if num_layers else {})
