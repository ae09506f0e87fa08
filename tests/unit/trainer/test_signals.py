"""Requests to stop: what a second signal means, whenever it comes."""

from __future__ import annotations

import signal

import pytest

from headrace.trainer import signals
from headrace.trainer.signals import BURST_SECONDS, StopNow, StopRequest


@pytest.fixture
def clock(monkeypatch):
    """The time, and what happens when somebody looks at it next."""

    class Clock:
        now = 1000.0
        then = None

        def __call__(self):
            happens, self.then = self.then, None
            if happens is not None:
                happens()
            return self.now

    clock = Clock()
    monkeypatch.setattr(signals.time, "monotonic", clock)
    return clock


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_inside_the_first_ones_handler_is_the_same_request(clock, again):
    with StopRequest() as stop:
        clock.then = lambda: signal.raise_signal(again)
        signal.raise_signal(signal.SIGTERM)
        assert stop.agreed()
        clock.now += 0.9 * BURST_SECONDS
        signal.raise_signal(signal.SIGINT)
        clock.now += 0.2 * BURST_SECONDS
        with pytest.raises(StopNow):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_while_ranks_exchange_requests_counts_from_the_next_exchange(clock):
    """The rank that got it must not stop a step before the others."""

    class Ranks:
        size = 2

        def table(self, values):
            signal.raise_signal(signal.SIGTERM)
            return [[0.0], [float(value) for value in values]]

    with StopRequest(requeue=True, ranks=Ranks()) as stop:
        assert not stop.agreed()
        assert stop.exit_code == 0
        assert stop.agreed()
        assert stop.exit_code == 75


def test_handlers_are_put_back(clock):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.agreed()
        assert stop.exit_code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
