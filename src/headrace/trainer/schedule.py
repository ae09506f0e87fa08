"""The learning rate of a step, equal to the last bit to transformers' schedules.

Owns a pure function of the step: it is called once an optimizer step, never once a process or
micro-batch, so no number of ranks can advance it faster. Step ``k`` (counted from 0) uses the
factor that transformers' ``LambdaLR`` holds after ``k`` scheduler steps; with warm-up the first
step's rate is therefore 0, as there.

Formulas: transformers ``optimization.py``; warm-up-stable-decay: Hu et al., "MiniCPM", 2024.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """A schedule for a run of known length.

    Attributes:
        kind: transformers' name, one of :data:`KINDS`.
        learning_rate: the peak.
        num_steps: optimizer steps of the whole run.
        num_warmup_steps: optimizer steps of linear warm-up.
        options: what transformers calls ``lr_scheduler_kwargs``.
    """

    kind: str
    learning_rate: float
    num_steps: int
    num_warmup_steps: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


class Schedule:
    """Calling it with a step, counted from 0, gives that step's learning rate.

    Raises:
        ConfigError: for an unknown kind, an option the kind does not have, or one it lacks.
    """

    def __init__(self, settings: ScheduleSettings) -> None:
        if settings.kind not in KINDS:
            reason = _REFUSED.get(settings.kind, "it is not a schedule of transformers")
            near = difflib.get_close_matches(settings.kind, KINDS, n=1)
            raise ConfigError(
                f"lr_scheduler_type: {settings.kind} is refused: {reason}",
                remedy=f"use {near[0]}" if near else f"use one of {', '.join(KINDS)}",
            )
        build, allowed = KINDS[settings.kind]
        for name in settings.options:
            if name not in allowed:
                has = ", ".join(allowed) or "none"
                raise ConfigError(
                    f"lr_scheduler_kwargs: {settings.kind} has no option {name!r}",
                    remedy=f"its options: {has}",
                )
        self.settings = replace(settings, options=_checked_options(settings))
        self._factor = build(self.settings)

    def __call__(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 0."""
        return float(self.settings.learning_rate * self._factor(step))

    def table(self) -> list[float]:
        """The learning rate of every step of the run."""
        return [self(step) for step in range(self.settings.num_steps)]


def resolve_warmup(warmup_steps: float, warmup_ratio: float | None, num_steps: int) -> int:
    """Steps of warm-up: a count, or a share of the run if below 1 (rounded up, as transformers).

    Raises:
        ConfigError: when both are given, or one is negative.
    """
    if warmup_ratio and warmup_steps:
        raise ConfigError(
            f"warmup_steps: {warmup_steps:g} and warmup_ratio: {warmup_ratio:g} exclude each other",
            remedy="keep one",
        )
    amount = warmup_ratio or warmup_steps
    if amount < 0 or (warmup_ratio or 0) > 1:
        raise ConfigError(
            f"a warm-up of {amount:g} is neither a count of steps nor a share of the run",
            remedy="warmup_steps: 100, or warmup_ratio: 0.03",
        )
    if warmup_ratio or amount < 1:
        return math.ceil(num_steps * amount)
    return int(amount)


def _checked_options(settings: ScheduleSettings) -> dict[str, Any]:
    """The options as numbers; YAML reads ``1e-6``, without a point, as text."""
    options: dict[str, Any] = {}
    for name, value in settings.options.items():
        if value is None or name in _SHAPED:
            options[name] = value
            continue
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or number < 0 or (name in _COUNTS and number % 1):
            kind = "a whole number of steps" if name in _COUNTS else "a number, not negative"
            raise ConfigError(f"lr_scheduler_kwargs: {name} is {value!r}", remedy=f"write {kind}")
        options[name] = number
    return options


def _given(options: Mapping[str, Any], name: str, default: Any) -> Any:
    value = options.get(name)
    return default if value is None else value


def _warmup(step: int, count: int) -> float:
    return float(step) / float(max(1, count))


def _progress(step: int, settings: ScheduleSettings) -> float:
    warm, total = settings.num_warmup_steps, settings.num_steps
    return float(step - warm) / float(max(1, total - warm))


def _constant(_settings: ScheduleSettings) -> Callable[[int], float]:
    return lambda _step: 1.0


def _constant_with_warmup(settings: ScheduleSettings) -> Callable[[int], float]:
    warm = settings.num_warmup_steps
    return lambda step: _warmup(step, warm) if step < warm else 1.0


def _linear(settings: ScheduleSettings) -> Callable[[int], float]:
    warm, total = settings.num_warmup_steps, settings.num_steps

    def factor(step: int) -> float:
        if step < warm:
            return _warmup(step, warm)
        return max(0.0, float(total - step) / float(max(1, total - warm)))

    return factor


def _cosine_to(settings: ScheduleSettings, floor: float) -> Callable[[int], float]:
    warm = settings.num_warmup_steps
    cycles = float(_given(settings.options, "num_cycles", 0.5))

    def factor(step: int) -> float:
        if step < warm:
            return _warmup(step, warm)
        wave = 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * _progress(step, settings)))
        return max(0.0, wave * (1 - floor) + floor)

    return factor


def _cosine(settings: ScheduleSettings) -> Callable[[int], float]:
    return _cosine_to(settings, 0.0)


def _floor(settings: ScheduleSettings) -> float:
    absolute: Any = settings.options.get("min_lr")
    rate: Any = settings.options.get("min_lr_rate")
    if (absolute is None) == (rate is None):
        raise ConfigError(
            f"lr_scheduler_type: {settings.kind} needs a floor, got min_lr: {absolute} and "
            f"min_lr_rate: {rate}",
            remedy="give exactly one under lr_scheduler_kwargs: "
            "min_lr (a learning rate) or min_lr_rate (a share of learning_rate)",
        )
    return float(absolute / settings.learning_rate if rate is None else rate)


