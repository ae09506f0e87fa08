"""Compiled functions: what is counted, what falls back, what is raised."""

import functools
import logging
import shutil

import pytest
import torch
from torch._dynamo import register_backend
from torch._dynamo.utils import counters

from headrace.models.compiling import Compiler


def twice(x, options):
    return sum((2.0 * option for option in options.values()), torch.zeros_like(x))


def shifted(offset, x):
    return x + offset


def graph_breaks(x):
    print("no graph can print")
    return x + 1.0


def raises(x):
    raise ValueError("a bug")


def out_of_memory(graph, inputs):
    raise torch.OutOfMemoryError("no room to compile")


register_backend(out_of_memory, name="test_out_of_memory")


@pytest.fixture
def compiler():
    return Compiler("eager")


def test_shapes_beyond_the_limit_run_eagerly_and_say_so(compiler, caplog):
    call = compiler.compile(twice, "doubled")
    limit = torch._dynamo.config.recompile_limit
    with caplog.at_level(logging.WARNING):
        for size in range(2, limit + 4):
            x = torch.ones(size)
            assert torch.equal(call(x, {"double": x}), 2.0 * x)
    counts = compiler.counts
    assert counts.row() == {"graphs": limit, "recompilations": limit - 1, "eager_calls": 2}
    (reason,) = counts.eager_calls
    assert "packing" in reason
    said = [r.getMessage() for r in caplog.records if r.name == "headrace.models.compiling"]
    assert len(said) == 1
    assert "doubled" in said[0]
    x = torch.ones(2)
    call(x, {"double": x})  # has a graph
    assert counts.row()["eager_calls"] == 2


def test_another_way_of_calling_is_no_recompilation(compiler):
    call = compiler.compile(twice, "doubled")
    x = torch.ones(3)
    call(x, {"double": x})
    with torch.no_grad():
        call(x, {"double": x})
    call(x, {"double": x, "packed": x})
    assert compiler.counts.row() == {"graphs": 3, "recompilations": 0, "eager_calls": 0}


def test_functions_do_not_share_the_limit(compiler):
    """One function of this module, compiled for many owners."""
    for size in range(2, 2 + 2 * torch._dynamo.config.recompile_limit):
        compiler.compile(functools.partial(shifted, 1.0), "shifted")(torch.ones(size))
    assert compiler.counts.row()["eager_calls"] == 0


def test_what_no_graph_can_do_runs_what_was_given_for_it(compiler, capsys):
    call = compiler.compile(graph_breaks, "printing", eager=lambda x: x + 1.0)
    for _ in range(2):
        assert call(torch.zeros(())) == 1.0
    assert capsys.readouterr().out == ""
    assert sum(compiler.counts.eager_calls.values()) == 2
    assert compiler.counts.graphs == 0


def test_another_compiled_function_may_stand_in_and_counts_for_itself(compiler, caplog):
    other = compiler.compile(functools.partial(shifted, 1.0), "other")
    call = compiler.compile(graph_breaks, "printing", eager=other)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert call(torch.zeros(())) == 1.0
    assert compiler.counts.row() == {"graphs": 1, "recompilations": 0, "eager_calls": 0}
    said = [r.getMessage() for r in caplog.records if r.name == "headrace.models.compiling"]
    assert len(said) == 1
    assert said[0].startswith("printing runs as other, which is slower")


def test_no_memory_to_compile_is_no_reason_to_run_eagerly():
    """The trainer tries such a step again with smaller waves."""
    compiler = Compiler("test_out_of_memory")
    with pytest.raises(torch.OutOfMemoryError):
        compiler.compile(twice, "doubled")(torch.ones(1), {"double": torch.ones(1)})
    assert not compiler.counts.eager_calls


def test_an_error_of_the_function_itself_is_raised(compiler):
    with pytest.raises(ValueError, match="a bug"):
        compiler.compile(raises, "raising")(torch.ones(1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_what_was_compiled_is_found_on_the_disk_again(tmp_path, monkeypatch):
    """Nothing of ours keeps torch from remembering compiled graphs between runs."""
    from torch._inductor import config  # noqa: PLC0415 - slow, here alone

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.ones(8)
    for found in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
        torch._dynamo.reset()
        counters.clear()
        compiler = Compiler("inductor")
        with config.patch(compile_threads=1):  # a monkeypatch would take the setting away
            assert torch.equal(compiler.compile(twice, "doubled")(x, {"double": x}), 2.0 * x)
        assert counters["inductor"][found] == 1
        assert compiler.counts.row() == {"graphs": 1, "recompilations": 0, "eager_calls": 0}
