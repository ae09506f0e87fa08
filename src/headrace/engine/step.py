"""The streamed training step.

A step's micro-batches are grouped in waves. Within a wave the engine goes layer by layer and runs
every micro-batch through a layer before the next one, so a layer is sent once for forward and at
most once for backward however many micro-batches there are.

Invariants: every micro-batch of a step sees the same version of every weight; an update consumes
the complete gradient of the global batch, normalised by its number of supervised tokens; a unit is
sent only after its update. The CPU runs the same schedule, slots and lanes as a GPU.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch

from headrace.batch import IGNORE_INDEX, MicroBatch
from headrace.engine.config import AdamWConfig, EngineConfig
from headrace.engine.lanes import Lane, Mark
from headrace.engine.passes import DeviceBatch, LayerRecord, Passes
from headrace.engine.schedule import fetches_after, plan_uses, split_waves
from headrace.engine.slots import GradientSlot, Slot
from headrace.engine.update import Updater, UpdateSettings, check_finite_state, clip_coefficient
from headrace.errors import ConfigError, DataError
from headrace.models.attention import pinned_backend
from headrace.models.capture import CallCapture
from headrace.models.templates import Templates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from headrace.engine.schedule import Use
    from headrace.models.capture import LayerArguments
    from headrace.models.spec import ModelSpec
    from headrace.store.state import ModelState

MAX_SKIPPED_IN_A_ROW = 20


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did.

    Attributes:
        loss: mean cross-entropy over the global batch's supervised tokens (nats a token).
        num_supervised_tokens: positions with a target.
        num_tokens: positions, padding included.
        grad_norm: 2-norm of the gradient before clipping.
        skipped: the gradient was not finite and the state is as before.
        exposed_seconds: time compute waited, by lane.
    """

    loss: float
    num_supervised_tokens: int
    num_tokens: int
    grad_norm: float
    skipped: bool
    exposed_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Summed cross-entropy (nats) and the number of supervised tokens behind it."""

    loss_sum: float
    num_supervised_tokens: int


class Engine:
    """Trains one model by streaming its units through slots on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        state: ModelState,
        device: torch.device | str = "cpu",
        config: EngineConfig | None = None,
        optimizer: AdamWConfig | None = None,
    ) -> None:
        """Allocate slots and start the lanes.

        Args:
            spec: the model's structure.
            state: its weights and moments; the engine updates it in place.
            device: where compute runs.
            config: how a step runs.
            optimizer: AdamW's settings.

        Raises:
            CapacityError: host or device memory will not do.
        """
        self.spec = spec
        self.state = state
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.config = config or EngineConfig()
        # On the CPU a bf16 model computes in fp32, upcast as it enters the slot: bf16 matmuls are
        # 10x slower on processors without bf16 units.
        cuda = self.device.type == "cuda"
        bfloat16 = state.dtype == "bfloat16" and cuda
        self.compute_dtype = torch.bfloat16 if bfloat16 else torch.float32
        compile_layers = cuda if self.config.compile is None else self.config.compile
        self._passes = Passes(
            spec,
            CallCapture(spec, self.device),
            Templates(spec, compile_layers=compile_layers, backend=self.config.compile_backend),
            loss_chunk_tokens=self.config.loss_chunk_tokens,
            compile_loss=self.config.compile_backend if compile_layers else None,
        )
        layouts = spec.units
        layer_size = max(layout.size for layout in layouts[1:-1])
        num_slots = min(self.config.weight_slots, spec.num_layers + 1)
        self._slots = [self._slot(layer_size) for _ in range(max(2, num_slots))]
        self._embed_slot = self._slot(layouts[0].size)
        self._head_slot = self._slot(layouts[-1].size)
        self._embed_gradient: GradientSlot | None = None
        self._head_gradient: GradientSlot | None = None
        self._layer_gradients: list[GradientSlot] = []
        jitter = _jitter(self.config.lane_jitter_seconds)
        self._h2d = Lane(
            "h2d", self.device, timeout_seconds=self.config.lane_timeout_seconds, jitter=jitter
        )
        self.updater = Updater(state, optimizer or AdamWConfig(), self.config, self.device, jitter)
        self._exposed: dict[str, float] = {}
        self._skipped_in_a_row = 0
        self.num_skipped_steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish queued updates and end the lanes; the state stays valid."""
        self._h2d.close()
        self.updater.close()

    def synchronize(self) -> None:
        """Wait until the state holds every update; call before reading or saving it."""
        self.updater.synchronize()

    # -- public passes ---------------------------------------------------------------------

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        max_grad_norm: float | None = None,
    ) -> StepResult:
        """One optimizer step over the global batch ``micro_batches``.

        Args:
            micro_batches: at least one; their supervised tokens are weighted alike.
            learning_rate: of this step.
            max_grad_norm: clip the 2-norm of the whole gradient; None or 0 for no clipping.

        Raises:
            DataError: no token of the batch is supervised.
            NumericsError: gradients were non-finite for many steps in a row.
            LaneError: a transfer or update failed.
        """
        num_supervised = sum(batch.num_supervised_tokens for batch in micro_batches)
        if num_supervised == 0:
            raise DataError("no token of this step's batch is supervised: every target is -100")
        self._exposed = {"h2d": 0.0, "update": 0.0, "d2h": 0.0}
        settings = UpdateSettings(
            step=self.state.optimizer_step + 1, learning_rate=learning_rate, gradient_scale=1.0
        )
        clipping = max_grad_norm is not None and max_grad_norm > 0
        loss_sum = self._forward_backward(
            micro_batches, scale=1.0 / num_supervised, overlap=None if clipping else settings
        )
        started = time.perf_counter()
        norm = self.updater.gradient_norm()
        self._exposed["d2h"] += time.perf_counter() - started
        loss = float(loss_sum) / num_supervised
        skipped = not math.isfinite(norm)
        if not clipping:
            self.updater.finish_overlapped(norm, settings)
        elif not skipped:
            scale = clip_coefficient(norm, max_grad_norm)
            self.updater.apply_all(
                UpdateSettings(
                    step=settings.step, learning_rate=learning_rate, gradient_scale=scale
                )
            )
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self.num_skipped_steps += skipped
        check_finite_state(norm, self._skipped_in_a_row, MAX_SKIPPED_IN_A_ROW)
        return StepResult(
            loss=loss,
            num_supervised_tokens=num_supervised,
            num_tokens=sum(batch.num_tokens for batch in micro_batches),
            grad_norm=norm,
            skipped=skipped,
            exposed_seconds=dict(self._exposed),
        )

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Cross-entropy of ``micro_batches`` without gradients, wave by wave."""
        loss_sum = 0.0
        num_supervised = 0
        for batches, hidden in self._forward_only(micro_batches):
            for batch, hidden_BTD in zip(batches, hidden, strict=True):
                loss_sum += float(
                    self._passes.head_loss(self._head_slot, self._embed_slot, hidden_BTD, batch)
                )
        num_supervised = sum(batch.num_supervised_tokens for batch in micro_batches)
        self._release_ends()
        return EvalResult(loss_sum=loss_sum, num_supervised_tokens=num_supervised)

    def hidden_states(
        self,
        input_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor | None = None,
        layer: int = -1,
    ) -> torch.Tensor:
        """Hidden states ``(B, T, D)`` in float32 on the CPU, right-padded rows allowed.

        Args:
            input_ids_BT: int64.
            position_ids_BT: int64; counts from 0 by default.
            layer: as Hugging Face counts ``hidden_states``: 0 is the embedding, ``i`` the output
                of the i-th layer, -1 or the number of layers the last one after the final norm.
        """
        num_layers = self.spec.num_layers
        index = layer + num_layers + 1 if layer < 0 else layer
        if not 0 <= index <= num_layers:
            raise ConfigError(f"layer {layer} of a model with {num_layers} layers")
        if position_ids_BT is None:
            position_ids_BT = torch.arange(input_ids_BT.shape[1]).expand_as(input_ids_BT)
        batch = MicroBatch(
            input_ids_BT=input_ids_BT,
            targets_BT=torch.full_like(input_ids_BT, IGNORE_INDEX),
            position_ids_BT=position_ids_BT,
        )
        ((_, hidden),) = self._forward_only([batch], num_layers=index)
        result_BTD = hidden[0]
        if index == num_layers:
            result_BTD = self._passes.final_norm(self._head_slot, self._embed_slot, result_BTD)
        self._release_ends()
        return result_BTD.float().cpu()

    # -- the step's body -------------------------------------------------------------------

    def _forward_only(
        self, micro_batches: Sequence[MicroBatch], num_layers: int | None = None
    ) -> Iterator[tuple[list[DeviceBatch], list[torch.Tensor]]]:
        waves = split_waves(len(micro_batches), self.config.micro_batches_per_wave)
        layers = self.spec.num_layers if num_layers is None else num_layers
        with pinned_backend(deterministic=self.config.deterministic):
            self._fetch_ends()
            runner = _Runner(self, self._plan(layers, len(waves), backward=False))
            for wave in waves:
                batches = [self._to_device(micro_batches[m]) for m in wave]
                hidden, arguments = self._embed_all(batches)
                for index, use in runner.take(layers):
                    slot = runner.enter(index, use)
                    for m in range(len(batches)):
                        hidden[m], _ = self._passes.layer_forward(
                            use.layer, slot, hidden[m], arguments[m][use.layer], keep=False
                        )
                    runner.leave(index, use)
                self._wait(self._head_slot)
                yield batches, hidden

    def _forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        scale: float,
        overlap: UpdateSettings | None,
    ) -> torch.Tensor:
        waves = split_waves(len(micro_batches), self.config.micro_batches_per_wave)
        self._prepare_gradients(num_waves=len(waves))
        assert self._embed_gradient is not None
        assert self._head_gradient is not None
        num_layers = self.spec.num_layers
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        with pinned_backend(deterministic=self.config.deterministic):
            self._fetch_ends()
            runner = _Runner(self, self._plan(num_layers, len(waves), backward=True))
            for number, wave in enumerate(waves):
                first, last = number == 0, number == len(waves) - 1
                batches = [self._to_device(micro_batches[m]) for m in wave]
                hidden, arguments = self._embed_all(batches)
                records = self._forward_layers(runner, hidden, arguments)
                gradients = self._head(batches, hidden, scale, loss_sum, first=first)
                del hidden
                if last:
                    self.updater.return_gradient(num_layers + 1, self._head_gradient, overlap)
                self._backward_layers(
                    runner, records, arguments, gradients, first=first, overlap=overlap, last=last
                )
                for m, batch in enumerate(batches):
                    self._passes.embed_backward(
                        self._embed_slot,
                        batch,
                        gradients[m],
                        self._embed_gradient,
                        first=first and m == 0 and not self.spec.tied,
                    )
            self.updater.return_gradient(0, self._embed_gradient, overlap)
            self._release_ends()
        return loss_sum

    def _embed_all(
        self, batches: list[DeviceBatch]
    ) -> tuple[list[torch.Tensor], list[list[LayerArguments]]]:
        self._wait(self._embed_slot)
        pairs = [self._passes.embed(self._embed_slot, batch) for batch in batches]
        return [hidden for hidden, _ in pairs], [arguments for _, arguments in pairs]

    def _forward_layers(
        self,
        runner: _Runner,
        hidden: list[torch.Tensor],
        arguments: list[list[LayerArguments]],
    ) -> list[list[LayerRecord]]:
        keep = self.config.activations == "keep"
        records: list[list[LayerRecord]] = []
        for index, use in runner.take(self.spec.num_layers):
            slot = runner.enter(index, use)
            row = []
            for m in range(len(hidden)):
                hidden[m], record = self._passes.layer_forward(
                    use.layer, slot, hidden[m], arguments[m][use.layer], keep=keep
                )
                row.append(record)
            records.append(row)
            runner.leave(index, use)
        return records

    def _head(
        self,
        batches: list[DeviceBatch],
        hidden: list[torch.Tensor],
        scale: float,
        loss_sum: torch.Tensor,
        *,
        first: bool,
    ) -> list[torch.Tensor]:
        assert self._embed_gradient is not None
        assert self._head_gradient is not None
        self._wait(self._head_slot)
        if first:
            self._reuse(self._head_gradient).flat.zero_()
            self._reuse(self._embed_gradient)
            if self.spec.tied:
                self._embed_gradient.flat.zero_()
        gradients = []
        for m, batch in enumerate(batches):
            loss, gradient_BTD = self._passes.head_forward_backward(
                self._head_slot,
                self._embed_slot,
                hidden[m],
                batch,
                scale=scale,
                head_accumulator=self._head_gradient,
                embed_accumulator=self._embed_gradient,
            )
            loss_sum += loss
            gradients.append(gradient_BTD)
        return gradients

    def _backward_layers(
        self,
        runner: _Runner,
        records: list[list[LayerRecord]],
        arguments: list[list[LayerArguments]],
        gradients: list[torch.Tensor],
        *,
        first: bool,
        last: bool,
        overlap: UpdateSettings | None,
    ) -> None:
        for index, use in runner.take(self.spec.num_layers):
            slot = runner.enter(index, use)
            accumulator = self._layer_gradients[use.layer % len(self._layer_gradients)]
            if first:
                self._reuse(accumulator)
            row = records.pop()
            for m in range(len(gradients)):
                gradients[m] = self._passes.layer_backward(
                    use.layer,
                    slot,
                    row[m],
                    arguments[m][use.layer],
                    gradients[m],
                    accumulator=accumulator,
                    first=first and m == 0,
                )
            runner.leave(index, use)
            if last:
                self.updater.return_gradient(1 + use.layer, accumulator, overlap)

    # -- slots -----------------------------------------------------------------------------

    def _slot(self, size: int) -> Slot:
        return Slot(size, self.compute_dtype, self.device)

    def _plan(self, num_layers: int, num_waves: int, *, backward: bool) -> list[Use]:
        return plan_uses(
            num_layers,
            num_waves,
            len(self._slots),
            backward=backward,
            reuse=not self.config.poison_slots,
        )

    def _fetch_ends(self) -> None:
        self.fetch(0, self._embed_slot)
        self.fetch(self.spec.num_layers + 1, self._head_slot)

    def _release_ends(self) -> None:
        for slot in (self._embed_slot, self._head_slot):
            slot.free = Mark.here(self.device)

    def fetch(self, unit: int, slot: Slot) -> None:
        """Queue the transfer of a unit's weights into a slot."""
        source = self.state.units[unit].weights
        target = slot.flat[: source.numel()]
        poison = self.config.poison_slots

        def work() -> None:
            if poison:
                slot.poison()
            target.copy_(source, non_blocking=True)

        slot.ready = self._h2d.submit(work, [self.updater.updated[unit], slot.free])

    def _wait(self, slot: Slot) -> None:
        assert slot.ready is not None
        started = time.perf_counter()
        slot.ready.wait_on_stream()
        ended = time.perf_counter()
        # What was spent before the copy could start was spent on the unit's update.
        copying = min(max(slot.ready.work_started or started, started), ended)
        self._exposed["update"] = self._exposed.get("update", 0.0) + copying - started
        self._exposed["h2d"] = self._exposed.get("h2d", 0.0) + ended - copying

    def _reuse(self, slot: GradientSlot) -> GradientSlot:
        if slot.returned is not None:
            started = time.perf_counter()
            slot.returned.wait_on_stream()
            self._exposed["d2h"] += time.perf_counter() - started
            slot.returned = None
        return slot

    def _prepare_gradients(self, *, num_waves: int) -> None:
        layouts = self.spec.units
        if self._embed_gradient is None:
            self._embed_gradient = GradientSlot(layouts[0].num_trainable, self.device)
            self._head_gradient = GradientSlot(layouts[-1].num_trainable, self.device)
        # Several waves sum gradients of every layer until the last one; one wave needs a few.
        wanted = self.spec.num_layers
        if num_waves == 1:
            wanted = min(self.config.gradient_slots, wanted)
        if len(self._layer_gradients) < wanted:
            for slot in self._layer_gradients:
                self._reuse(slot)
            size = max(layout.num_trainable for layout in layouts[1:-1])
            self._layer_gradients = [GradientSlot(size, self.device) for _ in range(wanted)]

    def _to_device(self, batch: MicroBatch) -> DeviceBatch:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, non_blocking=True)

        return DeviceBatch(
            input_ids_BT=move(batch.input_ids_BT),
            targets_BT=move(batch.targets_BT),
            position_ids_BT=move(batch.position_ids_BT),
            cu_seqlens=None if batch.cu_seqlens is None else move(batch.cu_seqlens),
        )


