"""Whether a checkpoint belongs to a model, told from names, types and shapes alone.

The invariant: another model is refused before anything of the state is overwritten, and without
reading a tensor, so that a run asks before its long work begins. Does not judge values.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from headrace.errors import CheckpointError
from headrace.store.adapter_files import WEIGHTS_FILE, described_adapter
from headrace.store.folders import RECORD
from headrace.store.safetensors_io import (
    describe_tensors,
    read_index,
    read_weight_map,
    tensor_names,
)
from headrace.store.shards import described_optimizer, described_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

    from headrace.models.spec import ModelSpec
    from headrace.store.state import ModelState


def check_same_model(path: Path, spec: ModelSpec, state: ModelState) -> None:
    """Refuse a complete checkpoint of another model, other sizes or another choice to train.

    Raises:
        CheckpointError: naming tensors that differ.
    """
    has_adapters = (path / WEIGHTS_FILE).is_file()
    if has_adapters != (spec.adapters is not None):
        held, wanted = ("adapters", "all weights") if has_adapters else ("all weights", "adapters")
        raise CheckpointError(
            f"{path} is of a run that trained {held}, this run trains {wanted}",
            remedy="resume with the adapter: setting it was saved with, or choose another "
            "output_dir",
        )
    if spec.adapters is not None:
        file = path / WEIGHTS_FILE
        found = dict.fromkeys(tensor_names(file), file)
        _check_set(path, found, map(described_adapter, state.units))
    else:
        _check_weights(path, spec, state)
    planes = (
        {name: tensor for name, (tensor, _, _) in described_optimizer(unit).items()}
        for unit in state.units
    )
    _check_set(path, read_optimizer_index(path), planes)


def _check_weights(path: Path, spec: ModelSpec, state: ModelState) -> None:
    carried = set(json.loads((path / RECORD).read_text()).get("carried", ()))
    weights = {name: file for name, file in read_index(path).items() if name not in carried}
    spec.weight_names.plan(weights)  # a checkpoint keeps the form of what its run began with
    _check_set(path, weights, (described_weights(spec.weight_names, unit) for unit in state.units))


def read_optimizer_index(path: Path) -> dict[str, Path]:
    """File of every optimizer plane of a checkpoint, by name."""
    index = path / "optimizer.safetensors.index.json"
    if index.is_file():
        return read_weight_map(index)
    single = path / "optimizer.safetensors"
    return dict.fromkeys(tensor_names(single), single)


def _check_set(
    path: Path, found: Mapping[str, Path], written: Iterable[Mapping[str, torch.Tensor]]
) -> None:
    expected = {name: tensor for tensors in written for name, tensor in tensors.items()}
    lacking, unknown = sorted(expected.keys() - found), sorted(found.keys() - expected)
    if lacking or unknown:
        raise CheckpointError(
            f"{path} belongs to another model: of this one it lacks {len(lacking)} tensors "
            f"({', '.join(lacking[:2]) or 'none'}), and it has {len(unknown)} others "
            f"({', '.join(unknown[:2]) or 'none'})",
            remedy="resume with the model and the frozen parameters it was saved with",
        )
    for file in sorted(set(found.values())):
        names = [name for name, place in found.items() if place == file]
        for name, tensor in describe_tensors(file, names).items():
            check_tensor(tensor, expected[name], name, path)


def check_tensor(value: torch.Tensor, target: torch.Tensor, name: str, path: Path) -> None:
    """Refuse a tensor whose type or shape is not the model's.

    Raises:
        CheckpointError: with both.
    """
    if value.shape != target.shape or value.dtype != target.dtype:
        raise CheckpointError(
            f"{name} in {path} is {value.dtype} {tuple(value.shape)}, the model's is "
            f"{target.dtype} {tuple(target.shape)}",
            remedy="resume with the model it was saved with, or choose another output_dir",
        )
