"""Predicted bytes and times against what was measured, and the choice between placements."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import Olmo2Config, Qwen3Config, Qwen3MoeConfig

from headrace.engine import Engine, EngineConfig
from headrace.errors import CapacityError
from headrace.models.lora import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.policy.budget import Workload, step_budget
from headrace.policy.elements import kept_elements_per_token
from headrace.policy.search import choose
from headrace.policy.steptime import Rates, predict_step
from headrace.store.state import ModelState
from headrace.units import GIB

# One H200 with 16 Xeon cores (docs/performance.md).
RATES = Rates(
    flops=615e12, h2d_bytes=40e9, d2h_bytes=40e9, update_parameters=3.3e9,
    device_update_parameters=100e9, device_bytes=5e12,
)  # fmt: skip
WORKLOAD = Workload(tokens=8 * 4096, micro_batches=1, sequence_length=4096)
EIGHT_ROWS = Workload(tokens=8 * 4096, micro_batches=1, sequence_length=4096, rows=8)
CHUNK = {"loss_chunk_tokens": 2048}
WAVES = {"micro_batches_per_wave": 1, "weight_slots": 4, "loss_chunk_tokens": 2048}


def workload(rows):
    """32,768 tokens in micro-batches of so many rows."""
    return Workload(tokens=rows * 4096, micro_batches=8 // rows, sequence_length=4096)


def qwen3(*, layers=36, **sizes):
    return ModelSpec(
        Qwen3Config(
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=32768,
            **sizes,
        )
    )


@pytest.fixture(scope="module")
def qwen3_8b():
    return qwen3(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def qwen3_4b():
    return qwen3(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)


def layer_of(name):
    _, _, rest = name.partition(".layers.")
    return int(rest.split(".")[0]) if rest else -1


def settings(**kwargs):
    return EngineConfig(**({"loss_chunk_tokens": 4096} | kwargs))


@pytest.mark.parametrize(
    ("model", "rows", "config", "measured_gib"),
    [
        ("qwen3_8b", 8, {"device_units": 0}, 110.33),
        ("qwen3_8b", 8, {"device_units": 21, "recompute_layers": 16}, 129.53),
        ("qwen3_4b", 8, {"device_units": 38, "recompute_layers": 12}, 112.40),
        ("qwen3_8b", 1, {"device_units": 37, **WAVES}, 130.1),
        ("qwen3_8b", 2, {"device_units": 29, **WAVES}, 126.4),
        ("qwen3_4b", 4, {"device_units": 38, **WAVES}, 100.7),
        ("qwen3_4b", 8, {"device_units": 38, "offload_layers": 4}, 131.1),
        ("qwen3_4b", 8, {"device_units": 0, "recompute_layers": 36}, 14.54),
    ],
)
def test_budget_is_within_three_percent_of_measured_peaks(
    request, model, rows, config, measured_gib
):
    spec = request.getfixturevalue(model)
    predicted = step_budget(spec, settings(**config), "bfloat16", workload(rows)).device_bytes
    assert predicted / GIB == pytest.approx(measured_gib, rel=0.03)


@pytest.mark.parametrize(
    ("model", "rows", "config", "measured_seconds"),
    [
        ("qwen3_8b", 8, {"device_units": 0}, 4.53),
        ("qwen3_8b", 8, {"device_units": 21, "recompute_layers": 16}, 3.43),
        ("qwen3_4b", 8, {"device_units": 38, "recompute_layers": 12}, 1.82),
        ("qwen3_8b", 1, {"device_units": 37, **WAVES}, 2.95),
        ("qwen3_8b", 2, {"device_units": 29, **WAVES}, 3.24),
        ("qwen3_4b", 4, {"device_units": 38, **WAVES}, 1.74),
        ("qwen3_4b", 8, {"device_units": 38, "offload_layers": 4}, 1.73),
        ("qwen3_4b", 8, {"device_units": 0, "recompute_layers": 36}, 2.79),
    ],
)
def test_predicted_step_is_within_a_tenth_of_measured(
    request, model, rows, config, measured_seconds
):
    spec = request.getfixturevalue(model)
    predicted = predict_step(spec, settings(**config), workload(rows), RATES).seconds
    assert predicted == pytest.approx(measured_seconds, rel=0.1)


def test_compiled_recompute_is_predicted_without_what_it_leaves_out(qwen3_8b):
    """Its last matrix, 2 FLOPs an element and token; nothing where a norm reads the product."""
    recompute = settings(device_units=38, recompute_layers=36)

    def saved(spec):
        eager, compiled = (
            predict_step(spec, replace(recompute, compile=c), WORKLOAD, RATES).compute
            for c in (False, None)
        )
        return eager - compiled

    assert saved(qwen3_8b) == pytest.approx(2 * 36 * 4096 * 12288 * WORKLOAD.tokens / RATES.flops)
    post_norm = ModelSpec(Olmo2Config(num_hidden_layers=2))
    assert saved(post_norm) == 0


def test_a_frozen_lower_half_is_predicted_without_backward(qwen3_8b):
    """Forward alone of half of the layers: two thirds of their time, and what they would keep."""
    half = ModelSpec(
        qwen3_8b.config,
        trainable=lambda name: "lm_head" in name or layer_of(name) >= 18,
    )
    config = settings(device_units=38, recompute_layers=0)
    layers, fewer = (
        predict_step(spec, config, WORKLOAD, RATES).compute for spec in (qwen3_8b, half)
    )
    head = 6 * 151936 * 4096 * WORKLOAD.tokens / RATES.flops
    assert (fewer - head) / (layers - head) == pytest.approx(2 / 3, rel=0.03)
    kept, less = (
        step_budget(spec, config, "bfloat16", WORKLOAD).device["activations"]
        for spec in (qwen3_8b, half)
    )
    assert less / kept == pytest.approx(1 / 2, rel=0.01)


def test_choice_splits_a_step_in_waves_when_that_makes_room(qwen3_8b):
    """Sums of all layers on the device cost less than what recompute would."""
    whole = chosen(qwen3_8b)
    split = choose(
        qwen3_8b, settings(), "bfloat16", workload(1),
        device_bytes=139 * GIB, host_bytes=118 * GIB, rates=RATES,
    )  # fmt: skip
    assert split.config.micro_batches_per_wave == 1
    assert split.config.recompute_layers == 0
    assert split.time.seconds < whole.time.seconds
    assert split.budget.device["gradients kept on the device"] == 0


def test_weights_are_updated_first_where_the_host_binds(qwen3_4b):
    """A card of 16 GiB: the moments find room beside backward; with fewer tokens they do not."""
    limits = {"device_bytes": 16 * GIB, "host_bytes": 118 * GIB, "rates": RATES}
    auto, together = (
        choose(qwen3_4b, settings(update_order=order, **CHUNK), "bfloat16", workload(4), **limits)
        for order in (None, "together")
    )
    assert auto.config.update_order == "weights_first"
    assert together.config.update_order == "together"
    assert auto.time.seconds < 0.9 * together.time.seconds
    few = Workload(tokens=4096, micro_batches=1, sequence_length=4096, rows=1)
    bound, whole = (
        predict_step(qwen3_4b, replace(auto.config, update_order=order), few, RATES)
        for order in ("weights_first", "together")
    )
    assert bound.seconds > whole.seconds


def test_choice_cuts_large_micro_batches(qwen3_8b):
    """What eight accumulated rows of one reach, a micro-batch of eight rows reaches, too."""
    limits = {"device_bytes": 139 * GIB, "host_bytes": 118 * GIB, "rates": RATES}
    by_one = choose(qwen3_8b, settings(**CHUNK), "bfloat16", workload(1), **limits)
    cut = choose(qwen3_8b, settings(**CHUNK), "bfloat16", EIGHT_ROWS, **limits)
    assert cut.config.rows_per_micro_batch == 1
    assert cut.workload.micro_batches == 8
    assert cut.time.seconds == by_one.time.seconds
    whole = choose(
        qwen3_8b, settings(rows_per_micro_batch=8, **CHUNK), "bfloat16", EIGHT_ROWS, **limits
    )
    assert whole.workload.micro_batches == 1
    assert whole.time.seconds > cut.time.seconds


def test_a_choice_that_gains_nothing_cuts_nothing(qwen3_4b):
    limits = {"device_bytes": 139 * GIB, "host_bytes": 118 * GIB, "rates": RATES}
    few = Workload(tokens=2 * 4096, micro_batches=1, sequence_length=4096, rows=2)
    choice = choose(qwen3_4b, settings(), "bfloat16", few, **limits)
    assert choice.config.rows_per_micro_batch is None


def test_experts_with_a_balancing_loss_are_never_cut(qwen3_4b, monkeypatch):
    monkeypatch.setattr(qwen3_4b, "auxiliary_loss", SimpleNamespace(coefficient=0.01))
    limits = {"device_bytes": 80 * GIB, "host_bytes": 118 * GIB, "rates": RATES}
    choice = choose(qwen3_4b, settings(), "bfloat16", EIGHT_ROWS, **limits)
    assert choice.config.rows_per_micro_batch is None
    assert choice.workload == EIGHT_ROWS


def test_waves_of_a_choice_are_even(qwen3_4b):
    """Seven micro-batches: waves of 7, 4, 3, 2 and 1, and the user's own size is kept."""
    odd = Workload(tokens=4096, micro_batches=7, sequence_length=4096)
    limits = {"device_bytes": 60 * GIB, "host_bytes": 118 * GIB, "rates": RATES}
    choice = choose(qwen3_4b, settings(), "bfloat16", odd, **limits)
    assert choice.config.micro_batches_per_wave in (7, 4, 3, 2, 1)
    kept = choose(qwen3_4b, settings(micro_batches_per_wave=5), "bfloat16", odd, **limits)
    assert kept.config.micro_batches_per_wave == 5


