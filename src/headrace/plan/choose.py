"""Which settings a run should use, and the smallest change that would make it fit.

Tries every activation mode and number of waves, keeps the fastest that fits; where none does, it
plans again under one change at a time and reports those that help, smallest first. Pure: plans
are compared, nothing is run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.errors import ConfigError
from headrace.plan.machine import Rate, card_names, describe_machine
from headrace.plan.memory import HOST_SLACK, Footprint, fits, footprint, usable_device, usable_host
from headrace.plan.slices import most_slices
from headrace.plan.speed import Speed, predict_speed
from headrace.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.plan.architecture import Architecture
    from headrace.plan.job import Activations, Features, Job
    from headrace.plan.machine import Machine


_ADAPTER_RANK = 16  # of the change that trains adapters


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a job, with what it needs and how fast it goes."""

    activations: Activations
    waves: int
    slices: int
    need: Footprint
    speed: Speed
    fits: bool
    over: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that makes a job fit.

    Attributes:
        what: the change in words.
        setting: the flag or YAML key that makes it.
        available: this version of the engine can do it.
        choice: how the job then runs.
    """

    what: str
    setting: str
    available: bool
    choice: Choice


def _wave_counts(num_micro_batches: int) -> Iterator[int]:
    """Numbers of waves that give waves of different sizes, fewest first."""
    seen = set()
    for waves in range(1, num_micro_batches + 1):
        size = -(-num_micro_batches // waves)
        if size not in seen:
            seen.add(size)
            yield -(-num_micro_batches // size)


def choices(
    model: Architecture, job: Job, machine: Machine, features: Features
) -> Iterator[Choice]:
    """Every activation mode and number of waves that ``job`` leaves open, whole layers."""
    modes: tuple[Activations, ...] = (
        ("keep", "recompute") if job.activations is None else (job.activations,)
    )
    micro_batches = job.num_micro_batches(machine.num_gpus)
    counts = [job.waves] if job.waves is not None else list(_wave_counts(micro_batches))
    for mode in modes:
        for count in counts:
            waves = min(count, micro_batches)
            need = footprint(model, job, machine, features, activations=mode, waves=waves)
            good, over = fits(need, machine)
            yield Choice(
                activations=mode,
                waves=waves,
                slices=job.expert_slices or 1,
                need=need,
                speed=predict_speed(model, job, machine, activations=mode, waves=waves),
                fits=good,
                over=tuple(over),
            )


def choose(model: Architecture, job: Job, machine: Machine, features: Features) -> Choice:
    """The fastest choice that fits; where none does, the one that overflows least.

    Experts are sent in slices where nothing fits without, in as few as fit.

    Raises:
        ConfigError: ``job`` asks for slices that a layer cannot be cut in.
    """

    def overflow(choice: Choice) -> float:
        device = choice.need.device_bytes - usable_device(machine)
        limit = usable_host(machine)
        host = 0 if limit is None else choice.need.host_bytes - limit
        if machine.is_cpu:
            return max(0, host + choice.need.device_bytes)
        return max(0, device) + max(0, host)

    def order(choice: Choice) -> tuple[bool, float]:
        return not choice.fits, choice.speed.step_seconds if choice.fits else overflow(choice)

    found: list[Choice] = []
    for count in _slice_counts(model, job):
        sliced = replace(job, expert_slices=count)
        found.append(min(choices(model, sliced, machine, features), key=order))
        if found[-1].fits:
            break
    return min(found, key=order)


def _slice_counts(model: Architecture, job: Job) -> list[int]:
    """Numbers of slices of experts to try, the fewest first."""
    most, given = most_slices(model), job.expert_slices
    if job.trained is not None and job.trained.adapts_experts:
        if (given or 1) > 1:
            raise ConfigError(
                f"engine.expert_slices is {given}, but experts have adapters, which are sent with "
                "their layer",
                remedy="leave it out, or lora_target_parameters",
            )
        most = 1
    if given is None:
        return [*itertools.takewhile(lambda n: n < most, (1 << p for p in itertools.count())), most]
    if given > most:
        raise ConfigError(
            f"engine.expert_slices is {given}, and here the experts of a layer can be sent in at "
            f"most {most}",
            remedy="leave it out: only layers of experts can be cut, as many times as they have "
            "experts",
        )
    return [given]


def _more_host(machine: Machine, choice: Choice) -> Machine:
    """The least host memory with which a choice fits, state that the cards cannot hold included."""
    need = choice.need.host_bytes
    if machine.is_cpu:
        need += choice.need.device_bytes
    else:
        over = max(0, choice.need.device_bytes - usable_device(machine)) * machine.num_gpus
        need += min(over, choice.need.spilled)
    gib = -(-round(need / (1 - HOST_SLACK)) // GIB) + 1
    return replace(machine, host_bytes=Rate(value=float(gib * GIB), origin="given"))


def _candidates(
    job: Job, machine: Machine, features: Features, at: Choice
) -> Iterator[tuple[str, str, bool, Job, Machine, Features]]:
    """Single changes, smallest first: settings, then memory, then other hardware."""
    if job.activations == "keep":
        yield (
            "recompute activations",
            "engine.activations: recompute",
            True,
            replace(job, activations=None),
            machine,
            features,
        )
    if job.waves is not None:
        yield (
            "let the plan choose the size of a wave",
            "engine.micro_batches_per_wave",
            True,
            replace(job, waves=None),
            machine,
            features,
        )
    if job.micro_batch > 1:
        yield (
            "one sequence a micro-batch",
            "per_device_train_batch_size: 1",
            True,
            replace(job, micro_batch=1),
            machine,
            features,
        )
    for tokens in (job.tokens_per_step // 2, job.tokens_per_step // 4, job.tokens_per_step // 8):
        if tokens >= job.micro_batch_tokens * machine.num_gpus:
            yield (
                f"{tokens} tokens a step, fewer gradient_accumulation_steps",
                f"--tokens-per-step {tokens}",
                True,
                replace(job, tokens_per_step=tokens),
                machine,
                features,
            )
    for length in (job.max_length // 2, job.max_length // 4, job.max_length // 8):
        if length >= 512:
            yield (
                f"sequences of {length} tokens",
                f"max_length: {length}",
                True,
                replace(job, max_length=length),
                machine,
                features,
            )
    wider = replace(features, state_on_device=True)
    if not features.state_on_device and not machine.is_cpu:
        yield (
            "optimizer state that the host cannot hold in spare device memory",
            "placement of optimizer state",
            False,
            job,
            machine,
            wider,
        )
    for moments in ("bfloat16", "8bit"):
        if job.moments == "float32" or (job.moments == "bfloat16" and moments == "8bit"):
            for base, also in ((features, ""), (wider, " and state in spare device memory")):
                if base is wider and (features.state_on_device or machine.is_cpu):
                    continue
                yield (
                    f"{moments} moments{also}",
                    f"--moments {moments}",
                    moments in features.moments and base is features,
                    replace(job, moments=moments),
                    machine,
                    base,
                )
    if "host" in at.over or at.need.spilled:
        larger = _more_host(machine, at)
        assert larger.host_bytes is not None
        size = round(larger.host_bytes.value / GIB)
        yield (
            f"{size} GiB of host memory",
            f"--host-memory {size}GiB",
            True,
            job,
            larger,
            features,
        )
    if "device" in at.over:
        cards = [
            describe_machine(
                gpu=name,
                num_gpus=machine.num_gpus,
                host_bytes=machine.host_bytes,
                disk_bytes=machine.disk_bytes,
                cores=machine.cores,
            )
            for name in card_names()
        ]
        for card in sorted(cards, key=lambda c: c.memory_bytes.value):
            if card.memory_bytes.value > machine.memory_bytes.value:
                yield (
                    f"a larger card: {card.title}",
                    f"--gpu {card.gpu}",
                    True,
                    job,
                    card,
                    features,
                )
    if job.trains_all:
        yield (
            f"adapters of rank {_ADAPTER_RANK} in place of all weights",
            "adapter: lora",
            True,
            replace(job, lora_rank=_ADAPTER_RANK),
            machine,
            features,
        )


def find_changes(
    model: Architecture, job: Job, machine: Machine, features: Features, at: Choice
) -> list[Change]:
    """Changes that make ``job`` fit, those of this version first, each class smallest first.

    At most one change of memory or card is kept, the smallest; a change that helps only together
    with another is not reported.
    """
    found: list[Change] = []
    kinds: set[str] = set()
    for what, setting, available, new_job, new_machine, new_features in _candidates(
        job, machine, features, at
    ):
        kind = setting.split(" ")[0]
        if kind in kinds:
            continue
        choice = choose(model, new_job, new_machine, new_features)
        if choice.fits:
            kinds.add(kind)
            found.append(Change(what=what, setting=setting, available=available, choice=choice))
    return sorted(found, key=lambda change: not change.available)
