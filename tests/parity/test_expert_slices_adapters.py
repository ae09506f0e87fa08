"""Adapters and frozen parts beside experts in slices: the step of whole layers, and no more."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from headrace.engine import AdamWConfig
from headrace.models.lora import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.selftest.checks import relative_errors, streamed_gradients
from headrace.selftest.reference import reference_gradients, with_adapters
from headrace.selftest.twin import filled_state, make_batches
from tiny import EXPERT_SIZES, differing, make_engine, planes

LORA = LoraSettings(rank=3, alpha=5.0)
SIZES = EXPERT_SIZES | {
    "head_dim": 16, "sliding_window": 5, "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip
ADAPTERS = {
    "attention": LORA,
    "with dropout": LoraSettings(rank=3, alpha=5.0, dropout=0.3),
    "last layer": LoraSettings(rank=3, layers=(2,)),
    "experts whole": LoraSettings(rank=3, modules_to_save=("experts", "input_layernorm")),
    "embedding and router whole": LoraSettings(rank=2, modules_to_save=("embed_tokens", "gate")),
}


def spec_of(family="qwen3_moe", lora=None, **values):
    values = {"mlp_only_layers": [1]} | values if family == "qwen3_moe" else values
    return ModelSpec(AutoConfig.for_model(family, **SIZES | values), lora=lora)


def train(spec, *, steps=3, **settings):
    """Results and final bits of a few steps of three micro-batches."""
    state = filled_state(spec)
    with make_engine(spec, state, optimizer=AdamWConfig(weight_decay=0.1), **settings) as engine:
        results = [
            engine.step(make_batches(3, seed=seed, cuts=(4, 11)), learning_rate=1e-2)
            for seed in range(steps)
        ]
        evaluated = engine.evaluate(make_batches(2, seed=9)).loss_sum
        engine.synchronize()
    said = [(r.loss, r.auxiliary_loss, r.busiest_expert) for r in results]
    return said, evaluated, planes(state)


@pytest.mark.parametrize(
    ("family", "adapters"),
    [*zip(["mixtral", "qwen3_moe", "mixtral", "qwen3_moe", "mixtral"], ADAPTERS, strict=True)],
)
def test_slices_beside_adapters_keep_every_bit(family, adapters):
    spec = spec_of(family, ADAPTERS[adapters])
    assert len(spec.experts) == (2 if family == "qwen3_moe" else 3)
    plain = train(spec, activations="recompute")
    assert len({loss for loss, *_ in plain[0]}) == 3
    for settings in (
        {"expert_slices": 3, "poison_slots": True},
        {"expert_slices": 8, "weight_slots": 2, "gradient_slots": 1, "chunk_bytes": 4096},
        {"expert_slices": 2, "micro_batches_per_wave": 1, "update_order": "weights_first"},
    ):
        found = train(spec, **settings)
        assert found[:2] == plain[:2], settings
        assert differing(found[2], plain[2]) == [], settings


@pytest.mark.parametrize("slices", [3, 8])
def test_experts_that_are_trained_whole_beside_adapters(slices):
    """Against PEFT's model; adapters alone are in ``test_lora.py``, slices among the modes."""
    spec = spec_of("mixtral", ADAPTERS["experts whole"])
    state, batches = filled_state(spec), make_batches(2)
    wanted_loss, wanted = reference_gradients(with_adapters(spec, state), batches)
    loss, found = streamed_gradients(spec, state, batches, expert_slices=slices)
    assert loss == pytest.approx(wanted_loss, abs=2e-6)
    assert any("experts" in name for name in found)
    assert max(relative_errors(found, wanted).values()) <= 1e-5


# Of torch's own: it makes instances of autograd functions while tracing, and scripts on import.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_with_adapters_and_without_their_experts():
    lora = ADAPTERS["with dropout"]
    spec = spec_of("mixtral", lora, num_hidden_layers=2, sliding_window=None)
    state, batches = filled_state(spec), make_batches(2)
    _, wanted = streamed_gradients(spec, state, batches)
    state.optimizer_step = 0  # another step would drop others
    compiled = {"compile": True, "compile_backend": "aot_eager_decomp_partition"}
    _, found = streamed_gradients(spec, state, batches, expert_slices=3, **compiled)
    assert max(relative_errors(found, wanted).values()) <= 5e-5


class _Seen(TorchDispatchMode):
    """Operators that ran, with the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        shapes = [r.shape for r in (result if isinstance(result, tuple) else (result,))
                  if isinstance(r, torch.Tensor)]  # fmt: skip
        self.calls.append((str(function), shapes))
        return result


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("frozen", ["adapters", "experts"])
def test_a_frozen_expert_has_no_gradient(slices, frozen):
    """Neither computed, nor summed, nor returned: of whole layers and of slices."""
    family = "gpt_oss"  # has biases
    values = {"rope_parameters": None}
    if frozen == "adapters":
        spec = spec_of(family, LORA, **values)
    else:
        config = AutoConfig.for_model(family, **SIZES | values)
        spec = ModelSpec(config, trainable=lambda name: re.search("experts", name) is None)
    state = filled_state(spec)
    experts = {p.local_name: p for p in spec.units[1].params if ".experts." in p.name}
    assert experts
    assert not any(p.trainable for p in experts.values())
    with make_engine(spec, state, expert_slices=slices) as engine:
        with _Seen() as seen:
            engine.step(make_batches(2), learning_rate=1e-3)
        names = {name for name, _ in seen.calls}
        assert any("grouped_matmul_v1" in name for name in names)
        assert not any("grouped_matmul_backward" in name for name in names)
        trained = sum(unit.num_trainable for unit in spec.units)
        assert engine.updater.pending_bytes == 4 * trained
        sums = engine._accumulators
        largest = max(slot.flat.numel() for slot in sums._layers)
        assert largest == max(unit.num_trainable for unit in spec.units[1:-1])
