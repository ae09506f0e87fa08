"""What makes two decoder layers the same structure: class, settings, shapes, buffers.

Layers of one structure share a template and, when compiled, one graph. A setting that differs
(sliding or full attention, rotary or none) keeps them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_PLAIN = (bool, int, float, str, type(None))
# Where a layer is, not what it is; PEFT's layers keep their own path among their "kwargs".
_INDEX = ("layer_idx", "layer_id", "layer_index", "kwargs")


def structure(layer: nn.Module) -> tuple[Any, ...]:
    """What must agree for two layers to share a template."""
    settings = []
    for path, module in layer.named_modules():
        plain = {
            name: _frozen(value)
            for name, value in vars(module).items()
            if not name.startswith("_") and name not in _INDEX and _is_plain(value)
        }
        settings.append((path, type(module).__qualname__, tuple(sorted(plain.items(), key=str))))
    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    buffers = tuple((name, tuple(b.shape), b.dtype) for name, b in layer.named_buffers())
    return (tuple(settings), shapes, buffers)


def covering_prefix(layers: Sequence[nn.Module], limit: int) -> int:
    """How many leading layers hold one of every structure; at least two, at most ``limit``."""
    seen: dict[Any, int] = {}
    for index, layer in enumerate(layers):
        seen.setdefault(structure(layer), index)
    return min(limit, len(layers), max(2, max(seen.values()) + 1))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, _PLAIN) for item in value)
    if isinstance(value, dict):  # by adapter, in PEFT's layers
        return all(isinstance(item, _PLAIN) for pair in value.items() for item in pair)
    return isinstance(value, _PLAIN)


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value
