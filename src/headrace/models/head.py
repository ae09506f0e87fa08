"""What a causal LM does between its base model and its loss, besides one matrix product.

Multipliers, logit scales and soft caps are found by running the model's own forward with its base
and its head replaced: one returns the hidden state it is given, the other shows what it is called
with and returns the logits it is given. What comes out is compared, bit by bit, with the rules
that the fused loss knows; anything else is run as the model wrote it.

Shape legend: N tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.errors import ModelRefusedError
from headrace.models.anatomy import accepted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SAMPLES = 3


@dataclass(frozen=True)
class LogitRule:
    """What happens to logits after the head's matrix.

    Attributes:
        multiplier: they are multiplied by it.
        divisor: or divided by it.
        softcap: then they become ``softcap * tanh(logits / softcap)``.
        other: in place of these, the model's own code; ``(C, V)`` to ``(C, V')``.
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None
    other: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def is_identity(self) -> bool:
        """Logits are used as they come."""
        return self == LogitRule()

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the rule."""
        if self.other is not None:
            return self.other(logits)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class _Shown(Exception):  # noqa: N818 - carries a value out of a forward pass; no error
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Output:
    """A base model's output: the last hidden state, and None under every other name."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Base(nn.Module):
    """Stands for the base model: returns the hidden state it was given."""

    hidden: torch.Tensor

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        _lend_attributes(self, original)
        self._parts = frozenset(name for name, _ in original.named_children())

    def __getattr__(self, name: str) -> Any:
        # OPT calls the decoder inside its base model, which stands for the same.
        if name != "_parts" and name in self._parts:
            return self
        return super().__getattr__(name)

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(self.hidden)


class _Head(nn.Module):
    """Stands for the head's matrix: returns the logits it was given, or shows its input."""

    logits: torch.Tensor | None = None

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        _lend_attributes(self, original)
        self.weight = getattr(original, "weight", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.logits is None:
            raise _Shown(hidden)
        return self.logits


class HeadProbe:
    """A causal LM without base and head, to see what it does around them."""

    def __init__(self, model: nn.Module, base_path: str, head_path: str) -> None:
        self._base = _Base(model.get_submodule(base_path))
        self._head = _Head(model.get_submodule(head_path))
        self._model = _with(_with(model, base_path, self._base), head_path, self._head)
        self._arguments = accepted(
            self._model.forward, {"input_ids": torch.zeros(1, 1, dtype=torch.long)}
        ) | accepted(self._model.forward, {"use_cache": False})

    def before(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """What the head's matrix is given for the base model's output, differentiable."""
        self._base.hidden, self._head.logits = hidden_ND[None], None
        try:
            self._model(**self._arguments)
        except _Shown as shown:
            return shown.hidden[0]
        raise ModelRefusedError(f"{type(self._model).__name__} does not call its head")

    def after(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """What the model makes of its head's output, differentiable."""
        self._base.hidden = logits_CV.new_zeros(1, logits_CV.shape[0], 1)
        self._head.logits = logits_CV[None]
        output = self._model(**self._arguments)
        logits_1CV: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
        return logits_1CV[0]


def find_rules(
    probe: HeadProbe, config: Any, *, hidden_size: int, vocab_size: int
) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, LogitRule]:
    """What happens before the head's matrix (None for nothing) and after it."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(_SAMPLES, hidden_size, generator=generator)
    logits_CV = 20 * torch.randn(_SAMPLES, vocab_size, generator=generator)
    with torch.no_grad():
        before = None if torch.equal(probe.before(hidden_ND), hidden_ND) else probe.before
        after = probe.after(logits_CV)
        for rule in _candidates(config):
            some = slice(0, 256)  # enough to reject a rule
            if torch.equal(rule(logits_CV[:, some]), after[:, some]) and torch.equal(
                rule(logits_CV), after
            ):
                return before, rule
    return before, LogitRule(other=probe.after)


def _candidates(config: Any) -> Iterator[LogitRule]:
    """Rules whose constant is a number of the configuration."""
    yield LogitRule()
    values = config.to_dict().values()
    numbers = {float(v) for v in values if isinstance(v, (int, float)) and v and v != 1}
    for number in sorted(numbers):
        yield LogitRule(softcap=number)
        yield LogitRule(multiplier=number)
        yield LogitRule(divisor=number)


def _lend_attributes(stub: nn.Module, original: nn.Module) -> None:
    """Settings that a model reads off the part that the stub stands for."""
    for name, value in vars(original).items():
        if not name.startswith("_") and not isinstance(value, (nn.Module, torch.Tensor)):
            setattr(stub, name, value)


def _with(module: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    """A shallow twin of ``module`` in which one submodule is replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)  # noqa: SLF001 - a twin that shares the other modules
    name, _, rest = path.partition(".")
    child = module._modules[name]  # noqa: SLF001 - as above
    assert child is not None
    twin._modules[name] = _with(child, rest, replacement) if rest else replacement  # noqa: SLF001
    return twin
