"""Correct first: the streamed step against plain autograd, the device update against the host's.

Every GPU suite begins with this case.
"""

from __future__ import annotations

from typing import Any

from benchmarks.cases.common import (
    SEQUENCE,
    default_device,
    micro_batches,
    qwen3_config,
    step_tokens,
)


def parity_case(*, model: str = "tiny", sequence: int = SEQUENCE) -> dict[str, Any]:
    """Loss error and worst relative gradient error; on a GPU compiled bf16 too."""
    result: dict[str, Any] = {
        "float32 eager": gradient_errors(model, "float32", sequence, compiled=False)
    }
    if default_device().type == "cuda":
        result["float32 offloaded"] = gradient_errors(
            model, "float32", sequence, compiled=True, activations="offload"
        )
        result["bfloat16 compiled"] = gradient_errors(model, "bfloat16", sequence, compiled=True)
        result["device_update_is_bitwise"] = device_update_is_bitwise()
    return result


def device_update_is_bitwise() -> bool:
    """The device's update against the host kernel over three steps."""
    import numpy as np
    import torch

    from headrace import kernels
    from headrace.kernels import device
    from headrace.kernels.coefficients import coefficients

    host, rng, n = kernels.load(), np.random.default_rng(0), 1 << 22
    weight = (rng.standard_normal(n) * 0.02).astype(np.float32)
    hi, lo = np.empty(n, np.uint16), np.empty(n, np.int16)
    host.split_float32(weight, hi, lo)
    exp_avg = (rng.standard_normal(n) * 1e-3).astype(np.float32)
    exp_avg_sq = (rng.standard_normal(n) ** 2 * 1e-6).astype(np.float32)
    exp_avg[:1000] *= 1e-36
    exp_avg_sq[:2000] *= 1e-33
    tensors = [torch.from_numpy(hi.copy()).view(torch.bfloat16).cuda()]
    tensors += [torch.from_numpy(a.copy()).cuda() for a in (lo, exp_avg, exp_avg_sq)]
    same = True
    for step in range(1, 4):
        grad = (torch.randn(n) * 1e-3).to(torch.bfloat16)
        settings = {"step": step, "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95,
                    "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.37}  # fmt: skip
        host.adamw_split(hi, lo, exp_avg, exp_avg_sq, grad.view(torch.uint16).numpy(), **settings)
        device.adamw_split(*tensors, grad.cuda(), c=coefficients(**settings))
        for mine, theirs in zip(tensors, (hi, lo, exp_avg, exp_avg_sq), strict=True):
            same &= mine.cpu().view(torch.uint8).numpy().tobytes() == theirs.tobytes()
    return same


def gradient_errors(
    model: str, dtype: Any, sequence: int, *, compiled: bool, activations: Any = "keep"
) -> dict[str, float]:
    """Absolute error of the loss and the worst relative one of a parameter's gradient."""
    import torch
    from transformers import AutoModelForCausalLM

    from headrace.engine import Engine, EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.store.loading import initialise
    from headrace.store.state import ModelState

    device = default_device()
    units = 2 if device.type == "cuda" else 0
    config = qwen3_config(model)
    spec = ModelSpec(config)
    state = ModelState.allocate(spec, dtype, device=device, device_units=units)
    initialise(spec, state, seed=1)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {p.name: unit.master(p) for unit in state.units for p in unit.layout.params}
    reference.load_state_dict(weights, strict=False)
    reference.to(device)
    batches = micro_batches(*step_tokens(spec.vocab_size, 2 * sequence, 0, sequence), 1)
    count = sum(batch.num_supervised_tokens for batch in batches)
    expected = 0.0
    for batch in batches:
        logits = reference(batch.input_ids_BT.to(device)).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets_BT.flatten().to(device), reduction="sum"
        )
        (loss / count).backward()
        expected += loss.item() / count
    settings = EngineConfig(
        compile=compiled, device_units=units, weight_slots=2, poison_slots=True,
        lane_jitter_seconds=0.002, activations=activations,
    )  # fmt: skip
    named = dict(reference.named_parameters())
    worst = 0.0
    with Engine(spec, state, device, settings) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1e9)
        engine.synchronize()
        for index, unit in enumerate(state.units):
            gradient = engine.updater.returned_gradient(index).float().cpu()
            for param in unit.layout.params:
                theirs = named[param.name].grad.cpu()
                mine = gradient[param.slice].view(param.shape)
                worst = max(worst, ((mine - theirs).norm() / theirs.norm()).item())
    return {"loss": abs(expected - result.loss), "gradient": worst}
