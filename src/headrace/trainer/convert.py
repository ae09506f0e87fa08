"""Sharded checkpoints of other trainers as Hugging Face folders, or as headrace checkpoints.

Owns ``headrace convert``. One process, no collectives, one unit of the model in memory at a time.
The invariants: a folder appears under its name only when it is complete; weights keep their bits
unless another type is asked for; with an optimizer's state training goes on where it stopped.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.errors import CapacityError, CheckpointError, ConfigError
from headrace.models.building import build_model, load_config, text_config
from headrace.store.conversion import WeightNames
from headrace.store.folders import new_folder, refuse_taken
from headrace.store.shards import TensorGroup, write_shards
from headrace.trainer.heap import map_large_blocks
from headrace.trainer.preflight import model_folder
from headrace.trainer.sharded_source import open_source
from headrace.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

from headrace.trainer.sharded_source import Place, ShardedSource

_SHARD_BYTES = 4 * GIB
_LAYER = re.compile(r"^(.*?\.\d+)\.")
_COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "chat_template*", "*.model", "*processor_config.json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConvertResult:
    """What was written.

    Attributes:
        source: the checkpoint that was read.
        folder: what was written.
        num_tensors: weights.
        num_bytes: of all files.
        dtype: of the weights.
        step: optimizer steps, when the optimizer's state came along; else None.
        notes: what was left out or changed.
    """

    source: Path
    folder: Path
    num_tensors: int
    num_bytes: int
    dtype: str
    step: int | None = None
    notes: tuple[str, ...] = field(default=())


def convert_to_model(
    source: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    dtype: str | None = None,
) -> ConvertResult:
    """Merge a sharded checkpoint into a folder that ``from_pretrained`` loads.

    Args:
        source: a folder of shards, a trainer's checkpoint, or a run folder.
        out: must not exist, or be empty.
        model: folder with config.json (and the tokenizer); else looked for around the source.
        dtype: of floating weights, ``bfloat16``, ``float16`` or ``float32``; None keeps them.

    Raises:
        CheckpointError: the source is not whole, or not of this model.
        ConfigError: no configuration of the model, or ``out`` is taken.
        CapacityError: the disk has no room.
    """
    map_large_blocks()
    out = Path(out)
    refuse_taken(out)
    found = open_source(Path(source))
    config_folder = find_config(found.folder, model)
    template = build_model(text_config(load_config(str(config_folder))), device="meta")
    names, unused = place_weights(found, template)
    target = None if dtype is None else getattr(torch, dtype)
    groups = _groups(found, template, names, target)
    check_room(out, sum(group.num_bytes for group in groups))
    kinds = [t.dtype for g in groups for t in g.described.values() if t.is_floating_point()]
    kind = str(max(kinds, key=kinds.count)).removeprefix("torch.")
    with new_folder(out) as folder:
        write_shards(folder, "model", groups, shard_bytes=_SHARD_BYTES)
        _write_companions(config_folder, folder, kind)
    notes = []
    if unused:
        notes.append(
            f"{len(unused)} tensors have no place in {type(template).__name__}, such as "
            f"{unused[0]}; they are written under their names"
        )
    if found.state:
        notes.append("the optimizer's state was left behind; --to checkpoint takes it along")
    return ConvertResult(
        source=found.folder,
        folder=out,
        num_tensors=sum(len(group.described) for group in groups),
        num_bytes=sum(file.stat().st_size for file in out.iterdir()),
        dtype=kind,
        notes=tuple(notes),
    )


def find_config(folder: Path, model: str | Path | None) -> Path:
    """The folder of the model's config.json: given, or the source's own or one above it.

    Raises:
        ConfigError: there is none.
    """
    if model is not None:
        found = model_folder(str(model), "--model")
        found = found.parent if found.suffix == ".json" else found
        if not (found / "config.json").is_file():
            raise ConfigError(
                f"--model: {found} has no config.json",
                remedy="name the folder of the model that was trained",
            )
        return found
    near = [folder, *folder.resolve().parents[:2]]
    for place in near:
        if (place / "config.json").is_file():
            return place
    raise ConfigError(
        f"no config.json in {folder} or the two folders above it",
        remedy="name the model that was trained: --model FOLDER",
    )


def place_weights(found: ShardedSource, template: nn.Module) -> tuple[WeightNames, list[str]]:
    """How the source names the model's tensors, all of which must be there, and what is unused.

    Raises:
        CheckpointError: it is of another model, or under names of another framework.
    """
    names = WeightNames(template)
    _, unused = names.plan(found.weights)
    wanted = dict(template.state_dict())
    if names.is_converted:
        wanted = WeightNames(template).to_checkpoint(wanted)
    tied = tied_names(template)
    inner = {names.placed(name): place for name, place in found.weights.items()}
    lacking = sorted(wanted.keys() - inner.keys() - tied.keys())
    if lacking:
        raise CheckpointError(
            f"{found.folder} lacks {len(lacking)} of {len(wanted)} tensors of "
            f"{type(template).__name__}, such as {lacking[0]}; it has {len(unused)} under other "
            f"names{', such as ' + unused[0] if unused else ''}",
            remedy="check --model; names of another framework must be turned into Hugging Face's "
            "by its own export first",
        )
    for name, tensor in wanted.items():
        shape = inner[name].described.shape if name in inner else tensor.shape
        if shape != tensor.shape:
            raise CheckpointError(
                f"{name} is {tuple(shape)} in {found.folder}, and {tuple(tensor.shape)} in the "
                "model of config.json",
                remedy="give the config.json that the model was trained with: --model FOLDER",
            )
    for name, target in tied.items():
        if name in inner and target in inner and not inner[name].same(inner[target]):
            raise CheckpointError(
                f"config.json ties {name} to {target}, but {found.folder} holds two",
                remedy="set tie_word_embeddings to false in config.json",
            )
    return names, unused


def tied_names(template: nn.Module) -> dict[str, str]:
    """Names under which a parameter appears again, and its first one."""
    first: dict[int, str] = {}
    again = {}
    for name, parameter in template.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            again[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return again


def _groups(
    found: ShardedSource, template: nn.Module, names: WeightNames, dtype: torch.dtype | None
) -> list[TensorGroup]:
    """The weights as a model folder holds them, a layer at a time."""
    tied = tied_names(template)
    known = template.state_dict()
    form = names.in_default_form()
    layers: dict[str, dict[str, Place]] = {}
    for name, place in found.weights.items():
        if names.placed(name) not in tied:
            match = _LAYER.match(name)
            layers.setdefault(match[1] if match else name, {})[name] = place

    def written(
        places: Mapping[str, Place], value: Callable[[Place], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        tensors = {}
        own = {}
        for name, place in places.items():
            tensor = value(place)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            inner = names.placed(name)
            if names.is_converted or inner not in known:
                tensors[name] = tensor
            else:
                own[inner] = tensor
        return tensors | (form.to_checkpoint(own) if own else {})

    return [
        TensorGroup(
            described=written(places, lambda place: place.described),
            make=lambda places=places: written(places, lambda place: place.read()),  # type: ignore[misc]  # bound here
        )
        for places in layers.values()
    ]


def check_room(out: Path, num_bytes: int) -> None:
    """The disk of ``out`` takes ``num_bytes``.

    Raises:
        CapacityError: with both figures.
        ConfigError: it cannot be written.
    """
    place = out.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if num_bytes > free:
        raise CapacityError(
            f"{out} needs {format_bytes(num_bytes)}, {place} has {format_bytes(free)} free",
            remedy="free space, or write to another disk",
        )


def _write_companions(source: Path, folder: Path, dtype: str) -> None:
    """config.json with the type of the weights, and the tokenizer's files."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
