"""What a time of device work is a time of: calls that do not count, means, the shortest."""

import time

import pytest
import torch

from headrace.policy.timing import Timer


class Work:
    """Sleeps for each of ``seconds`` in turn, then for the last one."""

    def __init__(self, *seconds):
        self.left = list(seconds)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        time.sleep(self.left.pop(0) if len(self.left) > 1 else self.left[0])


@pytest.fixture
def timer():
    return Timer(torch.device("cpu"))


def test_the_first_call_does_not_count(timer):
    work = Work(0.3, 0.01)
    assert 0.01 <= timer.mean(work, 4) < 0.06
    assert work.calls == 5


def test_the_best_is_of_one_call(timer):
    assert 0.005 <= timer.best(Work(0.2, 0.2, 0.005, 0.2), 3) < 0.1


def test_a_rate_leaves_out_the_first_third(timer):
    """Slow calls at the beginning, as of a card that is still to be filled."""
    assert timer.rate(Work(0.1, 0.1, 0.02), 0.6) > 0.5 / 0.02 / 2
