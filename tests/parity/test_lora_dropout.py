"""Dropout of adapters: PEFT's gradients for the same mask, and the same bits in every schedule."""

import hashlib

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from families import family_config
from headrace.engine import AdamWConfig, Engine, EngineConfig, offload
from headrace.models.dropout import SeededDropout, draw_seeds
from headrace.models.lora import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.selftest.checks import relative_errors, streamed_gradients
from headrace.selftest.reference import reference_gradients, with_adapters
from headrace.selftest.twin import filled_state, make_batches, tiny_config
from masks import numpy_kept
from tiny import differing, planes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
LORA = LoraSettings(rank=3, alpha=5.0, dropout=0.3)
COMPILED = {"compile": True, "compile_backend": "aot_eager_decomp_partition"}


def tiny(family="Qwen3"):
    return tiny_config(ModelSpec.from_config(family_config(family)))


@pytest.fixture
def plain():
    """A tiny configuration without adapters."""
    return tiny()


class GivenMask(nn.Module):
    """Drops what the numpy twin drops of the row that the model is at."""

    def __init__(self, row, layer, path):
        super().__init__()
        self.row, self.layer = row, layer
        digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
        self.salt = int.from_bytes(digest, "little", signed=True)

    def forward(self, values):
        seed = int(self.row["seeds_LR"][self.layer, self.row["number"]]) ^ self.salt
        mask = torch.from_numpy(numpy_kept(seed, values.numel(), LORA.dropout))
        return values * mask.view_as(values) / (1 - LORA.dropout)


def masked_reference(spec, state, seeds_LR):
    """PEFT's model, whose every call is the next row of the batch."""
    model = with_adapters(spec, state)
    row = {"seeds_LR": seeds_LR, "number": -1}
    path = spec.adapters.layers_path
    for index, layer in enumerate(model.get_submodule(path)):
        for name, module in list(layer.named_modules()):
            if isinstance(module, LoraLayer):
                assert isinstance(module.lora_dropout["default"], nn.Dropout)
                module.lora_dropout["default"] = GivenMask(row, index, name)

    def next_row(*_):
        row["number"] += 1

    model.register_forward_pre_hook(next_row)
    return model


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Qwen3", {"activations": "keep"}),
        ("Qwen3", {"activations": "recompute", "micro_batches_per_wave": 2}),
        ("Qwen3-MoE", {"activations": "recompute"}),
        ("Qwen3-Next", {"activations": "keep"}),  # a shared expert reads flattened tokens
        ("Qwen3", {"activations": "keep"} | COMPILED),
        ("Qwen3", {"activations": "recompute"} | COMPILED),
    ],
)
def test_gradients_are_those_of_autograd_with_the_same_mask(family, settings):
    spec = ModelSpec.from_config(tiny(family), lora=LORA)
    state = filled_state(spec)
    batches = make_batches(3)
    seeds_LR = draw_seeds(0, 1, num_layers=spec.num_layers, num_rows=6)
    loss, wanted = reference_gradients(masked_reference(spec, state, seeds_LR), batches)
    found_loss, found = streamed_gradients(spec, state, batches, **settings)
    undropped, _ = streamed_gradients(
        ModelSpec.from_config(spec.config, lora=LoraSettings(rank=3, alpha=5.0)), state, batches
    )
    state.close()
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert abs(undropped - loss) > 1e-3
    # The gradient of a shared expert's gate nearly cancels: with the whole recurrence in float64 it
    # is 1.9e-5 from the reference's, too.
    limit = 5e-5 if family == "Qwen3-Next" else 1e-5
    assert max(relative_errors(found, wanted).values()) <= limit


def trained(config, *, steps=2, batches=None, seed=3, **settings):
    """Losses and the bits of the state after some steps."""
    spec = ModelSpec.from_config(config, lora=LORA)
    state = filled_state(spec)
    engine = EngineConfig(update_threads=1, **settings)
    with Engine(spec, state, "cpu", engine, AdamWConfig(), dropout_seed=seed) as running:
        losses = [
            running.step(batches or make_batches(4, seed=step), learning_rate=1e-3).loss
            for step in range(steps)
        ]
        running.synchronize()
        counts = running.compile_counts
    bits = planes(state)
    state.close()
    return losses, bits, counts


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "recompute"},
        {"activations": "offload"},
        {"offload_layers": 1, "recompute_layers": 1, "micro_batches_per_wave": 3},
        {"activations": "recompute", "micro_batches_per_wave": 1, "device_units": 0},
        {"poison_slots": True, "weight_slots": 2, "lane_jitter_seconds": 0.002},
    ],
    ids=["recompute", "offload", "mixed", "waves", "poisoned"],
)
def test_every_schedule_drops_the_same(plain, settings, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 0)  # tiny models save tiny tensors
    losses, bits, _ = trained(plain, activations="keep")
    found = trained(plain, **settings)
    assert found[0] == losses
    assert differing(found[1], bits) == []


def test_a_cut_batch_drops_the_same(plain):
    """Sums over rows round in another order; another mask would differ in the first digit."""
    whole, _, _ = trained(plain, steps=1)
    cut, _, _ = trained(plain, steps=1, rows_per_micro_batch=1)
    assert cut == pytest.approx(whole, rel=1e-6)
    other, _, _ = trained(plain, steps=1, seed=4)
    assert abs(other[0] - whole[0]) > 1e-4


def test_compiled_layers_drop_the_same_without_compiling_again(plain):
    batches = make_batches(4)
    eager, _, _ = trained(plain, steps=3, batches=batches)
    found, _, counts = trained(plain, steps=3, batches=batches, **COMPILED)
    assert found == pytest.approx(eager, rel=1e-5)
    assert counts.row() == {"graphs": 2, "recompilations": 0, "eager_calls": 0}


def test_steps_and_micro_batches_differ(plain):
    """The same rows again: weights that stay give another loss for another mask alone."""
    (batch,) = make_batches(1)
    spec = ModelSpec.from_config(plain, lora=LORA)
    state = filled_state(spec)
    with Engine(spec, state, "cpu", EngineConfig(update_threads=1)) as engine:
        losses = [
            engine.step(batches, learning_rate=0.0).loss
            for batches in ([batch], [batch], [batch, batch])
        ]
    state.close()
    assert len({round(loss, 4) for loss in losses}) == 3


def test_evaluation_and_hidden_states_drop_nothing(plain):
    found = []
    for settings in (LORA, LoraSettings(rank=3, alpha=5.0)):
        spec = ModelSpec.from_config(plain, lora=settings)
        state = filled_state(spec)
        batches = make_batches(2)
        with Engine(spec, state, "cpu", EngineConfig(update_threads=1)) as engine:
            found.append(
                (
                    engine.evaluate(batches).loss_sum,
                    engine.score(batches)[0].logprobs_BT.tolist(),
                    engine.hidden_states(batches[0].input_ids_BT).tolist(),
                )
            )
        state.close()
    assert found[0] == found[1]


def test_without_dropout_nothing_is_drawn(plain, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("seeds were drawn")

    monkeypatch.setattr("headrace.engine.agreement.draw_seeds", refuse)
    spec = ModelSpec.from_config(plain, lora=LoraSettings(rank=3))
    assert not [m for m in spec.parts.layers.modules() if isinstance(m, SeededDropout)]
    state = filled_state(spec)
    streamed_gradients(spec, state, make_batches(1))
    state.close()
