"""The whole prediction as one record: fits or not, bytes, speed, money, and FSDP beside it.

Joins the parts; each figure is made in the module that owns it. ``Prediction.to_dict`` is what
``headrace plan --json`` prints, with ``schema`` counted up when keys change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.plan.architecture import Architecture, read_architecture
from headrace.plan.choose import Change, Choice, choose, find_changes
from headrace.plan.fsdp import (
    NO_SYNC_QUOTE,
    FsdpNeed,
    optimizer_notes,
    per_card_gigabytes,
    plan_fsdp,
)
from headrace.plan.job import THIS_VERSION, Features
from headrace.plan.memory import usable_device, usable_host
from headrace.plan.parts import trained_part
from headrace.plan.records import all_records, size_in_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.plan.job import Job
    from headrace.plan.machine import Machine, Rate
    from headrace.plan.memory import Item
    from headrace.plan.source import ModelSource

SCHEMA = 3


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is known of a run before it starts.

    Attributes:
        source: where the model's configuration comes from.
        model: its sizes.
        job: what is to be run.
        machine: on what.
        choice: how headrace would run it.
        changes: what would make it fit, empty when it does.
        alternatives: where it does not fit, the largest shipped models that do.
        fsdp: what FSDP would need, None on a CPU.
        notes: what the reader should know about these figures.
    """

    source: ModelSource
    model: Architecture
    job: Job
    machine: Machine
    choice: Choice
    changes: tuple[Change, ...]
    alternatives: tuple[str, ...]
    fsdp: FsdpNeed | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether headrace can run the job as described."""
        return self.choice.fits

    @property
    def hours(self) -> float | None:
        """To train on ``job.num_tokens``."""
        if self.job.num_tokens is None:
            return None
        return self.job.num_tokens / self.choice.speed.tokens_per_second / 3600

    @property
    def cost(self) -> float | None:
        """Of ``job.num_tokens`` at ``job.price`` a card and hour."""
        if self.hours is None or self.job.price is None:
            return None
        return self.hours * self.job.price * self.machine.num_gpus

    def to_dict(self) -> dict[str, Any]:
        """Plain values, sizes in bytes unless the key says otherwise."""
        model, machine = self.model, self.machine
        return {
            "schema": SCHEMA,
            "fits": self.fits,
            "model": {
                "name": self.source.name,
                "origin": self.source.origin,
                "model_type": model.model_type,
                "num_parameters": model.num_parameters,
                "num_active_parameters": model.num_active_parameters,
                "num_layers": len(model.layers),
                "num_embedding_parameters": model.num_embedding,
                "num_head_parameters": model.num_head,
                "largest_layer_parameters": model.largest_layer,
                "flops_per_token": model.flops_per_token(self.job.max_length),
                "sources": self.source.sources,
            },
            "machine": _machine(machine),
            "job": asdict(self.job),
            "plan": _choice(self.choice, machine),
            "hours": self.hours,
            "cost": self.cost,
            "changes": [
                {
                    "change": change.what,
                    "setting": change.setting,
                    "available": change.available,
                    "plan": _choice(change.choice, machine),
                }
                for change in self.changes
            ],
            "models_that_fit": list(self.alternatives),
            "arithmetic": self._arithmetic(),
            "fsdp": self._fsdp(),
            "published_runs": list(self.source.runs),
            "notes": list(self.notes),
        }

    def _arithmetic(self) -> dict[str, Any]:
        """16 bytes a parameter, from the exact count and from the size in the model's name."""
        cards = self.machine.num_gpus
        named = size_in_name(self.source.name)
        return {
            "exact": per_card_gigabytes(self.model.num_parameters, cards),
            "by_name": None if named is None else per_card_gigabytes(named, cards),
        }

    def _fsdp(self) -> dict[str, Any] | None:
        need = self.fsdp
        if need is None:
            return None
        return {
            "fits": need.fits if need.accumulation == 1 else need.fits_accumulating,
            "fits_without_accumulation": need.fits,
            "fits_with_accumulation_under_no_sync": need.fits_accumulating,
            "gradient_accumulation_steps": need.accumulation,
            "activations": need.activations,
            "card": _items(need.items),
            "card_bytes": need.card_bytes,
            "card_limit_bytes": usable_device(self.machine),
            "unsharded_gradient_bytes": need.unsharded_gradient_bytes,
            "min_gpus": need.min_gpus,
            "tokens_per_second_at_most": need.tokens_per_second,
            "trap": f"gradient_accumulation_steps above 1: {NO_SYNC_QUOTE}",
            "optimizers": optimizer_notes(
                trained_part(self.model, self.job).total, self.machine.num_gpus
            ),
        }


def _items(items: Iterable[Item]) -> list[dict[str, Any]]:
    return [{"kind": item.kind, "bytes": item.num_bytes, "formula": item.formula} for item in items]


