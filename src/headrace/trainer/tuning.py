"""``tune``: measure this machine, choose a placement for a run, try it, keep the choice.

Owns the order: what must be refused first, then seconds of measuring, then the search, then real
steps of the best few. The invariant: nothing of the model's size is allocated before it is known
that something fits, and the run's folder is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import CapacityError, ConfigError
from headrace.policy.rates import measure_rates
from headrace.policy.search import SAME_SPEED, fitting_choices, shortlist
from headrace.policy.steptime import Rates
from headrace.policy.trial import try_steps
from headrace.trainer import model_checks, preflight
from headrace.trainer.config import resolve
from headrace.trainer.place import num_update_threads, room, workload_of
from headrace.trainer.tune_file import CHOSEN, TuneRecord, beside, fingerprint
from headrace.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from headrace.policy.search import Choice
    from headrace.policy.trial import Trial


# What fits does not depend on speeds.
_ANY = Rates(
    flops=1.0,
    h2d_bytes=1.0,
    d2h_bytes=1.0,
    update_parameters=1.0,
    device_update_parameters=1.0,
    device_bytes=1.0,
)
_HEADER = (
    "   on device  slices  rows  waves  recompute  offload  device GiB  host GiB  predicted"
    "        measured"
)


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What was chosen.

    Attributes:
        path: the file that was written.
        record: its contents.
    """

    path: Path
    record: TuneRecord

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        record = self.record
        return {
            "path": str(self.path),
            "engine": record.engine,
            "rates": vars(record.rates),
            "figures": record.figures,
            "candidates": record.candidates,
            "fingerprint": record.fingerprint,
        }


def tune(
    config_file: Path,
    overrides: Sequence[str] = (),
    *,
    output: Path | None = None,
    steps: int = 0,
    num_candidates: int = 3,
    say: Callable[[str], None] = print,
) -> TuneResult:
    """Choose the engine settings that a configuration leaves open.

    Args:
        config_file: of the run.
        overrides: ``key=value``, those that training will be given.
        output: where the choice goes; beside ``config_file`` by default.
        steps: steps that each of the best few candidates is timed over; 0 trusts the prediction.
        num_candidates: how many are timed at most.
        say: shows a line.

    Raises:
        CapacityError: nothing fits; nothing was allocated.
        HeadraceError: whatever makes the run impossible.
    """
    preflight.refuse_several_processes("tune")
    config, notes = resolve(config_file, overrides)
    for note in notes:
        say(f"config: {note}")
    target = output or beside(config_file)
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no folder", remedy="create it, or correct --output")
    device = preflight.choose_device(config.device)
    tokenizer = preflight.load_tokenizer(config)
    spec = model_checks.take_apart(config, preflight.load_model_config(config, tokenizer))
    model_checks.check_lengths(config, spec, tokenizer)
    workload = workload_of(config)
    say(
        f"model: {type(spec.model).__name__}, {spec.num_parameters:,} parameters; "
        f"{workload.tokens * workload.micro_batches:,} tokens a step, on {device}"
    )
    free = room(config, spec, device)
    threads = num_update_threads(config)
    fitting_choices(spec, config.engine, config.dtype, workload, room=free, rates=_ANY)
    measured = measure_rates(spec, workload, device=device, num_threads=threads)
    for name, value in measured.figures.items():
        say(f"  {name:<26} {value:10.4g}")
    choices = fitting_choices(
        spec, config.engine, config.dtype, workload, room=free, rates=measured.rates
    )
    candidates = shortlist(choices, max(1, num_candidates))
    say(f"search: {len(choices):,} placements fit {free}")
    say(_HEADER)
    rows = []
    for number, choice in enumerate(candidates, 1):
        trial = None
        if steps:
            trial = try_steps(
                spec,
                choice,
                config.dtype,
                workload,
                device=device,
                optimizer=config.adamw(),
                max_grad_norm=config.max_grad_norm or None,
                steps=steps,
            )
        rows.append(_row(choice, trial))
        say(_line(number, rows[-1]))
    timed = [n for n, row in enumerate(rows) if row["measured_seconds"] is not None]
    if steps and not timed:
        raise CapacityError(
            f"none of the {len(rows)} placements that should fit did: {rows[0]['error']}",
            remedy="lower per_device_train_batch_size or max_length",
        )
    limit = SAME_SPEED * min((rows[n]["measured_seconds"] for n in timed), default=0.0)
    first = next((n for n in timed if rows[n]["measured_seconds"] <= limit), 0)
    record = TuneRecord(
        fingerprint=fingerprint(config, spec, device),
        engine={name: getattr(candidates[first].config, name) for name in CHOSEN},
        rates=measured.rates,
        figures=measured.figures,
        candidates=[rows[first], *(row for n, row in enumerate(rows) if n != first)],
    )
    record.write(target)
    say(f"chosen: {first + 1}; written to {target}")
    return TuneResult(path=target, record=record)


def _row(choice: Choice, trial: Trial | None) -> dict[str, Any]:
    """Prediction and measurement of a candidate, as JSON types."""
    config = choice.config
    return {
        **{name: getattr(config, name) for name in CHOSEN},
        "rows": choice.workload.rows,
        "waves": choice.workload.num_waves(config),
        "predicted_seconds": choice.time.seconds,
        "predicted_binding": choice.time.binding,
        "predicted_device_bytes": choice.budget.device_bytes,
        "predicted_host_bytes": choice.budget.host_bytes,
        "measured_seconds": None if trial is None else trial.seconds,
        "measured_binding": None if trial is None else trial.binding,
        "measured_device_bytes": None if trial is None else trial.device_bytes,
        "error": None if trial is None else trial.error,
    }


def _line(number: int, row: dict[str, Any]) -> str:
    predicted = f"{row['predicted_seconds']:.3g} s, {row['predicted_binding']}"
    measured = row["error"] or ""
    if row["measured_seconds"] is not None:
        error = row["predicted_seconds"] / row["measured_seconds"] - 1
        measured = f"{row['measured_seconds']:.3g} s, {row['measured_binding']} ({error:+.0%})"
    return (
        f"{number:>2} {row['device_units'] or 0:>9} {row['expert_slices'] or 1:>7} "
        f"{row['rows']:>5} {row['waves']:>6} "
        f"{row['recompute_layers'] or 0:>10} {row['offload_layers'] or 0:>8} "
        f"{row['predicted_device_bytes'] / GIB:>11.2f} {row['predicted_host_bytes'] / GIB:>9.2f}  "
        f"{predicted:<16} {measured}"
    ).rstrip()
