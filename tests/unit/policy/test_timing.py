"""What a time of device work is a time of: calls that do not count, means, the shortest."""

import pytest
import torch

from headrace.policy import timing


class Work:
    """Takes each of ``seconds`` in turn on the clock it keeps, then the last one for ever."""

    def __init__(self, *seconds):
        self.left = list(seconds)
        self.calls, self.now = 0, 0.0

    def __call__(self):
        self.calls += 1
        self.now += self.left.pop(0) if len(self.left) > 1 else self.left[0]


@pytest.fixture
def timed(monkeypatch):
    """A measure by its name, and work of so many seconds."""

    def by(name, seconds, count):
        work = Work(*seconds)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: work.now)
        return getattr(timing.Timer(torch.device("cpu")), name)(work, count), work.calls

    return by


def test_the_first_call_does_not_count(timed):
    assert timed("mean", (30.0, 1.0), 4) == (1.0, 5)


def test_the_best_is_of_one_call(timed):
    assert timed("best", (5.0, 9.0, 2.0, 9.0), 3) == (2.0, 4)


def test_a_rate_leaves_out_the_first_third(timed):
    """Slow calls at the beginning, as of a card that is still to be filled."""
    rate, calls = timed("rate", (9.0, 3.0, 3.0, 1.0), 30.0)
    assert (rate, calls) == (1.0, 1 + 2 + 24)
