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
        assert stop
        clock.now += 0.9 * BURST_SECONDS
        signal.raise_signal(signal.SIGINT)
        clock.now += 0.2 * BURST_SECONDS
        with pytest.raises(StopNow):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back(clock):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        stop.set(signal.SIGTERM)
        assert stop.exit_code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
