"""Twenty streamed steps against plain autograd, ``clip_grad_norm_`` and ``torch.optim.AdamW``."""

import pytest
import torch

from headrace.engine import AdamWConfig, ParamGroup
from tiny import (
    VOCAB,
    make_batches,
    make_engine,
    masters,
    reference_backward,
    reference_model,
    relative_error,
    tiny_config,
    tiny_state,
)

STEPS = 20
CASES = {
    "qwen3-tied-rows": ("qwen3", True, (), {}),
    "qwen3-untied-packed": ("qwen3", False, (4, 11), {"activations": "recompute"}),
    "llama-tied-packed": ("llama", True, (4, 11), {"micro_batches_per_wave": 2}),
    "llama-untied-rows": ("llama", False, (), {"poison_slots": True, "weight_slots": 2}),
    "mistral-untied-packed": ("mistral", False, (4, 11), {}),
    "qwen2-tied-rows": ("qwen2", True, (), {"micro_batches_per_wave": 1}),
}


def torch_groups(model, decay):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_in_float32(case):
    """Losses within 2e-5: rounding differs, and AdamW divides by the size of the gradient."""
    family, tied, cuts, settings = CASES[case]
    spec, state = tiny_state(tiny_config(family, tied=tied))
    model = reference_model(spec, state)
    optimizer = torch.optim.AdamW(torch_groups(model, 0.1), lr=1e-3)
    before = masters(state)
    with make_engine(spec, state, optimizer=AdamWConfig(weight_decay=0.1), **settings) as engine:
        for step in range(STEPS):
            batches = make_batches(3, seed=step, cuts=cuts)
            # Half of the steps are clipped.
            limit = 0.5 if step % 2 else 100.0
            result = engine.step(batches, learning_rate=1e-3, max_grad_norm=limit)
            loss = reference_backward(model, batches)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
            assert result.loss == pytest.approx(loss, abs=2e-5)
            assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        engine.synchronize()
    reference = dict(model.named_parameters())
    for name, value in masters(state).items():
        change = value - before[name]
        assert relative_error(change, reference[name].detach() - before[name]) < 1e-3, name


def test_parameter_groups_collapse():
    """Pitfall 7. Two learning rates, three decays, none on norms and biases."""
    spec, state = tiny_state(tiny_config("llama-bias"))
    model = reference_model(spec, state)
    groups = (
        ParamGroup(pattern=r"mlp\.", learning_rate_scale=0.1),
        ParamGroup(pattern="q_proj", weight_decay=0.5),
        ParamGroup(pattern="layers.0.input_layernorm", weight_decay=0.3),
    )
    expected = []
    for name, parameter in model.named_parameters():
        decay = 0.1 if parameter.ndim >= 2 else 0.0
        decay = 0.5 if "q_proj" in name else decay
        decay = 0.3 if "layers.0.input_layernorm" in name else decay
        rate = 1e-4 if "mlp." in name else 1e-3
        expected.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    # With a large eps steps are proportional to gradients and comparisons well conditioned.
    optimizer = torch.optim.AdamW(expected, eps=1e-2)
    config = AdamWConfig(weight_decay=0.1, eps=1e-2, groups=groups)
    before = masters(state)
    with make_engine(spec, state, optimizer=config) as engine:
        for step in range(3):
            batches = make_batches(2, seed=step)
            engine.step(batches, learning_rate=1e-3, max_grad_norm=1.0)
            reference_backward(model, batches)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        engine.synchronize()
    reference = dict(model.named_parameters())
    after = masters(state)
    for name in after:
        change = after[name] - before[name]
        assert relative_error(change, reference[name].detach() - before[name]) < 1e-3, name


def test_loss_falls_on_repeated_data():
    """A model that sees one batch again and again learns it: the sign of the update is right."""
    spec, state = tiny_state(tiny_config("qwen3", tied=True), "bfloat16")
    batches = make_batches(2)
    with make_engine(spec, state) as engine:
        losses = [
            engine.step(batches, learning_rate=1e-2, max_grad_norm=1.0).loss for _ in range(25)
        ]
        result = engine.evaluate(batches)
    evaluated = result.loss_sum / result.num_supervised_tokens
    assert losses[0] > 0.8 * torch.tensor(VOCAB).log()
    assert evaluated < losses[-1] < 0.5 * losses[0]
