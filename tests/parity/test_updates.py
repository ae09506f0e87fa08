"""The update against plain loops: clipping, bias correction, the split master, low learning rates.

The plain loops use the reference kernels, because the streamed step promises their bits.
"""

import numpy as np
import pytest
import torch

from headrace.engine import AdamWConfig
from headrace.kernels import reference
from headrace.models import attention
from headrace.models.loss import linear_cross_entropy
from tiny import (
    differing,
    half_away,
    make_batches,
    make_engine,
    masters,
    num_supervised,
    parameters,
    planes,
    reference_backward,
    reference_model,
    relative_error,
    returned_gradients,
    tiny_config,
    tiny_state,
    train,
)

RATE, DECAY = 1e-3, 0.1
BETAS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def whole_model_update(weights, moments, gradients, *, step):
    """One AdamW call for all matrices of the model and one for all vectors, on plain fp32."""
    for is_matrix in (True, False):
        names = [name for name in weights if (weights[name].ndim >= 2) == is_matrix]

        def join(tensors, names=names):
            return np.concatenate([tensors[name].numpy().reshape(-1) for name in names])

        flat = [join(weights), join(moments["exp_avg"]), join(moments["exp_avg_sq"])]
        applied = reference.adamw_float32(
            *flat,
            join(gradients),
            step=step,
            learning_rate=RATE,
            weight_decay=DECAY if is_matrix else 0.0,
            **BETAS,
        )
        assert applied
        offset = 0
        for name in names:
            shape, numel = weights[name].shape, weights[name].numel()
            for tensors, array in zip(
                (weights, moments["exp_avg"], moments["exp_avg_sq"]), flat, strict=True
            ):
                piece = array[offset : offset + numel].copy()
                tensors[name] = torch.from_numpy(piece).view(shape)
            offset += numel


def zero_moments(weights):
    return {
        kind: {name: torch.zeros_like(value) for name, value in weights.items()}
        for kind in ("exp_avg", "exp_avg_sq")
    }


def assert_state_is(state, weights, moments):
    for unit, param in parameters(state):
        assert torch.equal(unit.master(param), weights[param.name]), param.name
        for kind, tensors in moments.items():
            plane = getattr(unit, kind)[param.slice].view(param.shape)
            assert torch.equal(plane, tensors[param.name]), (kind, param.name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_grad_norm", [0.5, None])
def test_bias_correction_drifts_over_per_layer_calls(dtype, max_grad_norm):
    """Pitfall 6. Updating unit by unit gives the bits of one call for the whole model.

    With clipping, too: scaling inside the update is clipping the gradients and then updating.
    """
    spec, state = tiny_state(tiny_config("llama-bias"), dtype)
    weights = masters(state)
    moments = zero_moments(weights)
    optimizer = AdamWConfig(weight_decay=DECAY)
    with make_engine(spec, state, optimizer=optimizer) as engine:
        for step in range(1, 8):
            result = engine.step(
                make_batches(2, seed=step), learning_rate=RATE, max_grad_norm=max_grad_norm
            )
            gradients = returned_gradients(engine)
            if max_grad_norm is not None:
                assert result.grad_norm > max_grad_norm  # it does clip
                scale = np.float32(max_grad_norm / (result.grad_norm + 1e-6))
                gradients = {name: g * torch.tensor(scale) for name, g in gradients.items()}
            whole_model_update(weights, moments, gradients, step=step)
        engine.synchronize()
    assert state.optimizer_step == 7
    assert_state_is(state, weights, moments)


def test_update_in_backward_never_clips():
    """Pitfall 5. A limit of 1e-3: the moments hold the clipped gradient, weights move as AdamW's.

    A first AdamW step is nearly the same for every scale, so eps is large and three are taken.
    """
    spec, state = tiny_state(tiny_config("qwen3", tied=True))
    model = reference_model(spec, state)
    plain = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-3, weight_decay=0.0)
    before = masters(state)
    with make_engine(spec, state, optimizer=AdamWConfig(eps=1e-3)) as engine:
        for step in range(3):
            batches = make_batches(2, seed=step)
            result = engine.step(batches, learning_rate=RATE, max_grad_norm=1e-3)
            assert result.grad_norm > 0.1
            if step == 0:
                engine.synchronize()
                first = torch.cat([unit.exp_avg.double() for unit in state.units])
                assert float(first.norm()) / 0.1 == pytest.approx(1e-3, rel=1e-4)
            reference_backward(model, batches)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            plain.step()
            plain.zero_grad()
        engine.synchronize()
    after = masters(state)
    for name, parameter in model.named_parameters():
        change = after[name] - before[name]
        assert relative_error(change, parameter.detach() - before[name]) < 1e-3, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activations": "recompute", "weight_slots": 2, "gradient_slots": 1},
        {"micro_batches_per_wave": 1},
        {"poison_slots": True, "lane_jitter_seconds": 0.002},
    ],
    ids=["keep", "recompute", "waves", "race"],
)
def test_overlapped_update_is_the_deferred_one(settings, dtype):
    """Without clipping, updating while backward goes on gives the bits of updating after it."""
    config = tiny_config(tied=False)
    deferred = train(config, steps=6, dtype=dtype, max_grad_norm=1e30)
    overlapped = train(config, steps=6, dtype=dtype, max_grad_norm=None, **settings)
    assert overlapped[0] == deferred[0]
    assert differing(overlapped[1], deferred[1]) == []


