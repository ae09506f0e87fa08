"""A recomputed layer with and without the products that no gradient reads.

Both ways lie in one process on the same weights, inputs and upstream gradient, and are timed in
turns, so that what the GPU's clock does meets both. One set of weights in one slot serves every
layer: nothing waits for a transfer. Gradients of both are compared bit by bit.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.cases.common import SEQUENCE, default_device, qwen3_config, report
from benchmarks.cases.experts import Layers


def recompute_case(
    *,
    model: str = "14b",
    num_layers: int = 2,
    rows: int = 4,
    sequence: int = SEQUENCE,
    repeats: int = 8,
    turns: int = 5,
    compiled: bool | None = None,
) -> dict[str, Any]:
    """Milliseconds of forward, recompute and backward of a layer, both ways.

    Args:
        model: a name that :func:`benchmarks.cases.common.qwen3_config` knows.
        num_layers: that one micro-batch passes through, forward and back.
        rows: sequences of the micro-batch.
        sequence: their length.
        repeats: passes of a turn.
        turns: of each way; the median counts.
        compiled: layers; None compiles on a GPU.
    """
    import torch

    from headrace.models.flops import flops_per_token
    from headrace.models.left_out import left_out, num_left_out
    from headrace.models.spec import ModelSpec
    from headrace.models.templates import Templates
    from headrace.policy.timing import Timer

    device = default_device()
    cuda = device.type == "cuda"
    spec = ModelSpec(qwen3_config(model, num_layers))
    ways, compiling = {}, cuda if compiled is None else compiled
    result: dict[str, Any] = {"left_out": left_out(spec, 0)}
    for name, leaves_out in (("whole", False), ("left out", True)):
        Templates.leaves_out = leaves_out
        try:
            layers = Layers(spec, device, rows, sequence, compiled=compiling)
        finally:
            Templates.leaves_out = True
        layers.run(keep=False)  # compiles
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        layers.run(keep=False)
        ways[name] = layers
        result[name] = {
            "compiled": layers.compile_counts(),
            "peak_bytes": torch.cuda.max_memory_allocated() - before if cuda else None,
        }
    found, wanted = (ways[name].gradient for name in ("left out", "whole"))
    result["gradients_are_bitwise_equal"] = torch.equal(found, wanted)
    error = (found - wanted).double().norm() / wanted.double().norm()
    result["relative_difference"] = float(error)
    del found, wanted
    report(result)

    tokens = rows * sequence
    head = 6.0 * spec.vocab_size * spec.hidden_size
    flops = tokens * (flops_per_token(spec, sequence) - head) / num_layers
    timed = Timer(device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, layers in ways.items():
            one = timed.mean(lambda layers=layers: layers.run(keep=False), repeats) / num_layers
            seconds[name].append(one)
    for name, all_turns in seconds.items():
        result[name] |= {
            "layer_milliseconds": median(all_turns) * 1e3,
            "all_milliseconds": [1e3 * one for one in all_turns],
            "tflops": flops / median(all_turns) / 1e12,
        }
    result["time_over_whole"] = median(seconds["left out"]) / median(seconds["whole"])
    # Forward, backward and recompute at one rate.
    result["work_over_whole"] = 1 - 2 * tokens * num_left_out(spec, 0) / (4 / 3 * flops)
    return result
