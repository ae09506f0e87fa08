"""The self-test finds what it is there to find, says where, and remembers only what it should."""

import functools
import inspect
import json
import sys

import pytest
import torch
from transformers import AutoConfig

from headrace.cli import main
from headrace.errors import CapacityError, ModelRefusedError
from headrace.models import attention, experts, templates
from headrace.models.head import LogitRule
from headrace.models.spec import ModelSpec
from headrace.selftest import checks, run_selftest
from headrace.selftest import run as selftest_run
from headrace.selftest import verdict as verdicts
from headrace.selftest.twin import make_batch
from tiny import tiny_config

TINY = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def config_of(model_type, **values):
    return AutoConfig.for_model(model_type, **TINY | values)


def lose(monkeypatch, **changes):
    """Attention that ignores what it is told."""
    original = attention.attend_by_document

    def changed(query, key, value, cu_seqlens, **kwargs):
        cu_seqlens = changes.get("cu_seqlens", cu_seqlens)
        kwargs |= {name: v for name, v in changes.items() if name != "cu_seqlens"}
        return original(query, key, value, cu_seqlens, **kwargs)

    monkeypatch.setattr(attention, "attend_by_document", changed)


@pytest.mark.parametrize(
    ("model_type", "lost", "values"),
    [
        ("gemma2", {"softcap": None}, {"head_dim": 16}),
        ("gpt_oss", {"sinks_H": None}, {"head_dim": 16, "num_local_experts": 4}),
        ("mistral", {"window": None}, {"sliding_window": 5}),
        ("granite", {"scaling": None}, {"attention_multiplier": 0.5}),
    ],
    ids=["soft-cap", "sinks", "window", "scale"],
)
def test_lost_feature_is_refused_by_the_first_tensor(monkeypatch, model_type, lost, values):
    """Whatever attention drops shows in the loss or in a gradient, whose name is given."""
    lose(monkeypatch, **lost)
    verdict = run_selftest(config_of(model_type, **values), use_cache=False)
    assert verdict.verdict == "refused"
    assert "differs from plain autograd" in verdict.reason or "the loss is" in verdict.reason


# Of torch's own: it makes instances of autograd functions while tracing, and scripts on import.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradient_that_only_a_compiled_layer_loses_is_refused(monkeypatch):
    """As torch 2.11 loses that of an autograd function which returns what it was given."""
    plain = templates._layer_call

    def lossy(module, box, bound, hidden_BTD, arguments):
        if torch.compiler.is_compiling():
            name = "input_layernorm.weight"
            bound = {**bound, name: 0.5 * bound[name] + 0.5 * bound[name].detach()}
        return plain(module, box, bound, hidden_BTD, arguments)

    monkeypatch.setattr(templates, "_layer_call", lossy)
    assert run_selftest(config_of("llama"), use_cache=False).verdict == "ok"
    verdict = run_selftest(config_of("llama"), use_cache=False, compiled=True)
    assert verdict.verdict == "refused"
    assert "input_layernorm.weight differs from plain autograd" in verdict.reason
    assert "compile: True" in verdict.reason


def test_reference_calls_no_package_that_transformers_prefers(monkeypatch):
    """With flash-linear-attention installed, transformers' functions are kernels for CUDA alone."""
    spec = ModelSpec.from_config(AutoConfig.for_model("qwen3_5_text"))
    module = sys.modules[type(spec.model).__module__]
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        if hasattr(module, name):

            @functools.wraps(inspect.unwrap(getattr(module, name)))
            def foreign(*_args, **_kwargs):
                raise RuntimeError("takes CUDA tensors alone")

            monkeypatch.setattr(module, name, foreign)
    verdict = run_selftest(spec.config, use_cache=False)
    assert verdict.verdict == "ok", verdict.reason


def test_packed_documents_that_see_each_other_are_refused(monkeypatch):
    """Pitfall 22."""
    lose(monkeypatch, cu_seqlens=None)
    verdict = run_selftest(config_of("llama"), use_cache=False)
    assert verdict.verdict == "refused"
    assert "packed rows" in verdict.reason