# -- the split master ----------------------------------------------------------------------


def plain_gradients(model, batches):
    """Plain autograd over the whole model, with headrace's attention and loss for equal bits."""
    total = num_supervised(batches)
    loss_sum = torch.zeros((), dtype=torch.float64)
    head_gradient = torch.zeros_like(model.lm_head.weight)
    for batch in batches:
        hidden_BTD = model.model(
            input_ids=batch.input_ids_BT,
            position_ids=batch.position_ids_BT,
            use_cache=False,
            **attention.packing_arguments(batch.cu_seqlens, batch.input_ids_BT.shape[1]),
        ).last_hidden_state
        loss, gradient_ND = linear_cross_entropy(
            hidden_BTD.detach().flatten(0, 1),
            model.lm_head.weight.detach(),
            batch.targets_BT.flatten(),
            scale=1.0 / total,
            chunk_tokens=1024,
            weight_grad_VD=head_gradient,
        )
        hidden_BTD.backward(gradient_ND.view_as(hidden_BTD))
        loss_sum += loss
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss_sum) / total, gradients | {"lm_head.weight": head_gradient}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("cuts", [(), (4, 11)], ids=["rows", "packed"])
def test_split_master_trains_as_a_plain_loop(family, cuts):
    """bf16: rounded weights, fp32 compute and sums, gradients rounded once, fp32 master: each bit.

    Streaming, slots and planes thus add nothing to what plain PyTorch computes.
    """
    attention.register()
    spec, state = tiny_state(tiny_config(family, tied=False), "bfloat16")
    model = reference_model(spec, state, attention=attention.IMPLEMENTATION)
    weights = masters(state)
    moments = zero_moments(weights)
    with make_engine(spec, state, optimizer=AdamWConfig(weight_decay=DECAY)) as engine:
        for step in range(1, 13):
            batches = make_batches(3, seed=step, cuts=cuts)
            result = engine.step(batches, learning_rate=RATE, max_grad_norm=1.0)
            model.load_state_dict({name: half_away(value) for name, value in weights.items()})
            model.zero_grad()
            loss, gradients = plain_gradients(model, batches)
            gradients = {name: g.bfloat16().float() for name, g in gradients.items()}
            norm = torch.cat([g.double().flatten() for g in gradients.values()]).norm()
            assert result.loss == loss
            assert result.grad_norm == pytest.approx(float(norm), rel=1e-6)
            scale = torch.tensor(min(1.0, 1.0 / (result.grad_norm + 1e-6)), dtype=torch.float32)
            scaled = {name: g * scale for name, g in gradients.items()}
            whole_model_update(weights, moments, scaled, step=step)
        engine.synchronize()
    assert_state_is(state, weights, moments)