def test_budget_counts_host_state_at_fourteen_bytes(qwen3_8b):
    budget = step_budget(qwen3_8b, settings(device_units=0), "bfloat16", WORKLOAD)
    assert budget.host_bytes == pytest.approx(14 * qwen3_8b.num_parameters, rel=1e-4)
    everything = step_budget(qwen3_8b, settings(device_units=38), "bfloat16", WORKLOAD)
    assert everything.host_bytes == 0


def test_budget_shrinks_with_waves(qwen3_8b):
    one = step_budget(qwen3_8b, settings(), "bfloat16", workload(1))
    many = step_budget(qwen3_8b, settings(micro_batches_per_wave=2), "bfloat16", workload(1))
    assert many.device["activations"] == one.device["activations"] // 4
    assert many.device["gradient accumulators"] > one.device["gradient accumulators"]


def chosen(spec, **kwargs):
    arguments = {"device_bytes": 139 * GIB, "host_bytes": 118 * GIB, "rates": RATES}
    config = kwargs.pop("config", settings())
    return choose(spec, config, "bfloat16", WORKLOAD, **(arguments | kwargs))


def test_choice_is_faster_than_both_ends_and_fits(qwen3_8b):
    choice = chosen(qwen3_8b)
    assert choice.budget.device_bytes < 139 * GIB
    assert choice.budget.host_bytes < 118 * GIB
    streamed = predict_step(qwen3_8b, settings(device_units=0, recompute_layers=0), WORKLOAD, RATES)
    assert choice.time.seconds < streamed.seconds
    assert 0 < choice.config.device_units < len(qwen3_8b.units)