def test_leak_is_measured_on_its_own(monkeypatch):
    """Without the comparison of gradients, the changed neighbour still shows."""
    lose(monkeypatch, cu_seqlens=None)
    found = checks.GradientCheck(0.0, "")
    monkeypatch.setattr(checks, "check_gradients", lambda *_, **__: found)
    verdict = run_selftest(config_of("llama"), use_cache=False)
    assert "packed documents see each other" in verdict.reason


def test_lost_logit_rule_is_refused(monkeypatch):
    config = config_of("granite", logits_scaling=8.0)
    assert ModelSpec(config).logit_rule == LogitRule(divisor=8.0)
    monkeypatch.setattr("headrace.models.spec.find_rules", lambda *_, **__: (None, LogitRule()))
    verdict = run_selftest(config, use_cache=False)
    assert "the loss is" in verdict.reason


def test_idle_expert_without_zero_gradient_is_refused(monkeypatch):
    """Pitfall 12. An expert without tokens whose gradient is left from before."""
    original = torch.zeros_like

    def stale(tensor, **kwargs):
        return torch.full_like(tensor, 0.5) if tensor.dim() == 3 else original(tensor, **kwargs)

    monkeypatch.setattr(experts.torch, "zeros_like", stale)
    config = config_of("mixtral", num_local_experts=8)
    # One expert a token of a short row: most of them idle.
    monkeypatch.setattr(checks, "make_batches", one_short_batch)
    verdict = run_selftest(config, use_cache=False)
    assert "experts" in verdict.reason


def one_short_batch(_num, *, cuts=(), vocab_size=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [make_batch(torch.randint(0, vocab_size, (1, 3), generator=generator), cuts=cuts[:0])]


def test_weights_that_do_not_come_back_are_refused(monkeypatch):
    original = checks.load_pretrained

    def scratched(spec, state, path):
        report = original(spec, state, path)
        state.units[1].weights[0] += 1
        return report

    monkeypatch.setattr(checks, "load_pretrained", scratched)
    verdict = run_selftest(config_of("llama"), use_cache=False)
    assert verdict.reason.startswith("model.layers.0.")
    assert verdict.reason.endswith("differs after export and reload")


def test_crash_of_the_models_own_code_is_a_refusal(monkeypatch):
    def crash(*_):
        raise ZeroDivisionError("in a modelling file")

    monkeypatch.setattr(selftest_run, "reference_model", crash)
    verdict = run_selftest(config_of("llama"), use_cache=False)
    assert verdict.reason == "the tiny twin raised ZeroDivisionError: in a modelling file"


# -- memory ----------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    return tmp_path / "selftest"


def test_too_little_memory_is_no_verdict_on_the_model(monkeypatch, cache):
    def full(*_args, **_kwargs):
        raise CapacityError("the host is full")

    with monkeypatch.context() as patched:
        patched.setattr(selftest_run, "_run_checks", full)
        with pytest.raises(CapacityError, match="the host is full"):
            run_selftest(tiny_config("llama"))
    assert run_selftest(tiny_config("llama")).verdict == "ok"


def test_verdict_is_remembered_for_class_switches_and_versions(monkeypatch, cache):
    first = run_selftest(config_of("llama"))
    again = run_selftest(config_of("llama", hidden_size=64, num_hidden_layers=5))
    assert (first.cached, again.cached) == (False, True)  # other sizes, the same switches
    assert again.gradient_error == first.gradient_error
    assert not run_selftest(config_of("llama", attention_bias=True)).cached
    assert not run_selftest(config_of("llama"), use_cache=False).cached
    newer = verdicts.current_versions() | {"torch": "99.0"}
    monkeypatch.setattr(selftest_run, "current_versions", lambda: newer)
    assert not run_selftest(config_of("llama")).cached
    assert len(list(cache.glob("*.json"))) == 3


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"verdict": "ok", "schema": 1}'])
def test_damaged_memory_is_no_verdict(cache, text):
    run_selftest(config_of("llama"))
    (path,) = cache.glob("*.json")
    path.write_text(text)
    found = run_selftest(config_of("llama"))
    assert found.verdict == "ok"
    assert found.gradient_error is not None


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file"))
    assert run_selftest(config_of("llama")).verdict == "ok"