def test_split_master_of_a_tied_model_trains_as_torch():
    """bf16 against torch's own attention, loss and AdamW: to the rounding of bf16 gradients."""
    spec, state = tiny_state(tiny_config("qwen3", tied=True), "bfloat16")
    model = reference_model(spec, state)
    exact = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(exact, lr=RATE, weight_decay=0.0)
    with make_engine(spec, state) as engine:
        for step in range(20):
            batches = make_batches(2, seed=step)
            result = engine.step(batches, learning_rate=RATE, max_grad_norm=1.0)
            model.zero_grad()
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), exact, strict=True):
                    parameter.copy_(value.bfloat16())
            loss = reference_backward(model, batches)
            assert result.loss == pytest.approx(loss, abs=2e-3)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for parameter, value in zip(model.parameters(), exact, strict=True):
                value.grad = parameter.grad
            optimizer.step()


def test_bf16_weights_never_move_at_low_learning_rates():
    """Pitfall 9. 100 steps at 1e-5: the split master moves with fp32, plain bf16 stands still."""
    rate = 1e-5
    config = tiny_config("qwen3", tied=True, num_hidden_layers=2, initializer_range=0.3)
    final, start = {}, {}
    for dtype in ("float32", "bfloat16"):
        spec, state = tiny_state(config, dtype)
        start[dtype] = masters(state)
        with make_engine(spec, state) as engine:
            for step in range(100):
                engine.step(make_batches(1, seed=step), learning_rate=rate, max_grad_norm=1.0)
            engine.synchronize()
        final[dtype] = masters(state)
        if dtype == "bfloat16":
            working = {p.name: u.weights[p.slice].view(p.shape) for u, p in parameters(state)}
    moved, wanted = (
        torch.cat([(final[d][n] - start[d][n]).double().flatten() for n in final[d]])
        for d in ("bfloat16", "float32")
    )
    assert (moved != 0).double().mean() > 0.99
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.98
    assert float(moved.norm() / wanted.norm()) == pytest.approx(1, abs=0.02)
    # What a bf16 weight updated in place would do: most steps are below half a unit of the last
    # place and vanish, each time.
    name = "model.layers.0.mlp.up_proj.weight"
    largest_step = 2 * rate
    stuck = working[name].float() + largest_step
    assert (stuck.bfloat16() == working[name]).double().mean() > 0.8


def test_returned_gradient_in_float32_is_not_rounded():
    """``gradient_dtype: float32`` keeps a bf16 model's gradients as they were accumulated."""
    gradients = []
    for dtype in ("float32", "bfloat16"):
        spec, state = tiny_state(tiny_config(), "bfloat16")
        with make_engine(spec, state, gradient_dtype=dtype) as engine:
            engine.step(make_batches(2), learning_rate=0.0, max_grad_norm=1.0)
            gradients.append(returned_gradients(engine))
    exact, rounded = gradients
    for name in exact:
        assert torch.equal(exact[name].bfloat16().float(), rounded[name])
        assert not torch.equal(exact[name], rounded[name])


def test_learning_rate_zero_moves_moments_only():
    spec, state = tiny_state(tiny_config(), "bfloat16")
    before = planes(state)
    with make_engine(spec, state) as engine:
        engine.step(make_batches(2), learning_rate=0.0, max_grad_norm=1.0)
        engine.synchronize()
    changed = differing(planes(state), before)
    assert not [name for name in changed if name.endswith(("weights", "remainder"))]
    assert len([name for name in changed if name.endswith(("exp_avg", "exp_avg_sq"))]) == 10
