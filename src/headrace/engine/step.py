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
import time
from typing import TYPE_CHECKING, Self

import torch

from headrace.batch import IGNORE_INDEX, MicroBatch
from headrace.engine import agreement
from headrace.engine.accumulators import Accumulators
from headrace.engine.clipping import ClippingPolicy, clip_coefficient
from headrace.engine.config import AdamWConfig, EngineConfig
from headrace.engine.exchange import Exchange
from headrace.engine.exposure import Exposure
from headrace.engine.host_optimizer import UpdateSettings
from headrace.engine.lanes import Mark, indexed_device, random_delay
from headrace.engine.passes import Passes
from headrace.engine.refusals import checked_sections
from headrace.engine.results import EvalResult, StepResult
from headrace.engine.routing import StepRouting
from headrace.engine.sliced import SlicedLayers
from headrace.engine.trace import Tracer
from headrace.engine.update import Updater, check_finite_state
from headrace.engine.waves import Waves
from headrace.engine.windows import Windows
from headrace.errors import ConfigError, DataError
from headrace.models.capture import CallCapture
from headrace.models.compiling import CompileCounts, Compiler
from headrace.models.scores import ScoreRecorder, TokenScores
from headrace.models.templates import Templates
from headrace.parallel.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine.agreement import GlobalBatch
    from headrace.models.spec import ModelSpec
    from headrace.store.state import ModelState

MAX_SKIPPED_IN_A_ROW = 20


