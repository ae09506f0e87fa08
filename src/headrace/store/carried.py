"""Tensors of a checkpoint that the causal LM has no place for: vision towers, extra heads.

They are not trained and not held in memory. Their files stay open, so that every checkpoint and
export can copy them, one at a time, even when the folder they came from has gone. Invariant: they
are written under their names, types and bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.store.safetensors_io import SafetensorsReader, describe_tensors
from headrace.store.shards import TensorGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch


class CarriedTensors:
    """Named tensors in open safetensors files."""

    def __init__(self, names: Iterable[str] = (), files: Mapping[str, Path] | None = None) -> None:
        """Open the files of ``names``; without names there is nothing to carry."""
        self.names = tuple(sorted(names))
        self._files = {name: (files or {})[name] for name in self.names}
        self._reader = SafetensorsReader()
        self._described: dict[str, torch.Tensor] = {}
        for path in sorted(set(self._files.values())):
            here = [name for name in self.names if self._files[name] == path]
            self._described |= describe_tensors(path, here)
            self._reader.open(path)

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(tensor.nbytes for tensor in self._described.values())

    def groups(self) -> list[TensorGroup]:
        """Each tensor by itself, to be written."""

        def make(name: str) -> dict[str, torch.Tensor]:
            return {name: self._reader.get(self._files[name], name)}

        return [
            TensorGroup(
                described={name: self._described[name]},
                make=lambda name=name: make(name),  # type: ignore[misc]  # bound here
            )
            for name in self.names
        ]
