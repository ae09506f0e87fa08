"""The checks of a self-test, each on a tiny model in float32.

Slots are poisoned between forward and backward, so a graph that hid a weight reads NaN. Errors
are relative per parameter; what is far smaller than the whole gradient is measured against a
share of that, because gradients that cancel exactly (a bias of keys) are rounding alone.
"""

from __future__ import annotations

import copy
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.engine import Engine, EngineConfig
from headrace.errors import HeadraceError
from headrace.models import families
from headrace.models.slices import most_slices
from headrace.models.spec import ModelSpec
from headrace.selftest.reference import (
    documents,
    logits_of,
    reference_gradients,
    reference_model,
)
from headrace.selftest.twin import CUTS, filled_state, make_batch, make_batches
from headrace.store.checkpoint import export_pretrained
from headrace.store.loading import load_pretrained
from headrace.store.state import ModelState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from headrace.batch import MicroBatch

MAX_GRADIENT_ERROR = 1e-5
MAX_PACKING_LEAK = 1e-6
AUXILIARY_COEFFICIENT = 0.5
CONDITIONING = 4.0  # times what one unit in the last place of the weights does
MAX_AMPLIFIED_ERROR = 1e-4  # of a gradient, however badly conditioned
SMALLEST_SHARE = 1e-3  # of the whole gradient's root mean square
# Below this share a gradient is rounding alone: that of a key's bias, of a router with one choice.
CANCELLED_SHARE = 1e-5
CANCELLED_FLOOR = 0.1
# Graphs, their backward and what it saves are made as for a GPU, operators run one by one.
TRACED = "aot_eager_decomp_partition"


class CheckFailedError(HeadraceError):
    """A check found a difference; the message names the first tensor."""


@dataclass(frozen=True)
class GradientCheck:
    """The worst gradient over all modes, and whose it is."""

    error: float
    parameter: str


def check_gradients(
    spec: ModelSpec, state: ModelState, model: nn.Module, *, compiled: bool = False
) -> GradientCheck:
    """Streamed gradients against plain autograd: rows and packed, kept, recomputed, in slices.

    Args:
        spec: the tiny model.
        state: its weights.
        model: the same as one module.
        compiled: unpacked rows through traced layers, too, kept and recomputed. Compilers have
            lost gradients without a word; the traced graphs are run as they are.

    Raises:
        CheckFailedError: a loss or a gradient differs.
    """
    worst = GradientCheck(0.0, "")
    for packed in (False, True):
        batches = make_batches(2, cuts=CUTS if packed else (), vocab_size=spec.vocab_size)
        wanted_loss, wanted = reference_gradients(model, batches)
        limits: dict[str, float] = {}
        modes: list[dict[str, Any]] = [{"activations": "keep"}, {"activations": "recompute"}]
        if compiled and not packed:
            modes += [{**mode, "compile": True, "compile_backend": TRACED} for mode in modes]
        if most_slices(spec) > 1:
            modes.append({"expert_slices": 2})
        for mode in modes:
            said = ", ".join(f"{name}: {value}" for name, value in mode.items())
            where = f"{'packed' if packed else 'unpacked'} rows, {said}"
            loss, found = streamed_gradients(spec, state, batches, **mode)
            if not math.isclose(loss, wanted_loss, rel_tol=2e-6, abs_tol=2e-6):
                # Rows of one document came first, and were right.
                what = "packed documents see each other: the loss" if packed else "the loss"
                raise CheckFailedError(f"{what} is {loss:.7f}, not {wanted_loss:.7f} ({where})")
            errors = relative_errors(found, wanted)
            for name, error in errors.items():
                if not error <= MAX_GRADIENT_ERROR:  # NaN is not either
                    limits = limits or _rounding_limits(model, batches, wanted)
                    if error <= limits[name]:
                        continue
                    raise CheckFailedError(
                        f"the gradient of {name} differs from plain autograd by {error:.2g} "
                        f"relative ({where})"
                    )
            name = max(errors, key=lambda key: errors[key])
            if errors[name] > worst.error:
                worst = GradientCheck(errors[name], name)
    return worst


def _rounding_limits(
    model: nn.Module, batches: Sequence[MicroBatch], wanted: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """What rounding alone does to the reference: its weights moved by one part in 2 ** 23.

    Deep or badly conditioned models amplify the last bit of a weight; no order of sums could
    agree more closely than the model agrees with itself.
    """
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in moved.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + sign * 2.0**-23)
    _, found = reference_gradients(moved, batches)
    errors = relative_errors(found, wanted)
    return {n: min(CONDITIONING * error, MAX_AMPLIFIED_ERROR) for n, error in errors.items()}


def check_auxiliary_loss(tiny: Any, before: GradientCheck) -> GradientCheck:
    """Gradients with the routers' balancing loss, large enough to lead, against the class's own.

    Args:
        tiny: the tiny configuration.
        before: the worst gradient so far.

    Raises:
        CheckFailedError: a gradient differs.
    """
    config = copy.deepcopy(tiny)
    config.output_router_logits = True
    config.router_aux_loss_coef = AUXILIARY_COEFFICIENT
    spec = ModelSpec.from_config(config)
    state = filled_state(spec)
    try:
        return max(
            before,
            check_gradients(spec, state, reference_model(spec, state)),
            key=lambda check: check.error,
        )
    finally:
        state.close()


