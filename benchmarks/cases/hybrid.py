"""Gated DeltaNet on this device: headrace's compiled torch path beside flash-linear-attention's.

The rule alone at the shape of Qwen3-Next (32 value heads, 16 key heads of 128), forward and
backward; then a layer around it as it is trained, with where its time goes. The kernel is timed
whether or not it may be used here, its own refusal lifted: what the guard decides, and how far
every path's gradients are from the torch path in float32, stand beside it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.cases.common import default_device, report
from benchmarks.cases.experts import Layers
from benchmarks.cases.kernels import profile

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from headrace.policy.timing import Timer

    Inputs = list[torch.Tensor]
    Rule = Callable[..., torch.Tensor]

NAMES = ("result", "query", "key", "value", "decay", "strength")


def hybrid_case(
    *,
    tokens: int = 8192,
    documents: int = 12,
    heads: int = 32,
    size: int = 128,
    repeats: int = 10,
    compiled: bool = True,
    layer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Milliseconds and peak memory of the rule by path, agreement, and the layer's profile.

    Args:
        tokens: in one row.
        documents: of the packed run.
        heads: of the values; half as many of keys.
        size: of every head.
        repeats: timed ones.
        compiled: the torch path.
        layer: changes of the layer's configuration; no layer on a CPU without any.
    """
    import torch

    from headrace.models.families import gated_delta, gated_delta_kernel
    from headrace.policy.timing import Timer

    device = default_device()
    cuda = device.type == "cuda"
    timed = Timer(device)
    inputs = draw(tokens, heads, size, device)
    bounds = torch.linspace(0, tokens, documents + 1, device=device).round().to(torch.int32)
    gated_delta_kernel.prepare(device, compare=gated_delta.torch_gated_delta_rule)
    result: dict[str, Any] = {
        "guard": gated_delta_kernel.reason_against(device) or "the kernel is used",
        "paths": {},
    }
    paths: dict[str, Rule] = {"torch": torch_rule(compiled=compiled)}
    if cuda and importlib.util.find_spec("fla") is not None:
        lift_refusal()
        paths["kernel"] = gated_delta_kernel.run
    for packing, cu_seqlens in (("one document", None), ("packed", bounds)):
        exact = gradients(torch_rule(compiled=False), [t.float() for t in inputs], cu_seqlens)
        for name, rule in paths.items():
            row: dict[str, Any] = {}
            result["paths"][f"{name}, {packing}"] = row
            try:
                found = gradients(rule, inputs, cu_seqlens)
                row["errors"] = {
                    what: float((one.float() - other).norm() / other.norm())
                    for what, one, other in zip(NAMES, found, exact, strict=True)
                }
                del found
                row |= measured(rule, inputs, cu_seqlens, timed, repeats)
            except Exception as error:  # noqa: BLE001 - a row, whatever a foreign kernel raises
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            print(f"{name}, {packing}: {row}", file=sys.stderr, flush=True)
            report(result)
    if "kernel" in paths:
        result["torch_over_kernel"] = {
            packing: result["paths"][f"torch, {packing}"].get("both_milliseconds", float("nan"))
            / result["paths"][f"kernel, {packing}"].get("both_milliseconds", float("nan"))
            for packing in ("one document", "packed")
        }
        report(result)
    if cuda or layer is not None:
        result["layer"] = layer_speed(timed, tokens, repeats, compiled=compiled, **(layer or {}))
    return result


def lift_refusal() -> None:
    """Let the kernel run under a Triton that makes its gradients wrong: the time is the same."""
    module: Any = importlib.import_module("fla.ops.common.chunk_o")
    if hasattr(module, "TRITON_ABOVE_3_7_1"):
        module.TRITON_ABOVE_3_7_1 = True


def draw(tokens: int, heads: int, size: int, device: torch.device) -> Inputs:
    """Queries, keys, values, decays and strengths of one row."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=generator, device=device)

    return [
        *(normal(heads, size).to(dtype) for _ in range(3)),
        -0.3 * torch.nn.functional.softplus(normal(heads)),
        torch.sigmoid(normal(heads)).to(dtype),
    ]


def torch_rule(*, compiled: bool) -> Rule:
    """The torch path, with the kernel left aside."""
    import torch

    from headrace.models.families.gated_delta import torch_gated_delta_rule

    return torch.compile(torch_gated_delta_rule, dynamic=False) if compiled else (
        torch_gated_delta_rule
    )  # fmt: skip


def gradients(rule: Rule, inputs: Inputs, cu_seqlens: torch.Tensor | None) -> Inputs:
    """The result and the gradients of its inputs for one upstream gradient."""
    import torch

    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = rule(*leaves, cu_seqlens)
    upstream = torch.linspace(-1, 1, out.shape[-1], device=out.device).expand_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def measured(
    rule: Rule, inputs: Inputs, cu_seqlens: torch.Tensor | None, timed: Timer, repeats: int
) -> dict[str, float]:
    """Milliseconds of forward, and of forward and backward; peak bytes of both a token."""
    import torch

    def forward() -> None:
        with torch.no_grad():
            rule(*inputs, cu_seqlens)

    cuda = inputs[0].is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    both = timed.mean(lambda: gradients(rule, inputs, cu_seqlens), repeats)
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    return {
        "both_milliseconds": both * 1e3,
        "peak_bytes_a_token": peak / inputs[0].shape[1],
        "forward_milliseconds": timed.mean(forward, repeats) * 1e3,
    }


def layer_speed(
    timed: Timer, tokens: int, repeats: int, *, compiled: bool, **changes: Any
) -> dict[str, Any]:
    """A layer of Qwen3.5's kind with gated DeltaNet, kept: time by kind of kernel."""
    import torch
    from transformers import Qwen3_5TextConfig

    from headrace.models.spec import ModelSpec

    values = {
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 1024,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2, **changes,
    }  # fmt: skip
    device, rows = default_device(), max(1, tokens // 4096)
    spec = ModelSpec(Qwen3_5TextConfig(**values))
    layers = Layers(spec, device, rows, tokens // rows, compiled=compiled)
    layers.run(keep=True)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    seconds = timed.mean(lambda: layers.run(keep=True), repeats) / 2
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    result: dict[str, Any] = {
        "milliseconds": seconds * 1e3,
        "peak_bytes_a_token_and_layer": peak / tokens / 2,
        "compiled": layers.compile_counts(),
    }
    if cuda:
        result |= profile(lambda: layers.run(keep=True), 2, repeats=repeats)
    return result
