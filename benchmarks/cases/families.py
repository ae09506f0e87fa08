"""Model families on this device: streamed gradients, eager and compiled, against plain autograd.

Tiny twins in float32 with poisoned slots, as in the self-test, but where layers really run: on a
GPU that takes other attention kernels, and compiled graphs. A row a family; one that raises says
so in its row. The reference is transformers' own model on the same device, a document at a time.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any

from benchmarks.cases.common import default_device, report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from headrace.batch import MicroBatch
    from headrace.models.spec import ModelSpec
    from headrace.store.state import ModelState

    Gradients = tuple[float, dict[str, torch.Tensor]]

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0,
         "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 4096}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("qwen3", {"num_key_value_heads": 8}),
    "Mistral": ("mistral", {"sliding_window": 4096}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3": ("gemma3_text", {}),
    "gpt-oss": ("gpt_oss", {}),
    "Qwen3-MoE": ("qwen3_moe", {"norm_topk_prob": True}),
    "GLM-4.5": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "DeepSeek-V3": ("deepseek_v3", {"rope_parameters": _YARN, "max_position_embeddings": 163840}),
    "Qwen3-Next": ("qwen3_next", {}),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Qwen3.5 MoE": ("qwen3_5_moe", {}),
}
"""Model types, and what sets the released models apart from their classes' defaults."""

LORA, LORA_DROPOUT = "Qwen3, LoRA", "Qwen3, LoRA with dropout"
MODES = {
    "eager": [(kind, activations) for kind in ("rows", "packed") for activations in
              ("keep", "recompute")],
    "compiled": [("packed", "keep"), ("rows", "recompute")],  # compiling takes most of the time
}  # fmt: skip