class Engine:
    """Trains one model by streaming its units through slots on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        state: ModelState,
        device: torch.device | str = "cpu",
        config: EngineConfig | None = None,
        optimizer: AdamWConfig | None = None,
        *,
        dropout_seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        """Allocate slots and start the lanes.

        Args:
            spec: the model's structure.
            state: its weights and moments; the engine updates it in place.
            device: where compute runs.
            config: how a step runs.
            optimizer: AdamW's settings.
            dropout_seed: of what adapters with dropout drop in :meth:`step`, and nowhere else.
            ranks: that train together, each with its shard of the state; every one of them calls
                every method alike, each with its own micro-batches. None for one alone.

        Raises:
            CapacityError: host or device memory will not do.
        """
        self.spec = spec
        self.state = state
        self.device = indexed_device(torch.device(device))
        self.config = config or EngineConfig()
        self._dropout_seed = dropout_seed
        self.ranks = ranks or Ranks()
        assert state.share.num_ranks == self.ranks.size, "the state is sharded otherwise"
        sections = checked_sections(self.config, spec, state)
        # On the CPU a bf16 model computes in fp32, upcast as it enters the slot: bf16 matmuls are
        # 10x slower on processors without bf16 units.
        cuda = self.device.type == "cuda"
        bfloat16 = state.dtype == "bfloat16" and cuda
        self.compute_dtype = torch.bfloat16 if bfloat16 else torch.float32
        compiles = self.config.compiles_on(self.device.type)
        self._compiler = Compiler(self.config.compile_backend) if compiles else None
        templates = Templates(
            spec,
            compiler=self._compiler,
            device=self.device,
            sliced={i: e for i, e in spec.experts.items() if len(sections[1 + i]) > 1},
        )
        self._passes = Passes(
            spec,
            CallCapture(spec, self.device),
            templates,
            loss_chunk_tokens=self.config.loss_chunk_tokens,
            compiler=self._compiler,
        )
        jitter = random_delay(self.config.lane_jitter_seconds)
        self._tracer = Tracer.wanted(self.config, self.device)
        self._exposure = Exposure(self.device, self._tracer)
        self._exchange: Exchange | None = None
        if self.ranks.size > 1:
            self._exchange = Exchange(
                self.ranks, state, self.config, self.device, jitter, tracer=self._tracer
            )
        self.updater = Updater(
            state,
            optimizer or AdamWConfig(),
            self.config,
            self.device,
            jitter,
            tracer=self._tracer,
            exchange=self._exchange,
            sections=sections,
        )
        self._windows = Windows(
            state,
            self.updater,
            self.config,
            device=self.device,
            dtype=self.compute_dtype,
            exposure=self._exposure,
            jitter=jitter,
            sections=sections,
            exchange=self._exchange,
        )
        self._accumulators = Accumulators(
            sections,
            state.share,
            num_slots=self.config.gradient_slots,
            device=self.device,
            exposure=self._exposure,
        )
        self._waves = Waves(
            spec,
            self.config,
            self._passes,
            SlicedLayers(spec, templates, sections),
            sections=sections,
            windows=self._windows,
            accumulators=self._accumulators,
            updater=self.updater,
            device=self.device,
            exposure=self._exposure,
            jitter=jitter,
        )
        self._clipping = ClippingPolicy(self.config.clipping, host_computes=not cuda)
        self._skipped_in_a_row = 0
        self.num_skipped_steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Lanes of a rank that fails may wait for others for as long as its process lives.
        if kind is None or self.ranks.size == 1:
            self.close()

    def close(self) -> None:
        """Finish queued updates and end the lanes; the state stays valid."""
        self._waves.close()
        self._windows.close()
        self.updater.close()
        if self._exchange is not None:
            self._exchange.close()
        if self._tracer is not None:
            self._tracer.close()

    def synchronize(self) -> None:
        """Wait until the state holds every update; call before reading or saving it."""
        self.updater.synchronize()

    @property
    def compile_counts(self) -> CompileCounts | None:
        """Graphs and eager calls so far; None when layers are not compiled."""
        return None if self._compiler is None else self._compiler.counts

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
            micro_batches: at least one; their supervised tokens are weighted alike. Of several
                ranks, this one's part, also none: micro-batch ``m`` of rank ``r`` is number
                ``m * num_ranks + r`` of the global batch.
            learning_rate: of this step.
            max_grad_norm: clip the 2-norm of the whole gradient; None or 0 for no clipping.

        Raises:
            DataError: no token of the batch is supervised.
            NumericsError: gradients were non-finite for many steps in a row.
            LaneError: a transfer or update failed.
        """
        given, whole = micro_batches, self._whole(micro_batches)
        micro_batches, num_supervised = whole.micro_batches, whole.num_supervised
        if num_supervised == 0:
            raise DataError(
                f"no token of update {self.state.optimizer_step + 1} is supervised: every target "
                "of its micro-batches is -100",
                remedy="leave rows without targets out: in chats whose answers are cut off, raise "
                "max_length",
            )
        self._exposure.begin_step(self.state.optimizer_step + 1)
        begun = time.perf_counter()
        step = self.state.optimizer_step + 1
        clipping = max_grad_norm is not None and max_grad_norm > 0
        early = None
        if not clipping or self._clipping.may_update_early(step):
            early = UpdateSettings(step=step, learning_rate=learning_rate)
        routing = StepRouting(
            self.spec.auxiliary_loss,
            [batch.num_supervised_tokens / num_supervised for batch in micro_batches],
            num_counted=whole.num_own,
        )
        loss_sum = self._waves.forward_backward(
            micro_batches,
            scale=1.0 / num_supervised,
            early=early,
            routing=routing,
            dropout_seeds=self._dropout_seeds(given, micro_batches, step),
        )
        Mark.here(self.device).synchronize()
        self._exposure.end_compute()
        # From here on the host waits for what is left of the return.
        waiting = time.perf_counter()
        norm = self.updater.gradient_norm()
        ended = time.perf_counter()
        self._exposure.seconds["d2h"] += ended - waiting
        (all_losses,) = self.ranks.sums([float(loss_sum)])
        loss = all_losses / num_supervised
        routed = routing.report(self.ranks)
        skipped = not math.isfinite(norm)
        coefficient = clip_coefficient(norm, max_grad_norm)
        self.updater.settle(
            norm,
            UpdateSettings(
                step=step,
                learning_rate=learning_rate,
                gradient_scale=coefficient,
                # No element exceeds the norm; the margin covers the norm's own rounding.
                largest_gradient=1.001 * norm,
            ),
        )
        if clipping and not skipped:
            self._clipping.observe(
                coefficient=coefficient,
                exposed_update=self._exposure.seconds["update"],
                step_seconds=ended - begun,
            )
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self.num_skipped_steps += skipped
        check_finite_state(norm, self._skipped_in_a_row, MAX_SKIPPED_IN_A_ROW)
        return StepResult(
            loss=loss,
            num_supervised_tokens=num_supervised,
            num_tokens=whole.num_tokens,
            grad_norm=norm,
            skipped=skipped,
            exposed_seconds=dict(self._exposure.seconds),
            auxiliary_loss=routed.auxiliary_loss,
            busiest_expert=routed.busiest,
            num_idle_experts=routed.num_idle,
        )

    def shrink_waves(self, num_micro_batches: int) -> int | None:
        """After a step that ran out of device memory: take smaller waves from here on.

        Args:
            num_micro_batches: of that step.

        Returns:
            Micro-batches of a wave, with which the same step may be tried again; or None: waves
            cannot be smaller, or updates were applied before the norm was known, so that the
            step cannot be repeated exactly, or other ranks are in the middle of it.
        """
        if self.ranks.size > 1:
            return None
        size = self._waves.size(num_micro_batches)
        if not self.updater.abandon() or size == 1:
            return None
        self._waves.restart(per_wave=size // 2)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        return size // 2

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Cross-entropy of ``micro_batches``, of all ranks', without gradients, wave by wave."""
        whole = self._whole(micro_batches)
        loss_sum = 0.0
        for batches, hidden in self._waves.forward_only(whole.micro_batches):
            for batch, hidden_BTD in zip(batches, hidden, strict=True):
                windows = self._windows
                loss = self._passes.head_loss(windows.head, windows.embed, hidden_BTD, batch)
                loss_sum += float(loss)
        self._windows.release_ends()
        (loss_sum,) = self.ranks.sums([loss_sum])
        return EvalResult(loss_sum=loss_sum, num_supervised_tokens=whole.num_supervised)

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[TokenScores]:
        """Log-probability of every target of each micro-batch, without gradients.

        Several ranks give as many micro-batches each.
        """
        scores = []
        for batches, hidden in self._waves.forward_only(micro_batches):
            for batch, hidden_BTD in zip(batches, hidden, strict=True):
                windows, seen = self._windows, ScoreRecorder(self.spec.logit_rule)
                self._passes.head_loss(windows.head, windows.embed, hidden_BTD, batch, seen)
                scores.append(seen.result(batch.targets_BT.shape))
        self._windows.release_ends()
        return scores

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
            raise ConfigError(
                f"layer {layer} is asked for, and the model has {num_layers}",
                remedy=f"a number from {-num_layers - 1} to {num_layers}; -1 is the last",
            )
        if position_ids_BT is None:
            position_ids_BT = torch.arange(input_ids_BT.shape[1]).expand_as(input_ids_BT)
        batch = MicroBatch(
            input_ids_BT=input_ids_BT,
            targets_BT=torch.full_like(input_ids_BT, IGNORE_INDEX),
            position_ids_BT=position_ids_BT,
        )
        ((_, hidden),) = self._waves.forward_only([batch], num_layers=index)
        result_BTD = hidden[0]
        if index == num_layers:
            result_BTD = self._passes.final_norm(
                self._windows.head, self._windows.embed, result_BTD
            )
        self._windows.release_ends()
        return result_BTD.float().cpu()

    def _dropout_seeds(
        self, given: Sequence[MicroBatch], run: Sequence[MicroBatch], step: int
    ) -> Sequence[torch.Tensor] | None:
        """Of each micro-batch that is run, on the device."""
        if not self.spec.drops:
            return None
        seeds = agreement.dropout_seeds(
            self.ranks,
            given,
            run,
            seed=self._dropout_seed,
            step=step,
            num_layers=self.spec.num_layers,
        )
        return [seeds_LB.to(self.device, non_blocking=True) for seeds_LB in seeds]

    def _whole(self, micro_batches: Sequence[MicroBatch]) -> GlobalBatch:
        return agreement.agree_on_batch(self.ranks, self._cut(micro_batches))

    def _cut(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        rows = self.config.rows_per_micro_batch
        if rows is None:
            return micro_batches
        return [part for batch in micro_batches for part in batch.split(rows)]
