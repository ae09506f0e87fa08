"""What low-rank adapters a run asks for, checked without torch and without a model.

:mod:`headrace.models.adapters` puts them on one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What adapters a model gets.

    Attributes:
        rank: columns of A and rows of B.
        alpha: the product B A is scaled by ``alpha / rank``.
        dropout: the probability that training drops an element of A's input.
        target_modules: ``"all-linear"``, a regular expression that whole module names must match,
            or names that they end with, as in PEFT; none are meant by an empty tuple.
        target_parameters: parameters of stacked experts that get an adapter an expert, by what
            their names end with, as in PEFT.
        layers: numbers of the layers that get adapters; None for all.
        layers_of_parameters: ``layers`` limits ``target_parameters``, too; PEFT's key does not.
        use_rslora: scale by ``alpha / sqrt(rank)`` instead (arXiv:2312.03732).
        initialisation: of A: ``"default"`` (Kaiming, as PEFT) or ``"gaussian"``; B is zero.
        modules_to_save: modules that are trained whole, by what their names end with, as in PEFT.
        rank_pattern: other ranks, by regular expressions for the end of a name, as in PEFT.
        alpha_pattern: other alphas, likewise.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    target_parameters: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    layers_of_parameters: bool = True
    use_rslora: bool = False
    initialisation: Literal["default", "gaussian"] = "default"
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what gives no adapter."""
        ranks = (self.rank, *(rank for _, rank in self.rank_pattern))
        if min(ranks) < 1:
            raise ConfigError(
                f"the rank of adapters is {_listed(ranks)}; it must be at least 1",
                remedy="lora_r: 16, or another positive number",
            )
        alphas = (self.alpha, *(alpha for _, alpha in self.alpha_pattern))
        if not all(0 < alpha < float("inf") for alpha in alphas):
            raise ConfigError(
                f"the alpha of adapters is {_listed(alphas)}; it must be above 0, and finite",
                remedy="lora_alpha: twice lora_r is usual",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"the dropout of adapters is {self.dropout}; it must be at least 0 and below 1",
                remedy="lora_dropout: 0.05, or leave it out",
            )
        if self.dropout and self.target_parameters:
            raise ConfigError(
                f"the dropout of adapters is {self.dropout:g}, and PEFT has none for adapters on "
                f"parameters ({self.target_parameters[0]})",
                remedy="lora_dropout: 0",
            )
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ConfigError(
                    f"adapter targets {self.target_modules!r}: {error}",
                    remedy="a list of names, a regular expression, or all-linear",
                ) from error


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value}" for value in dict.fromkeys(values))
