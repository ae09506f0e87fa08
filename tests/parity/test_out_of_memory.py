"""A device that runs out of memory in step k: tried again once, exactly, or the reason."""

import gc

import pytest
import torch

from headrace.engine.passes import Passes
from headrace.engine.slots import KeptGraph
from headrace.errors import CapacityError
from headrace.trainer.failures import step_with_retry
from tiny import differing, make_batches, make_engine, planes, tiny_config, tiny_state

LR = 1e-2


def run_out(monkeypatch, name, call):
    """The ``call``-th call of a pass from now on finds no memory."""
    original = getattr(Passes, name)
    calls = []

    def failing(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\ndetails")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Passes, name, failing)


def retried(engine, batches, said, *, max_grad_norm=0.5):
    return step_with_retry(
        engine, batches, learning_rate=LR, max_grad_norm=max_grad_norm, say=said.append
    )


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("embed", 2), ("layer_forward", 1), ("layer_forward", 8), ("head_forward_backward", 3),
        ("layer_backward", 1), ("layer_backward", 12), ("embed_backward", 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_the_retry_is_the_step_with_smaller_waves(monkeypatch, place, call, activations):
    """Wherever it fails: bitwise what an engine with those waves does from that step on."""
    config = tiny_config("llama", tied=True)
    settings = {"poison_slots": True, "lane_jitter_seconds": 0.001, "activations": activations}
    spec, state = tiny_state(config, "bfloat16")
    _, expected = tiny_state(config, "bfloat16")
    said = []
    with make_engine(spec, state, **settings) as engine:
        retried(engine, make_batches(4, seed=0), said)
        with monkeypatch.context() as patch:
            run_out(patch, place, call)
            first = retried(engine, make_batches(4, seed=1), said)
        retried(engine, make_batches(4, seed=2), said)
        engine.synchronize()
    assert len(said) == 1
    assert "micro_batches_per_wave: 2" in said[0]
    assert "Tried to allocate 1 GiB." in said[0]
    with make_engine(spec, expected, **settings) as engine:
        retried(engine, make_batches(4, seed=0), said)
        engine.synchronize()
    with make_engine(spec, expected, micro_batches_per_wave=2, **settings) as engine:
        result = retried(engine, make_batches(4, seed=1), said)
        retried(engine, make_batches(4, seed=2), said)
        engine.synchronize()
    assert first.loss == result.loss
    assert differing(planes(state), planes(expected)) == []


def kept_graphs():
    gc.collect()
    return [kept for kept in gc.get_objects() if type(kept) is KeptGraph]


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_what_the_failed_step_kept_is_free_before_the_retry(monkeypatch, activations):
    """Its graphs hold most of the memory that ran out."""
    spec, state = tiny_state(tiny_config("llama"), "bfloat16")
    alive = []
    before = kept_graphs()  # of other tests
    with make_engine(spec, state, activations=activations) as engine:
        run_out(monkeypatch, "layer_backward", 3)
        shrink = engine.shrink_waves

        def look(num_micro_batches):
            alive.append([kept for kept in kept_graphs() if not any(kept is b for b in before)])
            return shrink(num_micro_batches)

        monkeypatch.setattr(engine, "shrink_waves", look)
        retried(engine, make_batches(4), [])
    assert alive == [[]]


def test_no_retry_where_updates_came_early(monkeypatch):
    """Without clipping, units are updated as their gradients land: it could not be exact."""
    spec, state = tiny_state(tiny_config("llama"), "bfloat16")
    with make_engine(spec, state) as engine:
        for seed in range(11):  # gates open after ten steps
            retried(engine, make_batches(2, seed=seed), [], max_grad_norm=None)
        run_out(monkeypatch, "embed_backward", 1)
        with pytest.raises(CapacityError, match="update 12, which cannot be tried again"):
            retried(engine, make_batches(2, seed=11), [], max_grad_norm=None)


def test_a_second_failure_ends_the_run(monkeypatch):
    spec, state = tiny_state(tiny_config("llama"), "bfloat16")
    before = planes(state)
    said = []
    with make_engine(spec, state) as engine:

        def failing(*_args, **_kwargs):
            raise torch.OutOfMemoryError("none left")

        monkeypatch.setattr(Passes, "layer_backward", failing)
        with pytest.raises(CapacityError, match=r"also with engine\.micro_batches_per_wave: 1"):
            retried(engine, make_batches(2), said)
        with pytest.raises(CapacityError, match="cannot be tried again: none left") as raised:
            retried(engine, make_batches(2), said)
        assert "engine.activations: recompute" in str(raised.value)
        engine.synchronize()
    assert len(said) == 1
    assert differing(planes(state), before) == []


def test_host_memory_that_runs_out_names_what_to_change(monkeypatch):
    spec, state = tiny_state(tiny_config("llama"), "bfloat16")
    with make_engine(spec, state) as engine:
        for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):

            def failing(*_args, error=error, **_kwargs):
                raise error

            monkeypatch.setattr(Passes, "layer_forward", failing)
            with pytest.raises(CapacityError, match="host memory ran out in update 1"):
                retried(engine, make_batches(2), [])
        monkeypatch.setattr(
            Passes, "layer_forward", lambda *_a, **_k: (_ for _ in ()).throw(RuntimeError("other"))
        )
        with pytest.raises(RuntimeError, match="other"):
            retried(engine, make_batches(2), [])
