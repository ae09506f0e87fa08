"""Layers of a mixture of experts by themselves: speed, where the time goes, what bounds it.

One set of weights lies in one slot and serves every layer, so that nothing waits for a transfer:
what is left is what the GPU does. As in a step, layers and passes are queued one behind the other,
and nothing waits between them. The floor is measured in the same process: the layer's grouped
products with evenly filled experts, its dense products and its attention, forward and backward,
one after another. Model FLOPs as ``headrace.models.flops`` counts them (6 a matrix parameter and
token, experts by the share that a token uses, causal attention halved, no recompute), without the
head's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from benchmarks.cases.common import (
    SEQUENCE,
    default_device,
    micro_batches,
    qwen3_config,
    report,
    step_tokens,
    synchronize,
)
from benchmarks.cases.kernels import profile

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from headrace.models.spec import ModelSpec
    from headrace.policy.timing import Timer


def experts_case(
    *,
    model: str = "30b-a3b",
    num_layers: int = 4,
    rows: int = 8,
    sequence: int = SEQUENCE,
    repeats: int = 8,
    compiled: bool | None = None,
) -> dict[str, Any]:
    """TFLOP/s of kept and recomputed layers, kernel time by kind, and the floor.

    Args:
        model: a name in :data:`benchmarks.cases.common.EXPERT_SHAPES`.
        num_layers: that one micro-batch passes through, forward and back.
        rows: sequences of the micro-batch.
        sequence: their length.
        repeats: timed passes.
        compiled: layers; None compiles on a GPU.
    """
    import torch

    from headrace.models.flops import flops_per_token
    from headrace.models.spec import ModelSpec
    from headrace.policy.timing import Timer

    device = default_device()
    cuda = device.type == "cuda"
    spec = ModelSpec(qwen3_config(model, num_layers))
    layers = Layers(spec, device, rows, sequence, compiled=cuda if compiled is None else compiled)
    tokens = rows * sequence
    head = 6.0 * spec.vocab_size * spec.hidden_size
    flops = tokens * (flops_per_token(spec, sequence) - head) / num_layers
    timed = Timer(device)
    result: dict[str, Any] = {"tokens": tokens, "layer_tera_flops": flops / 1e12}
    for name, keep in (("kept", True), ("recomputed", False)):
        layers.run(keep=keep)  # compiles
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        allocations = _device_allocations() if cuda else 0
        seconds = timed.mean(lambda keep=keep: layers.run(keep=keep), repeats) / num_layers
        allocations = _device_allocations() - allocations if cuda else 0
        held = torch.cuda.max_memory_allocated() - before if cuda else 0
        result[name] = {
            "layer_milliseconds": seconds * 1e3,
            "tflops": flops / seconds / 1e12,
            "peak_bytes_a_token_and_layer": held / tokens / num_layers,
            # Above 0, the GPU waited for the driver.
            "device_allocations": allocations,
            "host_milliseconds": _queueing_seconds(layers, keep, device) / num_layers * 1e3,
        }
        result["compiled"] = layers.compile_counts()
        report(result)  # stands if what follows does not work here
    result["floor_milliseconds"] = floor = floors(spec, device, timed, rows, sequence)
    result["floor_tflops"] = flops / floor["all"] / 1e9
    result["kept_over_floor"] = result["kept"]["layer_milliseconds"] / floor["all"]
    report(result)
    if cuda:
        result |= profile(lambda: layers.run(keep=True), num_layers, repeats=repeats)
    return result


def _device_allocations() -> int:
    """Calls of the driver's allocator so far, both ways."""
    import torch

    stats = torch.cuda.memory_stats()
    return int(stats["num_device_alloc"] + stats["num_device_free"])


def _queueing_seconds(layers: Layers, keep: bool, device: torch.device) -> float:
    """How long the host needs for a pass, beside what it waits for."""
    synchronize(device)
    begun = time.perf_counter()
    layers.run(keep=keep)
    seconds = time.perf_counter() - begun
    synchronize(device)
    return seconds


