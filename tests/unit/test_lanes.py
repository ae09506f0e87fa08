"""Lanes: in order, after what they wait for, and never silent or stuck."""

import threading
import time
import weakref

import pytest
import torch

from headrace.engine.lanes import Lane, Mark
from headrace.errors import LaneError, NumericsError
from tiny import make_batches, make_engine, tiny_config, tiny_state

CPU = torch.device("cpu")


@pytest.fixture
def make_lane():
    lanes = []

    def make(name="test", *, timeout_seconds=5.0, jitter=None):
        lane = Lane(name, CPU, timeout_seconds=timeout_seconds, jitter=jitter)
        lanes.append(lane)
        return lane

    yield make
    for lane in lanes:
        lane.timeout_seconds = 5.0
        lane.close()
        assert not lane._thread.is_alive()


def test_jobs_run_in_order(make_lane):
    delays = iter([0.003, 0.0, 0.002, 0.0, 0.001] * 4)
    lane = make_lane(jitter=lambda: next(delays))
    done = []
    tickets = [lane.submit(lambda i=i: done.append(i)) for i in range(20)]
    tickets[-1].synchronize()
    assert done == list(range(20))


def test_jobs_run_beside_the_caller(make_lane):
    names = []
    make_lane("h2d").submit(lambda: names.append(threading.current_thread().name)).synchronize()
    assert names == ["headrace-h2d"]


def test_a_job_starts_after_what_it_waits_for(make_lane):
    first, second = make_lane("first"), make_lane("second")
    gate, done = threading.Event(), []

    def wait():
        assert gate.wait(5)
        done.append("first")

    before = first.submit(wait)
    after = second.submit(lambda: done.append("second"), [before, None, Mark.here(CPU)])
    time.sleep(0.02)
    assert done == []
    gate.set()
    after.synchronize()
    assert done == ["first", "second"]


def test_no_job_builds_a_graph(make_lane):
    weight = torch.ones(2, requires_grad=True)
    results = []
    make_lane().submit(lambda: results.append(weight * 2)).synchronize()
    assert not results[0].requires_grad


def test_time_of_waiting_is_not_time_of_work(make_lane):
    lane = make_lane()
    ticket = lane.submit(lambda: None)
    ticket.synchronize()
    assert ticket.work_started <= time.perf_counter()


@pytest.mark.parametrize("wait", ["synchronize", "wait_on_stream"])
def test_exception_reaches_the_caller(make_lane, wait):
    def fail():
        raise ValueError("boom")

    lane = make_lane("d2h")
    with pytest.raises(LaneError, match="d2h lane failed: ValueError: boom") as caught:
        getattr(lane.submit(fail), wait)()
    assert isinstance(caught.value.__cause__, ValueError)


def test_errors_of_headrace_keep_their_kind(make_lane):
    def fail():
        raise NumericsError("weights ran away", remedy="lower learning_rate")

    ticket = make_lane().submit(fail)
    with pytest.raises(NumericsError, match="ran away"):
        ticket.synchronize()


def test_jobs_after_a_failure_are_dropped(make_lane):
    """They would work on what the failed one left; each of their waits raises."""
    lane = make_lane()
    done = []

    def fail():
        raise OSError("disk gone")

    first = lane.submit(lambda: done.append(1))
    lane.submit(fail)
    later = [lane.submit(lambda: done.append(2)) for _ in range(3)]
    first.synchronize()
    for ticket in later:
        with pytest.raises(LaneError, match="disk gone"):
            ticket.synchronize()
    with pytest.raises(LaneError, match="disk gone"):
        lane.submit(lambda: done.append(3)).synchronize()
    assert done == [1]


def test_failure_of_what_a_job_waits_for(make_lane):
    """It passes on from lane to lane."""

    def fail():
        raise OSError("disk gone")

    first, second = make_lane("first"), make_lane("second")
    done = []
    ticket = second.submit(lambda: done.append(1), [first.submit(fail)])
    with pytest.raises(LaneError, match="first lane failed"):
        ticket.synchronize()
    assert done == []