# -- who must prove what -----------------------------------------------------------------------


def test_a_switch_that_was_not_tested_is_tested(cache):
    """A verdict is of a class with its switches: another switch is another verdict."""
    assert not selftest_run.require_proof(ModelSpec(tiny_config("qwen3"))).cached
    assert selftest_run.require_proof(ModelSpec(tiny_config("qwen3", vocab_size=100))).cached
    assert not selftest_run.require_proof(ModelSpec(tiny_config("qwen3", tied=True))).cached
    biased = tiny_config("qwen3", attention_bias=True)
    assert not selftest_run.require_proof(ModelSpec(biased)).cached


def test_other_class_is_tested_before_it_trains(cache):
    spec = ModelSpec(config_of("cohere"))
    verdict = selftest_run.require_proof(spec)
    assert verdict.verdict == "ok"
    assert selftest_run.require_proof(spec).cached


def test_class_that_fails_does_not_train(cache):
    """Mamba 2 scans over whole rows, whatever documents are in them."""
    spec = ModelSpec(AutoConfig.for_model("mamba2"))
    with pytest.raises(ModelRefusedError, match=r"Mamba2ForCausalLM .*packed rows"):
        selftest_run.require_proof(spec)


# -- the command line --------------------------------------------------------------------------


def doctor(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return ended.value.code, capsys.readouterr()


def test_doctor_of_a_folder(cache, tmp_path, capsys):
    config_of("starcoder2").save_pretrained(tmp_path / "model")
    code, output = doctor(capsys, "--model", str(tmp_path / "model"), "--json")
    found = json.loads(output.out)
    assert code == 0
    assert found["verdict"] == "ok"
    assert found["reason"] is None
    assert found["architecture"] == "Starcoder2ForCausalLM"
    assert found["gradient_error"] < 1e-5
    code, output = doctor(capsys, "--model", str(tmp_path / "model"))
    assert code == 0
    assert "Starcoder2ForCausalLM: ok" in output.out


def test_doctor_of_a_model_that_is_refused(cache, tmp_path, capsys):
    AutoConfig.for_model("gemma3n_text").save_pretrained(tmp_path)
    code, output = doctor(capsys, "--model", str(tmp_path / "config.json"), "--json")
    found = json.loads(output.out)
    assert code == 1
    assert found["verdict"] == "refused"
    assert "passes state between layers" in found["reason"]
    assert "headrace" in sys.modules


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_experts_per_tok": 9}, "each token to 9 of 4 experts"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is no number"),
        ({"num_key_value_heads": 3}, "do not divide"),
    ],
)
def test_sizes_that_the_tiny_twin_does_not_have_are_looked_at(
    cache, tmp_path, capsys, change, reason
):
    """The twin's sizes are others, so that it would pass."""
    AutoConfig.for_model(
        "qwen3_moe", **{"num_experts": 4, "num_experts_per_tok": 2} | change
    ).save_pretrained(tmp_path)
    code, output = doctor(capsys, "--model", str(tmp_path), "--json")
    found = json.loads(output.out)
    assert (code, found["verdict"]) == (1, "refused")
    assert reason in found["reason"]


def test_doctor_of_a_folder_without_a_model(tmp_path, capsys):
    code, output = doctor(capsys, "--model", str(tmp_path), "--json")
    assert code == 2
    assert "no model configuration" in output.err


@pytest.mark.parametrize(
    "text", ['{"model_type": "nosuch"}', '{"model_type": "llama", "hidden_size": "x"}', "{", "[]"]
)
def test_doctor_of_a_configuration_that_transformers_cannot_read(tmp_path, capsys, text):
    """There is a model, so there is a verdict."""
    (tmp_path / "config.json").write_text(text)
    code, output = doctor(capsys, "--model", str(tmp_path), "--json")
    found = json.loads(output.out)
    assert code == 1
    assert found["verdict"] == "refused"
    assert "no model configuration" in found["reason"]
