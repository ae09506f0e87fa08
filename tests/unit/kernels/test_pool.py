"""The pool of threads: bounded, shared by callers in turn, honest after a fork and a close."""

from __future__ import annotations

import os
import threading
import warnings

import numpy as np
import pytest

import planes

NUM = 5 * (1 << 16)


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_sizes_outside_the_bounds_are_refused(kernels, num_threads):
    with pytest.raises(ValueError, match="1 to 1024"):
        kernels.Pool(num_threads)


def test_callers_from_several_threads_are_served_in_turn(native_kernels):
    pool = native_kernels.Pool(3)
    grad = planes.make_grad(NUM, bfloat16=True, special=False)
    expected = planes.make_planes(NUM, split=True, special=False)
    states = [expected.copy() for _ in range(4)]
    for step in range(1, 6):
        assert expected.call(native_kernels, "adamw", grad, step=step)

    def work(state):
        for step in range(1, 6):
            assert state.call(native_kernels, "adamw", grad, step=step, pool=pool)

    threads = [threading.Thread(target=work, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    pool.close()
    assert all(state.same_bits(expected) for state in states)


def test_other_python_threads_run_during_a_call(native_kernels):
    """The GIL is released: a counter advances while one call (two loops over 8M) works."""
    num = 1 << 23
    state = planes.make_planes(num, split=True, special=False)
    grad = np.zeros(num, np.uint16)
    started, done = threading.Event(), threading.Event()
    ticks = []

    def count():
        started.set()
        while not done.is_set():
            ticks.append(None)
            done.wait(0.0002)

    thread = threading.Thread(target=count)
    thread.start()
    assert started.wait(timeout=60)
    before = len(ticks)
    assert state.call(native_kernels, "adamw", grad, step=1)
    during = len(ticks) - before
    done.set()
    thread.join(timeout=60)
    assert during > 3  # held, the GIL changes hands at most before, between and after the loops


def test_a_closed_pool_says_so(native_kernels):
    pool = native_kernels.Pool(2)
    pool.close()
    pool.close()
    state = planes.make_planes(10, split=True, special=False)
    with pytest.raises(RuntimeError, match="closed"):
        state.call(native_kernels, "adamw", np.zeros(10, np.uint16), step=1, pool=pool)


def test_a_forked_child_is_refused_instead_of_hanging(native_kernels):
    pool = native_kernels.Pool(3)
    state = planes.make_planes(NUM, split=True, special=False)
    grad = np.zeros(NUM, np.uint16)
    assert state.call(native_kernels, "adamw", grad, step=1, pool=pool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if child == 0:
        code = 1
        try:
            state.call(native_kernels, "adamw", grad, step=2, pool=pool)
        except RuntimeError as error:
            pool.close()
            del pool
            # A pool made here works.
            own = native_kernels.Pool(2)
            applied = state.call(native_kernels, "adamw", grad, step=2, pool=own)
            own.close()
            code = 0 if "forked" in str(error) and applied else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert state.call(native_kernels, "adamw", grad, step=2, pool=pool)  # the parent goes on
    pool.close()