def _rate(rate: Rate | None) -> dict[str, Any] | None:
    return None if rate is None else {"value": rate.value, "origin": rate.origin}


def _machine(machine: Machine) -> dict[str, Any]:
    return {
        "gpu": machine.gpu,
        "title": machine.title,
        "num_gpus": machine.num_gpus,
        "cores": machine.cores,
        "card_memory_bytes": _rate(machine.memory_bytes),
        "host_memory_bytes": _rate(machine.host_bytes),
        "free_disk_bytes": _rate(machine.disk_bytes),
        "peak_tflops": _rate(machine.peak_tflops),
        "matmul_tflops": _rate(machine.matmul_tflops),
        "h2d_gb_per_s": _rate(machine.h2d),
        "d2h_gb_per_s": _rate(machine.d2h),
        "duplex_gb_per_s": _rate(machine.duplex),
        "nvlink_gb_per_s": _rate(machine.nvlink),
        "update_gparams_per_s": _rate(machine.update),
    }


def _choice(choice: Choice, machine: Machine) -> dict[str, Any]:
    need, speed = choice.need, choice.speed
    return {
        "fits": choice.fits,
        "overflows": list(choice.over),
        "activations": choice.activations,
        "waves": choice.waves,
        "expert_slices": choice.slices,
        "host": _items(need.host),
        "host_bytes": need.host_bytes,
        "host_limit_bytes": usable_host(machine),
        "device": _items(need.device),
        "device_bytes": need.device_bytes,
        "device_limit_bytes": usable_device(machine),
        "disk": _items(need.disk),
        "disk_bytes": need.disk_bytes,
        "state_on_devices_bytes": need.spilled,
        "speed": asdict(speed),
    }


def _notes(job: Job, machine: Machine, features: Features) -> list[str]:
    notes = []
    if job.moments not in features.moments:
        notes.append(
            f"{job.moments} moments are not in this version, which keeps "
            f"{' or '.join(features.moments)}"
        )
    if machine.host_bytes is None:
        notes.append("host memory is not given (--host-memory), so it was not held against a limit")
    if machine.disk_bytes is None:
        notes.append("free disk is not given (--disk), so it was not held against a limit")
    weak = []
    for origin, told in (("assumed", "assumed"), ("derived", "derived from data sheets")):
        named = [f"{k} {r.value:.3g}" for k, r in machine.rates.items() if r.origin == origin]
        weak += [f"{told} ({', '.join(named)})"] if named else []
    if weak:
        notes.append(
            f"speed rests on rates that are {' and '.join(weak)}; on the machine itself 'headrace "
            "tune CONFIG' measures them and 'headrace plan CONFIG' then takes them; --update-rate "
            "takes what 'headrace bench update' prints there"
        )
    return notes


def _largest_that_fit(
    wanted: Architecture, job: Job, machine: Machine, features: Features
) -> tuple[str, ...]:
    """Up to three shipped models below ``wanted`` that the machine holds, largest first."""
    sized = {}
    for record in all_records():
        model = read_architecture(record.config)
        if model.num_parameters < wanted.num_parameters:
            sized[record.name] = model
    found: list[str] = []
    for name, model in sorted(sized.items(), key=lambda item: -item[1].num_parameters):
        if choose(model, job, machine, features).fits:
            found.append(name)
        if len(found) == 3:
            break
    return tuple(found)


def predict(
    source: ModelSource,
    job: Job,
    machine: Machine,
    features: Features = THIS_VERSION,
    *,
    notes: Sequence[str] = (),
) -> Prediction:
    """Everything about one job on one machine.

    Args:
        source: the model's configuration.
        job: what to run.
        machine: on what.
        features: what the engine can do.
        notes: what is known of the job beside its numbers.

    Raises:
        ConfigError: the configuration is of an unknown family or incomplete.
    """
    model = read_architecture(source.config)
    said = list(notes)
    if model.max_positions is not None and job.max_length > model.max_positions:
        said.append(
            f"max_length {job.max_length} is more than the model's {model.max_positions} positions"
        )
    if job.moments not in features.moments:
        # Asked for by name: plan as if it were there, and say that it is not.
        planned = replace(features, moments=(*features.moments, job.moments))
    else:
        planned = features
    choice = choose(model, job, machine, planned)
    changes = [] if choice.fits else find_changes(model, job, machine, planned, choice)
    return Prediction(
        source=source,
        model=model,
        job=job,
        machine=machine,
        choice=choice,
        changes=tuple(changes),
        alternatives=() if choice.fits else _largest_that_fit(model, job, machine, planned),
        fsdp=None if machine.is_cpu else plan_fsdp(model, job, machine),
        notes=(*said, *_notes(job, machine, features)),
    )
