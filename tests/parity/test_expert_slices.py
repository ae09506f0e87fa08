"""Layers whose experts are sent in slices: the same step, in windows that hold less."""

import re
import time

import pytest
import torch
from transformers import AutoConfig

from headrace.engine import AdamWConfig
from headrace.engine.update import Updater
from headrace.errors import ConfigError
from headrace.models.slices import ExpertsStub, SliceOfExperts, plan_sections
from headrace.models.spec import ModelSpec
from headrace.selftest.checks import relative_errors, streamed_gradients
from headrace.selftest.reference import reference_gradients, reference_model
from headrace.selftest.twin import filled_state, make_batches
from headrace.store.state import ModelState
from headrace.trainer.failures import step_with_retry
from tiny import EXPERT_SIZES, differing, make_engine, planes, returned_gradients, tiny_config

SIZES = EXPERT_SIZES | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
OF_FAMILY = {
    "qwen3_moe": {"head_dim": 16, "mlp_only_layers": [0]},
    "mixtral": {"head_dim": 16, "sliding_window": 5},
    "olmoe": {},
    "gpt_oss": {"head_dim": 16, "sliding_window": 5, "rope_parameters": None},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def model_of(family, dtype="float32", *, trainable=None, device_units=0, **values):
    config = AutoConfig.for_model(family, **SIZES | OF_FAMILY[family] | values)
    spec = ModelSpec(config, trainable=trainable)
    state = filled_state(spec)
    if dtype != "float32" or device_units:
        other = ModelState(spec.units, dtype, device_units=device_units)
        for before, after in zip(state.units, other.units, strict=True):
            for param in before.layout.params:
                after.set_master(param, before.master(param))
        state = other
    return spec, state


def train(family, *, steps=3, dtype="float32", max_grad_norm=None, values=None, **settings):
    """Results and final bits of a few steps of three micro-batches."""
    units = settings.get("device_units", 0)
    spec, state = model_of(family, dtype, device_units=units, **values or {})
    optimizer = AdamWConfig(weight_decay=0.1)
    with make_engine(spec, state, optimizer=optimizer, **settings) as engine:
        results = [
            engine.step(
                make_batches(3, seed=seed, cuts=(4, 11)),
                learning_rate=1e-2,
                max_grad_norm=max_grad_norm,
            )
            for seed in range(steps)
        ]
        engine.synchronize()
    return results, planes(state)


@pytest.mark.parametrize("family", OF_FAMILY)
def test_gradients_of_sliced_layers(family):
    """Every parameter against plain autograd; slots poisoned, several micro-batches and waves."""
    spec, state = model_of(family, **({} if family == "deepseek_v3" else BALANCED))
    assert len(spec.experts) == {"qwen3_moe": 2, "deepseek_v3": 2}.get(family, 3)
    for cuts in ((), (4, 11)):
        batches = make_batches(3, cuts=cuts)
        wanted_loss, wanted = reference_gradients(reference_model(spec, state), batches)
        for slices, per_wave, activations in (
            (2, None, "keep"),
            (3, 2, "recompute"),
            (8, 1, "keep"),
        ):
            loss, found = streamed_gradients(
                spec,
                state,
                batches,
                expert_slices=slices,
                micro_batches_per_wave=per_wave,
                activations=activations,
            )
            assert loss == pytest.approx(wanted_loss, abs=2e-6)
            errors = relative_errors(found, wanted)
            assert max(errors.values()) <= 1e-5, max(errors, key=errors.get)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("mixtral", "float32"),
        ("olmoe", "float32"),
        ("qwen3_moe", "float32"),
        ("qwen3_moe", "bfloat16"),
    ],
)
def test_slices_keep_every_bit_where_a_token_has_two_experts(family, dtype):
    """A sum of two has one order."""
    results, bits = train(family, dtype=dtype, values=BALANCED, activations="recompute")
    for settings in (
        {"expert_slices": 3},
        {"expert_slices": 8, "weight_slots": 2, "gradient_slots": 1},
        {"expert_slices": 2, "micro_batches_per_wave": 1, "weight_slots": 5},
        {"expert_slices": 4, "update_order": "weights_first", "chunk_bytes": 4096},
        {"expert_slices": 2, "device_units": 2, "gradient_slots": 5},
    ):
        sliced, others = train(family, dtype=dtype, values=BALANCED, **settings)
        assert differing(others, bits) == [], settings
        for one, other in zip(sliced, results, strict=True):
            assert one.loss == other.loss
            assert one.auxiliary_loss == other.auxiliary_loss
            assert one.busiest_expert == other.busiest_expert
            assert one.num_idle_experts == other.num_idle_experts
            # Blocks of norms begin anew with each slice.
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)


