"""Between a model's tensors and those of its checkpoints on the disk.

transformers keeps some models in another form than their files: experts fused into one tensor,
names with another prefix. Its own table says how (``conversion_mapping``), and is used in both
directions, one piece at a time. What is read under some names is written under them again.
Invariant: reading what was written gives the same bits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn

    from headrace.store.layout import UnitLayout

# Where a checkpoint of several modalities keeps its language model, and its place in the causal
# LM alone: (in the file, in the model).
_PLACES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
)


@dataclass
class Piece:
    """Tensors of a file that together make tensors of the model.

    Attributes:
        name: the first tensor of the model that they make.
        keys: names in the file, in the order in which they are joined.
    """

    name: str
    keys: list[str]
    _patterns: list[str]
    _transform: Any

    def read(
        self, get: Callable[[str], torch.Tensor], model: nn.Module, config: Any
    ) -> dict[str, torch.Tensor]:
        """The model's tensors by name.

        Args:
            get: reads one tensor of the file.
            model: the causal LM, for its shapes.
            config: its configuration.

        Raises:
            CheckpointError: the pieces do not fit together.
        """
        transform = copy.deepcopy(self._transform)
        for key, pattern in zip(self.keys, self._patterns, strict=True):
            transform.add_tensor(self.name, key, pattern, lambda key=key: get(key))
        try:
            found = transform.convert(self.name, model=model, config=config)
        except (ValueError, RuntimeError, IndexError, StopIteration) as error:
            raise CheckpointError(
                f"{len(self.keys)} tensors from {self.keys[0]} on do not make {self.name}: {error}",
                remedy="check that config.json and the weights belong to the same model",
            ) from error
        return {n: t[0] if isinstance(t, list) else t for n, t in found.items()}


class WeightNames:
    """How one model's tensors are named and joined in checkpoints."""

    def __init__(self, model: nn.Module) -> None:
        """Take transformers' table for the class; nothing was read yet."""
        self._model: Any = model
        self._used: list[Any] | None = None
        self._places: list[tuple[str, str]] = []

    @property
    def is_composite(self) -> bool:
        """What was read lies in a checkpoint of a model of several modalities."""
        from transformers.core_model_loading import PrefixChange  # noqa: PLC0415 - as below

        moved = any(isinstance(t, PrefixChange) for t in self._used or ())
        return bool(self._places) or moved

    @property
    def is_converted(self) -> bool:
        """What was read is in another form than the model's own."""
        return bool(self._used)

    def in_default_form(self) -> WeightNames:
        """The form that transformers saves the class in, at the places of what was read."""
        names = WeightNames(self._model)
        names._places = list(self._places)
        return names

    def plan(self, keys: Iterable[str]) -> tuple[list[Piece], list[str]]:
        """Sort a checkpoint's tensors into pieces, and remember which form it has.

        Returns:
            The pieces, and the names of tensors that the model has no place for.
        """
        from transformers.conversion_mapping import (  # noqa: PLC0415 - slow; a model exists by now
            get_model_conversion_mapping,
        )
        from transformers.core_model_loading import (  # noqa: PLC0415 - as above
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        transforms = get_model_conversion_mapping(self._model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        known = self._model.state_dict()
        prefix = self._model.base_model_prefix
        pieces: dict[str, Piece] = {}
        unused: list[str] = []
        self._places = []
        for key in sorted(keys, key=dot_natural_key):
            inner = self.placed(key)
            name, pattern = rename_source_key(inner, renamings, converters, prefix, known)
            if name not in known and inner in known:  # already in the model's own form
                name, pattern = inner, None
            if name not in known:
                unused.append(key)
                continue
            transform = by_pattern[pattern] if pattern else WeightRenaming(key, name)
            piece = pieces.setdefault(name, Piece(name, [], [], transform))
            piece.keys.append(key)
            piece._patterns.append(pattern or key)  # noqa: SLF001 - made here
        self._used = [t for t in transforms if t.was_used()]
        return list(pieces.values()), unused

    def placed(self, key: str) -> str:
        """The name of a tensor in the causal LM alone; which places occur is remembered."""
        for outer, inner in () if self._has_places else _PLACES:
            if key.startswith(outer) and self._model.base_model_prefix + "." in (inner, "model."):
                if (outer, inner) not in self._places:
                    self._places.append((outer, inner))
                return inner + key.removeprefix(outer)
        return key

    @cached_property
    def _has_places(self) -> bool:
        """The causal LM's own names are those of a composite model."""
        return any(name.startswith("model.language_model.") for name in self._model.state_dict())

    def to_checkpoint(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of the model as a checkpoint holds them, in the form that was read.

        They come in natural order of their names. Those that need no joining or splitting are
        passed on as they are, without a copy.
        """
        from transformers.core_model_loading import (  # noqa: PLC0415 - as above
            dot_natural_key,
            revert_weight_conversion,
        )

        self._model._weight_conversions = self._used  # noqa: SLF001 - where transformers keeps it
        written = revert_weight_conversion(self._model, dict(tensors))
        # In one order whatever was read: a run that was resumed writes the same bytes.
        names = sorted(written, key=dot_natural_key)
        return {self._replaced(name): written[name] for name in names}

    def _replaced(self, name: str) -> str:
        for outer, inner in self._places:
            if name.startswith(inner):
                return outer + name.removeprefix(inner)
        return name


def pieces_by_unit(pieces: Iterable[Piece], units: Sequence[UnitLayout]) -> list[list[Piece]]:
    """The pieces that make up every unit; a tied head's makes up none."""
    place = {p.name: i for i, layout in enumerate(units) for p in layout.params}
    found: list[list[Piece]] = [[] for _ in units]
    for piece in pieces:
        if piece.name in place:
            found[place[piece.name]].append(piece)
    return found
