"""Which attention pattern a model asks transformers for, without building a mask.

While a model's anatomy is examined, transformers' mask functions are answered with a
:class:`Pattern` instead of a mask; it travels to the attention function, which compares it with
the window it is given. In training no mask function is called at all. So a pattern that headrace's
attention does not implement is refused, never lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import ModelRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

_REACH = 1 << 21  # distances looked at; longer windows than any model has positions


@dataclass(frozen=True)
class Pattern:
    """A causal pattern: each position sees ``window`` positions up to itself, or all before."""

    window: int | None


def answer(
    *,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Pattern:
    """What ``AttentionMaskInterface`` calls in place of building a mask.

    Raises:
        ModelRefusedError: the pattern is neither causal nor a causal sliding window.
    """
    if attention_mask is not None:
        raise ModelRefusedError(
            "the model makes an attention mask of its own, and headrace builds no masks"
        )
    windows = {_visible(mask_function, query) for query in (_REACH, _REACH + 12_345)}
    if len(windows) != 1 or None in windows:
        raise ModelRefusedError(
            "the model asks for an attention pattern that is neither causal nor a sliding window "
            "(chunks or blocks), which headrace's attention does not implement"
        )
    (window,) = windows
    assert window is not None
    return Pattern(window if window < _REACH else None)


def _visible(mask_function: Callable[..., torch.Tensor], query: int) -> int | None:
    """How many positions up to itself a query sees; None when they are not one stretch."""
    zero = torch.tensor(0)
    distance = torch.arange(-64, _REACH)
    seen = mask_function(zero, zero, torch.tensor(query), query - distance)
    seen = torch.as_tensor(seen).expand_as(distance)
    ahead, behind = seen[:64], seen[64:]
    if bool(ahead.any()):
        return None
    hidden = (~behind).nonzero()
    window = int(hidden[0]) if hidden.numel() else _REACH
    return None if bool(behind[window:].any()) else window