class Layers:
    """The layers of a model on one micro-batch, all with the weights that one slot holds."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, rows: int, sequence: int, *, compiled: bool
    ) -> None:
        import torch

        from headrace.engine.passes import DeviceBatch, Passes
        from headrace.engine.slots import GradientSlot, Slot, full_size
        from headrace.models.capture import CallCapture
        from headrace.models.compiling import Compiler
        from headrace.models.templates import Templates

        self._spec = spec
        self._compiler = Compiler("inductor") if compiled else None
        self._passes = Passes(
            spec,
            CallCapture(spec, device),
            Templates(spec, compiler=self._compiler, device=device),
            loss_chunk_tokens=1024,
            compiler=self._compiler,
        )
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        slots = []
        for layout in spec.units[:2]:
            slot = Slot(layout.size, dtype, device, full_size=full_size(layout))
            with torch.no_grad():
                for weight in slot.parameters(layout).values():
                    weight.normal_(0, 0.02) if weight.dim() > 1 else weight.fill_(1.0)
            slots.append(slot)
        embed, self._slot = slots
        self._sum = GradientSlot(spec.units[1].num_trainable, device)
        (batch,) = micro_batches(*step_tokens(spec.vocab_size, rows * sequence, 0, sequence), rows)
        self._input_BTD, self._arguments = self._passes.embed(
            embed, DeviceBatch.moved(batch, device)
        )
        self._gradient_BTD = torch.randn_like(self._input_BTD) * 1e-3

    def run(self, *, keep: bool) -> None:
        """Forward through every layer, then backward; gradients are summed as in a step."""
        from headrace.engine.routing import StepRouting
        from headrace.models.attention import pinned_backend

        routing = StepRouting(self._spec.auxiliary_loss, [1.0])
        records, hidden_BTD = [], self._input_BTD
        with pinned_backend(deterministic=False):
            for index in range(self._spec.num_layers):
                hidden_BTD, record = self._passes.layer_forward(
                    index, self._slot, hidden_BTD, self._arguments[index], keep=keep,
                    accumulator=self._sum,
                )  # fmt: skip
                if record.routers:
                    routing.seen(index, 0, record.routers, repeats=not keep)
                records.append(record)
            gradient_BTD = self._gradient_BTD
            for index in reversed(range(self._spec.num_layers)):
                unit = 1 + index
                self._sum.begin(self._spec.units[unit], self._passes.summed(unit))
                gradient_BTD = self._passes.layer_backward(
                    index, self._slot, records.pop(), self._arguments[index], gradient_BTD,
                    accumulator=self._sum, routing=routing, micro_batch=0,
                )  # fmt: skip
                self._sum.finish()

    @property
    def gradient(self) -> torch.Tensor:
        """A copy of what the last pass left: the first layer's, float32, in layout order."""
        return self._sum.flat.clone()

    def compile_counts(self) -> dict[str, Any] | None:
        """Graphs, and calls that ran eagerly, with their reasons."""
        if self._compiler is None:
            return None
        counts = self._compiler.counts
        return {**counts.row(), "reasons": list(counts.eager_calls)}


def floors(
    spec: ModelSpec, device: torch.device, timed: Timer, rows: int, sequence: int
) -> dict[str, float]:
    """Milliseconds of a layer's products and attention alone, forward and backward."""
    import torch

    from headrace.models.attention import pinned_backend
    from headrace.models.experts import grouped_matmul

    config, cuda = spec.config, device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    tokens, hidden = rows * sequence, config.hidden_size
    heads, shared, size = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip
    experts, inner = config.num_experts, config.moe_intermediate_size
    assigned = tokens * config.num_experts_per_tok
    repeats = 8 if cuda else 1

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).mul_(0.02).requires_grad_()

    def milliseconds(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> float:
        upstream = torch.ones_like(function(*inputs))

        def both() -> None:
            torch.autograd.grad(function(*inputs), inputs, upstream)

        return timed.mean(both, repeats) * 1e3

    ends = torch.linspace(0, assigned, experts + 1, device=device)[1:].round().to(torch.int32)
    found = defaultdict(float)
    for inputs, outputs in ((hidden, 2 * inner), (inner, hidden)):
        weight = tensor(experts, outputs, inputs)
        found["grouped products"] += milliseconds(
            lambda x, w: grouped_matmul(x, w.transpose(1, 2), ends),
            tensor(assigned, inputs),
            weight,
        )
    for inputs, outputs, count in (
        (hidden, heads * size, 1), (hidden, shared * size, 2), (heads * size, hidden, 1)
    ):  # fmt: skip
        found["products"] += count * milliseconds(
            torch.nn.functional.linear, tensor(tokens, inputs), tensor(outputs, inputs)
        )
    query = tensor(rows, heads, sequence, size)
    keys = [tensor(rows, shared if cuda else heads, sequence, size) for _ in range(2)]
    with pinned_backend(deterministic=False):
        found["attention"] = milliseconds(
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=cuda and heads != shared
            ),
            query, *keys,
        )  # fmt: skip
    found["all"] = sum(found.values())
    return dict(found)