class _Runner:
    """Walks a plan: issues transfers as slots become free, hands out filled slots."""

    def __init__(self, engine: Engine, plan: list[Use]) -> None:
        self._engine = engine
        self._plan = plan
        self._issue = fetches_after(plan)
        self._next = 0
        self._start(-1)

    def take(self, count: int) -> Iterator[tuple[int, Use]]:
        """The next ``count`` uses with their indices."""
        for index in range(self._next, self._next + count):
            self._next = index + 1
            yield index, self._plan[index]

    def enter(self, index: int, use: Use) -> Slot:
        """The slot that holds the use's layer, filled."""
        assert self._plan[index] is use
        slot = self._engine._slots[use.slot]  # noqa: SLF001 - one class in two halves
        if use.fetch:
            self._engine._wait(slot)  # noqa: SLF001
        return slot

    def leave(self, index: int, use: Use) -> None:
        """The use is over: its slot may be refilled after this point of the compute stream."""
        slot = self._engine._slots[use.slot]  # noqa: SLF001
        slot.free = Mark.here(self._engine.device)
        self._start(index)

    def _start(self, done: int) -> None:
        for index in self._issue.get(done, ()):
            use = self._plan[index]
            self._engine.fetch(1 + use.layer, self._engine._slots[use.slot])  # noqa: SLF001


def _jitter(seconds: float) -> Callable[[], float] | None:
    if seconds <= 0:
        return None
    rng = random.Random(0)  # noqa: S311 - delays, not secrets
    return lambda: rng.uniform(0.0, seconds)
