"""Work spread over threads: order, errors, limits of BLAS, and figures that never notice."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from array_targets import ArrayTargets
from headrace.audit import threads
from headrace.audit.folds import purged_plan
from headrace.audit.gram import GramBook
from headrace.audit.published_draws import solve_weighted
from headrace.audit.regress import nested_ridge
from headrace.audit.splits import LabelTimes
from headrace.audit.threads import single_blas, spread


@pytest.fixture(params=[1, 3])
def workers(request, monkeypatch):
    """So many cores, and pieces of any width are worth one."""
    monkeypatch.setattr(threads, "num_workers", lambda: request.param)
    monkeypatch.setattr(threads, "_WIDE", 1)
    return request.param


def blas_counts():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_results_come_in_the_order_of_the_pieces(workers):
    def slow_first(piece):
        time.sleep(0.02 if piece == 0 else 0)
        return piece * piece

    found = list(spread(slow_first, range(20), dimension=8))
    assert found == [k * k for k in range(20)]


def test_pieces_meet_one_blas_thread_each_and_the_limit_is_put_back(workers):
    before = blas_counts()

    def count(_):
        with single_blas():  # as a measurement inside a piece does: must not lift the limit
            pass
        time.sleep(0.005)
        return blas_counts()

    with single_blas():
        assert all(counts == {1} for counts in spread(count, range(12), dimension=8))
    assert blas_counts() == before


def test_work_inside_a_piece_starts_no_threads_of_its_own(workers):
    def outer(_):
        here = threading.get_ident()
        return all(spread(lambda _: threading.get_ident() == here, range(4), dimension=8))

    assert all(spread(outer, range(4), dimension=8))


def test_an_error_in_a_piece_reaches_the_caller(workers):
    done = []

    def work(piece):
        if piece == 2:
            raise ValueError("piece 2")
        done.append(piece)

    with pytest.raises(ValueError, match="piece 2"):
        list(spread(work, range(500), dimension=8))
    assert len(done) < 500


def test_few_results_wait_for_a_slow_consumer(workers):
    started = []
    results = spread(started.append, range(100), dimension=8)
    next(results)
    time.sleep(0.05)
    assert len(started) <= 2 * workers + 1
    results.close()


def test_narrow_work_stays_in_the_calling_thread():
    here = threading.get_ident()
    assert all(spread(lambda _: threading.get_ident() == here, range(8), dimension=64))


def fitted(num_rows, dimension):
    rng = np.random.default_rng(3)
    dates = np.datetime64("2020-01-01") + np.sort(rng.integers(0, 200, num_rows))
    times = LabelTimes(dates, dates, dates)
    plan = purged_plan(times, num_splits=5, embargo=1)
    values = rng.standard_normal((num_rows, dimension))
    targets = values[:, :1] * 0.3 + rng.standard_normal((num_rows, 7))
    parts = []
    nested_ridge(
        GramBook(values),
        ArrayTargets(targets),
        folds=plan.folds,
        windows=plan.windows,
        consume=lambda p: parts.append((p.fold, p.deviation, p.penalty)),
    )
    return parts


@pytest.mark.parametrize(("num_rows", "dimension"), [(600, 40), (90, 120)])
def test_figures_are_the_same_bits_on_any_number_of_cores(monkeypatch, num_rows, dimension):
    monkeypatch.setattr(threads, "_WIDE", 1)
    found = []
    for count in (1, 2, 5):
        monkeypatch.setattr(threads, "num_workers", lambda count=count: count)
        with single_blas():
            found.append(fitted(num_rows, dimension))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one[0] == two[0]
            assert np.array_equal(one[1], two[1])
            assert np.array_equal(one[2], two[2])


def test_refits_are_the_same_bits_on_any_number_of_cores(monkeypatch):
    monkeypatch.setattr(threads, "_WIDE", 1)
    rng = np.random.default_rng(0)
    values, entity = rng.standard_normal((400, 12)), np.repeat(np.arange(20), 20)
    weights = rng.integers(0, 4, (20, 300)).astype(float)
    found = []
    for count in (1, 4):
        monkeypatch.setattr(threads, "num_workers", lambda count=count: count)
        with single_blas():
            found.append(solve_weighted(values, values[:, 0], entity, weights, alpha=1.0))
    assert np.array_equal(found[0].coefficients_PS, found[1].coefficients_PS)
    assert found[0].converged_S.all()
