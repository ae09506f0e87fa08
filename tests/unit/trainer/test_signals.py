"""Requests to stop: what a second signal means, whenever it comes."""

from __future__ import annotations

import signal

import pytest

from headrace.interrupts import BURST_SECONDS, Interrupts, Stopped, end_of
from headrace.trainer import signals
from headrace.trainer.signals import StopNow, StopRequest


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


def test_before_the_first_step_a_signal_ends_the_run_at_once(clock):
    """Once: what a launcher adds must not break into how the run is closed."""
    with StopRequest.before_the_first_step():
        with pytest.raises(Stopped, match="SIGTERM before the first step") as caught:
            signal.raise_signal(signal.SIGTERM)
        assert not isinstance(caught.value, StopNow)
        assert end_of(caught.value)[1] == 143
        signal.raise_signal(signal.SIGINT)
        clock.now += 1.1 * BURST_SECONDS
        with pytest.raises(StopNow):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_that_something_swallowed_stops_the_first_step(clock):
    with StopRequest.before_the_first_step() as stop:
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        stop.begin(requeue=True, quiet=True, ranks=None)
        assert stop.agreed()
        assert stop.exit_code == 75


def test_a_signal_does_not_break_into_an_error_that_is_told():
    """Other ranks would return its code, and nobody say it."""
    with StopRequest.before_the_first_step() as stop:
        with pytest.raises(ZeroDivisionError), stop.spares_errors():
            raise ZeroDivisionError
        signal.raise_signal(signal.SIGTERM)


def test_a_verb_is_interrupted_once_by_what_is_sent_twice(clock):
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Interrupts():
            with pytest.raises(Stopped) as caught:
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            clock.now += 1.1 * BURST_SECONDS
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGTERM)
        assert end_of(caught.value) == ("stopped by SIGTERM", 143)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with Interrupts():  # what is ignored, as under nohup, stays so
            signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with Interrupts():
            Interrupts.spare_the_error()
            signal.raise_signal(signal.SIGTERM)  # a launcher's, as another rank has ended
            clock.now += 1.1 * BURST_SECONDS
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGTERM)
        Interrupts.spare_the_error()  # nobody's
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_are_put_back(clock):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.agreed()
        assert stop.exit_code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