def streamed_gradients(
    spec: ModelSpec, state: ModelState, batches: Sequence[MicroBatch], **settings: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one streamed step with poisoned slots; the weights stay."""
    config = EngineConfig(update_threads=1, poison_slots=True, weight_slots=2, **settings)
    # The plain kernel: where attention results cancel (DiffLlama) the fused one's rounding shows.
    with sdpa_kernel(SDPBackend.MATH), Engine(spec, state, "cpu", config) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        engine.updater.gradient_norm()  # waits for them
        found = {
            param.name: flat[param.slice].float().view(param.shape).clone()
            for unit, layout in enumerate(spec.units)
            for flat in (engine.updater.returned_gradient(unit),)
            for param in layout.params
            if param.trainable
        }
        engine.synchronize()
    return result.loss, found


def relative_errors(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Norm of each difference over the norm of what was wanted, by parameter."""
    squares = sum(float(g.double().square().sum()) for g in wanted.values())
    mean = math.sqrt(squares / sum(g.numel() for g in wanted.values()))
    errors = {}
    for name, value in found.items():
        reference = wanted[name].double()
        typical, norm = mean * math.sqrt(reference.numel()), float(reference.norm())
        share = CANCELLED_FLOOR if norm < CANCELLED_SHARE * typical else SMALLEST_SHARE
        errors[name] = float((value.double() - reference).norm()) / max(norm, share * typical)
    return errors


def packing_leak(spec: ModelSpec, state: ModelState) -> float:
    """Change one document: how much its neighbour's loss and gradients change, relative.

    Raises:
        CheckFailedError: more than rounding.
    """
    if spec.auxiliary_loss is not None:
        # The balancing loss is of a micro-batch as a whole, by its definition.
        spec = copy.copy(spec)
        assert spec.auxiliary_loss is not None
        spec.auxiliary_loss = replace(spec.auxiliary_loss, coefficient=0.0)
    runs = [
        streamed_gradients(spec, state, [_two_documents(spec, other=other)])
        for other in (False, True)
    ]
    (loss, gradients), (perturbed, others) = runs
    # Over the whole gradient: experts sum in an order that depends on the neighbour's tokens too.
    leak = max(abs(perturbed - loss) / abs(loss), _change(others, gradients))
    if not leak <= MAX_PACKING_LEAK and not leak <= _rounding_change(spec, state, gradients):
        raise CheckFailedError(
            "packed documents see each other: changing one changes its neighbour's gradients by "
            f"{leak:.2g} relative"
        )
    return leak


def _two_documents(spec: ModelSpec, *, other: bool = False) -> MicroBatch:
    """Rows of two documents, of which the second is supervised; ``other`` changes the first."""
    generator = torch.Generator().manual_seed(3)
    ids_BT = torch.randint(0, spec.vocab_size, (2, 14), generator=generator)
    if other:
        ids_BT[:, :7] = (ids_BT[:, :7] + 1) % spec.vocab_size
    return make_batch(ids_BT, cuts=(7,), first=7)


def _change(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference of two whole gradients over the norm of the second."""
    squares = [
        (float((found[n] - g).double().square().sum()), float(g.double().square().sum()))
        for n, g in wanted.items()
    ]
    return math.sqrt(sum(d for d, _ in squares) / sum(g for _, g in squares))


def _rounding_change(
    spec: ModelSpec, state: ModelState, wanted: Mapping[str, torch.Tensor]
) -> float:
    """The same for weights moved by one part in 2 ** 23: deep twins amplify any last bit."""
    moved = ModelState(spec.units, "float32")
    generator = torch.Generator().manual_seed(11)
    try:
        for before, after in zip(state.units, moved.units, strict=True):
            for param in before.layout.params:
                value = before.master(param)
                sign = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
                after.set_master(param, value * (1 + sign * 2.0**-23))
        _, found = streamed_gradients(spec, moved, [_two_documents(spec)])
    finally:
        moved.close()
    return _change(found, wanted)


def reload_error(spec: ModelSpec, state: ModelState, model: nn.Module) -> float:
    """Export, then load with transformers and with headrace: logits and weights must be equal.

    Raises:
        CheckFailedError: they are not.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow; only when needed

    with tempfile.TemporaryDirectory() as folder:
        out = export_pretrained(spec, state, Path(folder) / "model")
        again, info = AutoModelForCausalLM.from_pretrained(
            out,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        again.train()
        families.restore(again)
        for parameter in again.parameters():
            # Out of the file's mapping: matmuls round differently on memory aligned differently.
            parameter.data = parameter.data.clone()
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(kind):
                raise CheckFailedError(f"reloading an export has {kind}: {sorted(info[kind])[:3]}")
        (batch,) = make_batches(1, vocab_size=spec.vocab_size, seed=5)
        largest = 0.0
        with torch.no_grad():
            for ids_1T, _ in documents(batch):
                difference = logits_of(again, ids_1T) - logits_of(model, ids_1T)
                largest = max(largest, float(difference.abs().max()))
        if largest != 0.0:
            raise CheckFailedError(f"logits differ by {largest:.2g} after export and reload")
        loaded = ModelState(spec.units, "float32")
        try:
            load_pretrained(spec, loaded, out)
            for before, after in zip(state.units, loaded.units, strict=True):
                for param in before.layout.params:
                    if not torch.equal(before.master(param), after.master(param)):
                        raise CheckFailedError(f"{param.name} differs after export and reload")
        finally:
            loaded.close()
    return largest