@pytest.mark.parametrize("clipping", ["deferred", "optimistic"])
def test_buffer_lifetime_races_of_slices(clipping):
    """Lanes with random delays, freed slots poisoned with NaN: the same bits."""
    settings = {"expert_slices": 3, "clipping": clipping, "max_grad_norm": 0.5, "steps": 11}
    results, bits = train("qwen3_moe", **settings)
    race = {"poison_slots": True, "lane_jitter_seconds": 0.001}
    race |= {"weight_slots": 2, "gradient_slots": 1, "micro_batches_per_wave": 2}
    others, other_bits = train("qwen3_moe", **settings, **race)
    assert [r.loss for r in others] == [r.loss for r in results]
    assert differing(other_bits, bits) == []


@pytest.mark.parametrize(
    ("part", "name", "call"),
    [
        (ExpertsStub, "forward", 3),
        (SliceOfExperts, "add_output", 5),
        (ExpertsStub, "forward", 30),
        (SliceOfExperts, "add_gradients", 7),
    ],
)
def test_a_step_that_ran_out_of_memory_is_tried_again(monkeypatch, part, name, call):
    """Between two stages of a layer, too: what it left in the middle is forgotten."""
    original, calls = getattr(part, name), []

    def failing(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        calls.append(None)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result

    found = []
    for fails in (True, False):
        spec, state = model_of("mixtral")
        settings = {"expert_slices": 3, "micro_batches_per_wave": None if fails else 2}
        with make_engine(spec, state, **settings) as engine, monkeypatch.context() as patch:
            if fails:
                patch.setattr(part, name, failing)
            step_with_retry(
                engine, make_batches(4), learning_rate=1e-2, max_grad_norm=0.5, say=lambda _: None
            )
            engine.synchronize()
        found.append(planes(state))
    assert len(calls) > call
    assert differing(*found) == []


@pytest.mark.parametrize("then", ["evaluate", "step", "hidden_states"])
@pytest.mark.parametrize(
    ("part", "name", "call"),
    [(ExpertsStub, "forward", 2), (ExpertsStub, "forward", 3), (SliceOfExperts, "add_output", 2)],
)
def test_an_evaluation_that_failed_leaves_nothing_behind(monkeypatch, part, name, call, then):
    """In the middle of a layer, by any error: what comes next does not see its tokens."""
    original, calls, found = getattr(part, name), [], []

    def failing(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return result

    for fails in (True, False):
        spec, state = model_of("mixtral")
        batches = make_batches(3)
        with make_engine(spec, state, expert_slices=3, micro_batches_per_wave=2) as engine:
            if fails:
                with monkeypatch.context() as patch:
                    patch.setattr(part, name, failing)
                    with pytest.raises(KeyboardInterrupt):
                        engine.evaluate(make_batches(3, seed=5))
            if then == "evaluate":
                found.append([torch.tensor(engine.evaluate(batches).loss_sum)])
            elif then == "hidden_states":
                found.append([engine.hidden_states(batches[0].input_ids_BT)])
            else:
                result = engine.step(batches, learning_rate=1e-2)
                engine.synchronize()
                planes_of = planes(state).values()
                found.append([torch.tensor(result.loss), *planes_of])
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_windows_hold_a_slice_and_not_a_layer():
    spec, state = model_of("mixtral")
    sizes = {}
    for slices in (1, 8):
        with make_engine(spec, state, expert_slices=slices) as engine:
            engine.step(make_batches(2), learning_rate=0.0)
            windows, accumulators = engine._windows.layers, engine._accumulators._layers
            sizes[slices] = windows[0].flat.numel(), accumulators[0].flat.numel()
            sections = plan_sections(spec, slices)
            assert sizes[slices][0] == max(s.layout.size for u in sections[1:-1] for s in u)
    assert sizes[8][0] < sizes[1][0] / 3
    assert sizes[8][1] < sizes[1][1] / 3


def test_sections_cover_a_unit():
    """Also of experts whose sizes are no multiple of the alignment."""
    spec, state = model_of("gpt_oss", intermediate_size=21)
    for slices in (1, 2, 3, 8):
        for unit, sections in enumerate(plan_sections(spec, slices)):
            layout = spec.units[unit]
            spans = sorted((s.start, s.stop) for part in sections for s in part.spans)
            assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
            assert spans[-1][1] == layout.size
            for section in sections:
                flat = torch.zeros(section.layout.size)
                for span in section.spans:
                    part = state.units[unit].weights[span.start : span.stop]
                    flat[span.at : span.at + span.stop - span.start] = part
                for param in section.layout.params:
                    whole = next(p for p in layout.params if p.name == param.name)
                    wanted = state.units[unit].weights[whole.slice].view(whole.shape)
                    if section.experts is not None:
                        wanted = wanted[section.experts.start : section.experts.stop]
                    assert torch.equal(flat[param.slice].view(param.shape), wanted)


@pytest.mark.parametrize(
    "frozen", ["experts", "gate", "self_attn", r"layers\.1", r"embed_tokens|layers\.[01]", "model"]
)
def test_frozen_parts_of_sliced_layers(frozen):
    trainable = {"trainable": lambda name: re.search(frozen, name) is None}
    results, bits = train("mixtral", values=trainable, steps=2)
    sliced, others = train("mixtral", values=trainable, steps=2, expert_slices=3)
    assert [r.loss for r in sliced] == [r.loss for r in results]
    assert differing(others, bits) == []


def test_a_gradient_waits_for_moments_also_behind_slices_that_return_nothing(monkeypatch):
    """Frozen experts return first, and nothing: what follows them must wait all the same."""
    finish = Updater._finish_moments

    def slowly(self, *arguments):
        time.sleep(0.03)
        finish(self, *arguments)

    monkeypatch.setattr(Updater, "_finish_moments", slowly)
    values = {"trainable": lambda name: "experts" not in name}
    found = [
        train("mixtral", values=values, update_order=order, expert_slices=3)[1]
        for order in ("together", "weights_first")
    ]
    assert differing(*found) == []


def test_evaluation_scores_and_hidden_states_of_sliced_layers():
    spec, state = model_of("deepseek_v3")
    batches = make_batches(3, cuts=(4, 11))
    found = []
    for slices in (1, 3):
        settings = {"expert_slices": slices, "micro_batches_per_wave": 2, "poison_slots": True}
        with make_engine(spec, state, **settings) as engine:
            ids = batches[0].input_ids_BT
            hidden = [engine.hidden_states(ids, layer=layer) for layer in (0, 2, -1)]
            scores = [scores.logprobs_BT for scores in engine.score(batches)]
            found.append([torch.tensor(engine.evaluate(batches).loss_sum), *hidden, *scores])
    for whole, sliced in zip(*found, strict=True):
        torch.testing.assert_close(sliced, whole)


# Of torch's own: it makes instances of autograd functions while tracing, and scripts on import.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_without_their_experts():
    # Windows are read document by document on the CPU, which no graph can hold.
    spec, state = model_of("mixtral", num_hidden_layers=2, sliding_window=None, **BALANCED)
    batches = make_batches(2)
    _, wanted = streamed_gradients(spec, state, batches)
    compiled = {"compile": True, "compile_backend": "aot_eager_decomp_partition"}
    with make_engine(spec, state, expert_slices=3, poison_slots=True, **compiled) as engine:
        for _ in range(2):
            engine.step(batches, learning_rate=0.0)
        found = returned_gradients(engine)
        assert engine.compile_counts.eager_calls == {}
        assert engine.compile_counts.recompilations == 0
    errors = relative_errors(found, wanted)
    assert max(errors.values()) <= 5e-5, max(errors, key=errors.get)


def test_slices_of_what_has_no_experts_are_refused():
    spec, state = model_of("mixtral")
    with pytest.raises(ConfigError, match="a layer has 8 experts"):
        make_engine(spec, state, expert_slices=9)
    with pytest.raises(ConfigError, match="expert_slices is 0; it must be at least 1"):
        make_engine(spec, state, expert_slices=0)
    dense = ModelSpec(tiny_config())
    with pytest.raises(ConfigError, match="no layer of Qwen3ForCausalLM has experts"):
        make_engine(dense, ModelState(dense.units, "float32"), expert_slices=2)