def test_nothing_waits_without_a_bound(make_lane):
    lane = make_lane(timeout_seconds=0.05)
    gate = threading.Event()
    ticket = lane.submit(lambda: gate.wait(5))
    started = time.perf_counter()
    with pytest.raises(LaneError, match="test lane did not finish within"):
        ticket.synchronize()
    assert 0.04 < time.perf_counter() - started < 4
    gate.set()


def test_close_finishes_what_was_queued():
    lane = Lane("test", CPU, timeout_seconds=5.0)
    done = []
    for number in range(5):
        lane.submit(lambda number=number: done.append(number))
    lane.close()
    assert done == [0, 1, 2, 3, 4]
    assert not lane._thread.is_alive()


def test_close_of_a_stuck_lane_is_bounded():
    gate = threading.Event()
    lane = Lane("test", CPU, timeout_seconds=0.05)
    lane.submit(lambda: gate.wait(5))
    started = time.perf_counter()
    lane.close()
    assert time.perf_counter() - started < 4
    gate.set()
    lane._thread.join(5)


def test_finished_jobs_let_go_of_their_buffers(make_lane):
    """A closure kept by an idle lane would keep its tensors."""

    class Buffer:
        def use(self):
            pass

    lane, buffer = make_lane(), Buffer()
    gone = weakref.ref(buffer)
    ticket = lane.submit(lambda buffer=buffer: buffer.use())
    ticket.synchronize()
    del buffer
    deadline = time.perf_counter() + 5
    while gone() is not None and time.perf_counter() < deadline:
        time.sleep(0.001)
    assert gone() is None


# -- in the engine -------------------------------------------------------------------------


def failing(*_args, **_kwargs):
    raise OSError("link down")


def two_steps(engine):
    """A deferred update that failed shows at the next use of its unit."""
    for _ in range(2):
        engine.step(make_batches(1), learning_rate=1e-3, max_grad_norm=1.0)


@pytest.mark.parametrize("lane", ["h2d", "d2h", "update"])
def test_failed_lane_stops_the_step(lane, monkeypatch):
    """An exception in any lane reaches the user as what it is, and the engine still closes."""
    spec, state = tiny_state(tiny_config())
    with make_engine(spec, state, lane_timeout_seconds=20.0) as engine:
        engine.step(make_batches(1), learning_rate=1e-3, max_grad_norm=1.0)
        lanes = {
            "h2d": engine._windows._h2d,
            "d2h": engine.updater._d2h,
            "update": engine.updater._update,
        }
        monkeypatch.setattr(lanes[lane], "_delay", failing)
        started = time.perf_counter()
        with pytest.raises(LaneError, match=f"{lane} lane failed: OSError: link down"):
            two_steps(engine)
        assert time.perf_counter() - started < 10
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-")]


def test_stuck_lane_stops_the_step():
    spec, state = tiny_state(tiny_config())
    gate = threading.Event()
    engine = make_engine(spec, state, lane_timeout_seconds=0.2)
    engine._windows._h2d._jitter = lambda: gate.wait(10) and 0.0
    with pytest.raises(LaneError, match="h2d lane did not finish"):
        engine.step(make_batches(1), learning_rate=1e-3)
    gate.set()
    engine.close()


@pytest.mark.parametrize("name", ["h2d", "update", "d2h"])
def test_exposed_time_is_accounted_to_a_lane(name, monkeypatch):
    """Slow transfers show as h2d or d2h, slow updates as update: what there is to improve."""
    spec, state = tiny_state(tiny_config())
    with make_engine(spec, state) as engine:
        updater = engine.updater
        lane = {"h2d": engine._windows._h2d, "update": updater._update, "d2h": updater._d2h}[name]
        submit = lane.submit

        def slowly(work, after=(), **more):
            return submit(lambda: (time.sleep(0.01), work()), after, **more)

        monkeypatch.setattr(lane, "submit", slowly)
        for _ in range(2):
            result = engine.step(make_batches(1), learning_rate=1e-3, max_grad_norm=1.0)
    exposed = result.exposed_seconds
    assert exposed.keys() == {"h2d", "update", "d2h", "offload"}
    assert exposed[name] > 0.02
    assert exposed[name] == max(exposed.values())
