"""Rates that ``headrace tune`` measured, for a plan of the machine that it measured.

The invariant: rates of another machine are never taken, and whether a file's were is said. Reads
YAML, measures nothing, needs no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import yaml

from headrace.errors import ConfigError
from headrace.plan.machine import find_card, with_measured
from headrace.trainer.record import host

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.plan.machine import Machine


def with_tuned(machine: Machine, config_file: Path, named: Path | None) -> tuple[Machine, str]:
    """This machine at the rates in a run's tune file, if there is one and it measured them here.

    Args:
        machine: detected.
        config_file: of the run.
        named: its ``tune_file``; without one, the file beside ``config_file`` counts.

    Returns:
        The machine and a note, which is empty where there is no file.
    """
    path = named or config_file.with_suffix(".tune.yaml")
    if not path.is_file():
        return machine, ""
    try:
        measured, figures = _read(path)
        if (difference := _difference(measured, machine)) is not None:
            return machine, f"the rates in {path} are of another machine, not used: {difference}"
        return with_measured(machine, figures), f"rates: those in {path}, which headrace tune wrote"
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        return machine, f"the rates in {path} are not used: {error!r}"


def _difference(measured: dict[str, Any], machine: Machine) -> str | None:
    """What shows that another machine was measured, or None."""
    here = host()
    for key in ("cpu", "num_cores"):
        if measured.get(key) != here[key]:
            return f"{key} was {measured.get(key)!r} and is {here[key]!r}"
    if _card(measured.get("gpu")) != machine.gpu:
        return f"gpu was {measured.get('gpu')!r} and is {machine.title!r}"
    return None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The machine and the figures of a tune file."""
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    figures = {str(name): float(value) for name, value in found["figures"].items()}
    if not all(0 < value < math.inf for value in figures.values()):
        raise ValueError("a figure is not above 0")
    return dict(found["fingerprint"]["machine"]), figures


def _card(name: str | None) -> str:
    if name is None:
        return "cpu"
    try:
        return find_card(name)[0]
    except ConfigError:
        return name