def test_choice_keeps_a_small_model_whole_on_the_device():
    spec = qwen3(layers=4, hidden_size=512, intermediate_size=1024, tie_word_embeddings=True)
    choice = chosen(spec)
    assert choice.config.device_units == len(spec.units)
    assert choice.config.recompute_layers == 0
    assert choice.time.binding == "compute"


def test_choice_keeps_what_the_user_set(qwen3_8b):
    choice = chosen(qwen3_8b, config=settings(device_units=3, recompute_layers=30))
    assert (choice.config.device_units, choice.config.recompute_layers) == (3, 30)


def test_nothing_fits(qwen3_8b):
    with pytest.raises(CapacityError, match="no placement fits") as caught:
        chosen(qwen3_8b, device_bytes=8 * GIB)
    assert "activations" in str(caught.value)


def test_too_little_host_memory_moves_units_to_the_device(qwen3_8b):
    choice = chosen(qwen3_8b, host_bytes=60 * GIB)
    assert choice.budget.host_bytes <= 60 * GIB


def test_budget_on_the_cpu_is_in_float32_and_one_memory(qwen3_4b):
    gpu = step_budget(qwen3_4b, settings(), "bfloat16", WORKLOAD)
    cpu = step_budget(qwen3_4b, settings(), "bfloat16", WORKLOAD, cpu=True)
    assert cpu.device["activations"] == 2 * gpu.device["activations"]
    assert cpu.device["weight slots"] == 2 * gpu.device["weight slots"]
    assert cpu.host == gpu.host


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["adapters", "frozen"])
def test_host_bytes_of_a_partly_frozen_model_are_what_is_allocated(dtype, kind):
    """No remainder, moments or returned gradients of what is frozen, to the byte."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "head_dim": 32}
    config = Qwen3Config(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, **sizes)
    if kind == "adapters":
        spec = ModelSpec(config, lora=LoraSettings(rank=8))
    else:
        spec = ModelSpec(config, trainable=lambda name: "mlp" in name)
    budget = step_budget(spec, EngineConfig(device_units=0), dtype, workload(1))
    state = ModelState(spec.units, dtype)
    with Engine(spec, state, "cpu", EngineConfig(update_threads=1)) as engine:
        allocated = state.allocated_bytes + engine.updater.pending_bytes
    state.close()
    assert allocated == budget.host_bytes
    width = 2 if dtype == "bfloat16" else 4
    frozen = spec.num_parameters - (spec.num_trainable_parameters if kind == "frozen" else 0)
    trained = spec.num_trainable_parameters
    assert state.state_bytes == width * frozen + 12 * trained
    assert allocated == pytest.approx(state.state_bytes + width * trained, rel=0.01)


def test_a_kept_layer_of_experts_is_counted_as_one_expert():
    """Of 128 experts in one parameter a token uses 8, each with an output of its own."""
    spec = ModelSpec(
        Qwen3MoeConfig(
            hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_hidden_layers=1,
            vocab_size=96,
        )
    )  # fmt: skip
    attention = 4096 + 512 + 512 + 2048 + 4096
    router, gate_and_up = 128, 8 * 2 * 768
    found = kept_elements_per_token(spec, spec.units[1])
    assert found == attention + router + gate_and_up
    lora = LoraSettings(rank=20, target_modules=(), target_parameters=("experts.gate_up_proj",))
    adapted = ModelSpec(spec.config, lora=lora)
    # Of A 8 experts' results, at a rank that grouped products take; of B as of any adapter.
    found = kept_elements_per_token(adapted, adapted.units[1])
    assert found == attention + router + gate_and_up + 8 * 24 + 2 * 768