def _cosine_with_min_lr(settings: ScheduleSettings) -> Callable[[int], float]:
    return _cosine_to(settings, _floor(settings))


def _cosine_warmup_with_min_lr(settings: ScheduleSettings) -> Callable[[int], float]:
    floor = _floor(settings)
    warm, total = float(settings.num_warmup_steps), float(settings.num_steps)
    cycles = float(_given(settings.options, "num_cycles", 0.5))
    start = settings.options.get("warmup_lr_rate")

    def factor(step: int) -> float:
        if step < warm:
            if start is None:
                return (step + 1.0) / max(1.0, warm)
            return float(start) + (1.0 - float(start)) * step / max(1, warm - 1)
        progress = (step - warm + 1.0) / max(1.0, total - warm)
        wave = 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))
        return max(0.0, wave * (1 - floor) + floor)

    return factor


def _cosine_with_restarts(settings: ScheduleSettings) -> Callable[[int], float]:
    warm = settings.num_warmup_steps
    cycles = float(_given(settings.options, "num_cycles", 1))

    def factor(step: int) -> float:
        if step < warm:
            return _warmup(step, warm)
        progress = _progress(step, settings)
        if progress >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0))))

    return factor


def _polynomial(settings: ScheduleSettings) -> Callable[[int], float]:
    warm, total, peak = settings.num_warmup_steps, settings.num_steps, settings.learning_rate
    end = float(_given(settings.options, "lr_end", 1e-7))
    power = float(_given(settings.options, "power", 1.0))
    if end >= peak:
        raise ConfigError(
            f"lr_scheduler_kwargs: lr_end is {end:g}, not below learning_rate {peak:g}",
            remedy="lower lr_end",
        )

    def factor(step: int) -> float:
        if step < warm:
            return _warmup(step, warm)
        if step > total:
            return end / peak
        remaining = 1 - (step - warm) / (total - warm)
        return float((peak - end) * remaining**power + end) / peak

    return factor


def _inverse_sqrt(settings: ScheduleSettings) -> Callable[[int], float]:
    warm = settings.num_warmup_steps
    timescale = settings.options.get("timescale") or warm or 10_000

    def factor(step: int) -> float:
        if step < warm:
            return _warmup(step, warm)
        return 1.0 / math.sqrt((step + (timescale - warm)) / timescale)

    return factor


_SHAPES = ("linear", "cosine", "1-sqrt")
_SHAPED = ("warmup_type", "decay_type")
_COUNTS = ("num_decay_steps", "num_stable_steps")


def _warmup_stable_decay(settings: ScheduleSettings) -> Callable[[int], float]:
    options, warm = settings.options, settings.num_warmup_steps
    if options.get("num_decay_steps") is None:
        raise ConfigError(
            "lr_scheduler_type: warmup_stable_decay needs the length of its decay",
            remedy="lr_scheduler_kwargs: {num_decay_steps: N}",
        )
    decay = int(options["num_decay_steps"])
    stable = options.get("num_stable_steps")
    stable = settings.num_steps - warm - decay if stable is None else int(stable)
    floor = float(_given(options, "min_lr_ratio", 0.0))
    cycles = float(_given(options, "num_cycles", 0.5))
    up, down = _given(options, "warmup_type", "linear"), _given(options, "decay_type", "cosine")
    for name, shape in (("warmup_type", up), ("decay_type", down)):
        if shape not in _SHAPES:
            raise ConfigError(
                f"lr_scheduler_kwargs: {name} is {shape!r}", remedy="linear, cosine or 1-sqrt"
            )

    def rise(progress: float) -> float:
        if up == "linear":
            return progress
        if up == "cosine":
            return 0.5 * (1.0 - math.cos(math.pi * progress))
        return 1.0 - math.sqrt(1.0 - progress)

    def fall(progress: float) -> float:
        if down == "linear":
            return 1.0 - progress
        if down == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))
        return 1.0 - math.sqrt(progress)

    def factor(step: int) -> float:
        if step < warm:
            return max(0.0, rise(_warmup(step, warm)) * (1.0 - floor) + floor)
        if step < warm + stable:
            return 1.0
        if step < warm + stable + decay:
            progress = float(step - warm - stable) / float(max(1, decay))
            return max(0.0, fall(progress) * (1.0 - floor) + floor)
        return floor

    return factor


KINDS: dict[str, tuple[Callable[[ScheduleSettings], Callable[[int], float]], tuple[str, ...]]] = {
    "linear": (_linear, ()),
    "cosine": (_cosine, ("num_cycles",)),
    "constant": (_constant, ()),
    "constant_with_warmup": (_constant_with_warmup, ()),
    "cosine_with_min_lr": (_cosine_with_min_lr, ("min_lr", "min_lr_rate", "num_cycles")),
    "cosine_warmup_with_min_lr": (
        _cosine_warmup_with_min_lr,
        ("min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"),
    ),
    "cosine_with_restarts": (_cosine_with_restarts, ("num_cycles",)),
    "polynomial": (_polynomial, ("lr_end", "power")),
    "inverse_sqrt": (_inverse_sqrt, ("timescale",)),
    "warmup_stable_decay": (
        _warmup_stable_decay,
        (
            "num_decay_steps", "num_stable_steps", "min_lr_ratio", "warmup_type", "decay_type",
            "num_cycles",
        ),
    ),
}  # fmt: skip

_REFUSED = {
    "reduce_lr_on_plateau": "it depends on evaluations, so a stopped run could not be repeated",
    "greedy": "it depends on measured losses, so a stopped run could not be repeated",
}