def families_case(*, names: Sequence[str] = (), compiled: bool = True) -> dict[str, Any]:
    """A row a family: worst relative gradient errors, leaks, compiled graphs.

    Args:
        names: of :data:`FAMILIES`, :data:`LORA` or :data:`LORA_DROPOUT`; all by default.
        compiled: test compiled layers, too.
    """
    import torch

    # A convolution of the reference would otherwise multiply in TF32.
    torch.backends.cudnn.allow_tf32 = False
    rows: dict[str, Any] = {}
    for name in names or [*FAMILIES, LORA, LORA_DROPOUT]:
        begun = time.perf_counter()
        torch.compiler.reset()  # a family's graphs do not count against the next one's limit
        try:
            rows[name] = family_row(name, compiled=compiled)
        except Exception as error:  # noqa: BLE001 - a row, whatever broke
            traceback.print_exc()
            rows[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
        rows[name]["seconds"] = round(time.perf_counter() - begun, 1)
        print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
        report(rows)
    return rows


def family_row(name: str, *, compiled: bool) -> dict[str, Any]:
    """What one family gives."""
    from transformers import AutoConfig

    from headrace.models.lora import LoraSettings
    from headrace.models.spec import ModelSpec
    from headrace.selftest.reference import reference_model, with_adapters
    from headrace.selftest.twin import CUTS, filled_state, make_batches, tiny_config

    model_type, values = FAMILIES[name.split(",", maxsplit=1)[0]]
    config = tiny_config(ModelSpec.from_config(AutoConfig.for_model(model_type, **values)))
    lora = None
    if name in (LORA, LORA_DROPOUT):
        lora = LoraSettings(rank=3, alpha=5.0, dropout=0.3 if name == LORA_DROPOUT else 0.0)
    spec = ModelSpec.from_config(config, lora=lora)
    state = filled_state(spec)
    batches = {
        kind: make_batches(2, cuts=cuts, vocab_size=spec.vocab_size)
        for kind, cuts in (("rows", ()), ("packed", CUTS))
    }
    row: dict[str, Any] = {}
    try:
        if name == LORA_DROPOUT:  # the mask is headrace's own: modes are held against each other
            wanted = {kind: streamed(spec, state, [b])[0][0] for kind, b in batches.items()}
        else:
            model = with_adapters(spec, state) if lora else reference_model(spec, state)
            wanted = {kind: plain_gradients(model, given) for kind, given in batches.items()}
        for mode in ("eager", "compiled") if compiled else ("eager",):
            with (
                attention_calls() if mode == "eager" else contextlib.nullcontext(Counter()) as seen
            ):
                row[mode] = check_mode(spec, state, batches, wanted, mode)
            if seen:
                row["attention"] = dict(seen)
    finally:
        state.close()
    return row


def check_mode(
    spec: ModelSpec,
    state: ModelState,
    batches: dict[str, list[MicroBatch]],
    wanted: dict[str, Gradients],
    mode: str,
) -> dict[str, Any]:
    """Worst errors over the mode's runs, the packing leak, and compiled graphs."""
    from headrace.selftest.checks import relative_errors

    compiled = mode == "compiled"
    loss_error, worst = 0.0, (0.0, "", "")
    counts: list[Any] = []
    for kind, activations in MODES[mode]:
        ((loss, found),), seen = streamed(
            spec, state, [batches[kind]], activations=activations, compile=compiled
        )
        errors = relative_errors(found, wanted[kind][1])
        name = max(errors, key=lambda key: _or_infinite(errors[key]))
        worst = max(worst, (_or_infinite(errors[name]), name, f"{kind}, {activations}"))
        loss_error = max(loss_error, abs(loss - wanted[kind][0]))
        counts.append(seen)
    leak, seen = packing_leak(spec, state, compile=compiled)
    result: dict[str, Any] = {
        "loss": loss_error, "gradient": worst[0], "of": worst[1], "in": worst[2], "leak": leak
    }  # fmt: skip
    if compiled:
        counts.append(seen)
        total: Counter[str] = Counter()
        for each in counts:
            total.update(each.row())
        reasons = {reason for each in counts for reason in each.eager_calls}
        result |= {**total, "reasons": sorted(reasons)}
    return result


def _or_infinite(error: float) -> float:
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is the worst


def packing_leak(spec: ModelSpec, state: ModelState, **settings: Any) -> tuple[float, Any]:
    """Relative change of a document's gradients when its neighbour in a packed row changes.

    And what was compiled for it.
    """
    from headrace.selftest.checks import _change, _two_documents

    steps = [[_two_documents(spec, other=other)] for other in (False, True)]
    ((_, one), (_, other)), counts = streamed(spec, state, steps, **settings)
    return _change(other, one), counts


def streamed(
    spec: ModelSpec, state: ModelState, steps: Sequence[Sequence[MicroBatch]], **settings: Any
) -> tuple[list[Gradients], Any]:
    """Loss and gradients of streamed steps on this device, and compile counts; weights stay."""
    from headrace.engine import Engine, EngineConfig

    settings = {"compile": False, **settings}
    config = EngineConfig(update_threads=1, poison_slots=True, weight_slots=2, **settings)
    results = []
    with Engine(spec, state, default_device(), config) as engine:
        for batches in steps:
            state.optimizer_step = 0  # dropout draws from it
            result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
            engine.updater.gradient_norm()  # waits for them
            found = {
                param.name: flat[param.slice].float().cpu().view(param.shape).clone()
                for unit, layout in enumerate(spec.units)
                for flat in (engine.updater.returned_gradient(unit),)
                for param in layout.params
                if param.trainable
            }
            results.append((result.loss, found))
        engine.synchronize()
        return results, engine.compile_counts


def plain_gradients(model: torch.nn.Module, batches: Sequence[MicroBatch]) -> Gradients:
    """The same of transformers' own model on this device."""
    import torch

    from headrace.batch import MicroBatch
    from headrace.selftest.reference import reference_gradients

    device = default_device()
    moved = [
        MicroBatch(**{
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in vars(batch).items()
        })
        for batch in batches
    ]  # fmt: skip
    with torch.device(device):  # the reference makes positions of its own
        loss, gradients = reference_gradients(model.to(device), moved)
    return loss, {name: gradient.cpu() for name, gradient in gradients.items()}


@contextlib.contextmanager
def attention_calls() -> Iterator[Counter[str]]:
    """Counts which of headrace's attention functions run; for eager layers only."""
    from headrace.models import attention

    seen: Counter[str] = Counter()
    names = ("attend_flex", "attend_by_document", "_varlen", "_dense")
    before = {name: getattr(attention, name) for name in names}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name.removeprefix("_")] += 1
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(attention, name, counted(name))
    try:
        yield seen
    finally:
        for name, function in before.items():
            setattr(attention, name, function)
