"""Filling a state: from safetensors unit by unit, by initialisation, from GGUF.

Invariant: peak memory is the state plus one unit (GGUF excepted: transformers dequantizes the
whole model first). Weights that are not finite are refused.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.errors import ConfigError, DataError
from headrace.models.adapters import plain_name
from headrace.store.carried import CarriedTensors
from headrace.store.safetensors_io import SafetensorsReader, read_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from headrace.models.spec import ModelSpec
    from headrace.store.layout import ParamSpec
    from headrace.store.state import ModelState, UnitState

# Buffers that older versions of transformers saved and newer ones compute: rotary tables, masks.
_FIXED = r"inv_freq$|(cos|sin)_cached$|attn\.(bias|masked_bias)$|attention\.(bias|masked_bias)$"


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did not use.

    Attributes:
        ignored: tensors of the checkpoint that the causal LM has no place for; they are carried
            to every checkpoint and export (none from GGUF).
        unused: those of them that are of layers the model has, and that its class is not known to
            leave out: what such a layer computes may not be what it was trained to.
    """

    ignored: tuple[str, ...]
    unused: tuple[str, ...] = ()


def load_pretrained(
    spec: ModelSpec, state: ModelState, path: str | Path, gguf_file: str | None = None
) -> LoadReport:
    """Fill ``state`` from a Hugging Face model folder.

    Args:
        spec: the model's structure.
        state: is overwritten; moments stay zero.
        path: a folder with safetensors, or a ``.gguf`` file.
        gguf_file: the name of a GGUF file in the folder ``path``.

    Raises:
        CheckpointError: no safetensors weights there.
        DataError: a tensor is missing, has another shape, or is not finite.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        path, gguf_file = path.parent, path.name
    if gguf_file is not None:
        return _load_gguf(spec, state, path, gguf_file)
    files = read_index(path)
    pieces, unused = spec.weight_names.plan(files)
    places = {
        p.name: (unit, p) for unit in state.units for p in unit.layout.params if not p.adapter
    }
    order = {name: index for index, name in enumerate(places)}
    pieces.sort(key=lambda piece: order.get(piece.name, len(order)))  # unit by unit
    missing = dict(places)
    head, embedding = f"{spec.parts.head_path}.weight", _embedding(spec).name
    ends = {}
    with SafetensorsReader() as reader:
        reader.read_ahead((files[key], key) for piece in pieces for key in piece.keys)

        def get(key: str) -> torch.Tensor:
            return reader.get(files[key], key)

        for piece in pieces:
            for name, value in piece.read(get, spec.model, spec.config).items():
                if spec.tied and name in (head, embedding):
                    ends[name] = value
                    continue
                if name in places:
                    missing.pop(name, None)
                    unit, param = places[name]
                    unit.set_master(param, value)
        if ends:
            if len(ends) == 2:
                _check_tied(path.name, ends[embedding], ends[head])
            missing.pop(embedding, None)
            unit, param = places[embedding]
            unit.set_master(param, ends[embedding] if embedding in ends else ends[head])
    _fill_missing(spec, state, missing)
    spec.carried = CarriedTensors(unused, files)
    used = [key for piece in pieces for key in piece.keys]
    return LoadReport(ignored=tuple(sorted(unused)), unused=_of_layers(spec, unused, used))


def _of_layers(spec: ModelSpec, unused: Iterable[str], used: Iterable[str]) -> tuple[str, ...]:
    """Unused tensors that lie in the model's layers; vision towers and later layers do not."""
    numbered = re.compile(rf"(.*?(?:^|\.){re.escape(spec.parts.layers_path)}\.)(\d+)\.")
    places = {found[1] for key in used if (found := numbered.match(key))}
    expected = getattr(spec.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    left_out = re.compile("|".join([*expected, _FIXED]))
    return tuple(
        key
        for key in sorted(unused)
        if (found := numbered.match(key))
        and found[1] in places
        and int(found[2]) < spec.num_layers
        and not left_out.search(key)
    )


def _fill_missing(
    spec: ModelSpec, state: ModelState, missing: dict[str, tuple[UnitState, ParamSpec]]
) -> None:
    """Buffers that a checkpoint leaves out get their fresh values; parameters must be there.

    Raises:
        DataError: naming the first parameter that is not.
    """
    for name, (_, param) in missing.items():
        if not param.buffer:
            raise DataError(
                f"the checkpoint has no tensor {name!r} of shape {param.shape}",
                remedy="check that config.json and the weights belong to the same model",
            )
    for number, unit in enumerate(state.units):
        here = [param for owner, param in missing.values() if owner is unit]
        if here:
            values = _fresh_values(spec, number, seed=0)
            for param in here:
                unit.set_master(param, values[plain_name(param.local_name)])


def _check_tied(file: str, embedding: torch.Tensor, head: torch.Tensor) -> None:
    if not torch.equal(embedding, head):
        raise DataError(
            f"the configuration ties the head to the embedding, but {file} holds another head",
            remedy="set tie_word_embeddings to false in config.json",
        )


def _embedding(spec: ModelSpec) -> ParamSpec:
    """The token embedding's matrix, which a tied head shares."""
    return next(p for p in spec.units[0].params if p.local_name == spec.embedding_name)


def _load_gguf(spec: ModelSpec, state: ModelState, folder: Path, gguf_file: str) -> LoadReport:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow; only when needed

    if not (folder / gguf_file).is_file():
        raise ConfigError(f"no GGUF file {folder / gguf_file}", remedy="correct gguf_file")
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), gguf_file=gguf_file, dtype=torch.float32
    )
    tensors = dict(model.named_parameters())
    head = tensors.get(f"{spec.parts.head_path}.weight")
    if spec.tied and head is not None:  # transformers left it apart: it is another one
        _check_tied(gguf_file, tensors[_embedding(spec).name], head)
    for layout, unit in zip(state.layouts, state.units, strict=True):
        for param in layout.params:
            if param.adapter:
                continue
            if param.name not in tensors:
                raise DataError(
                    f"{gguf_file} has no tensor {param.name!r}",
                    remedy="take a GGUF file of the whole model, or its safetensors",
                )
            unit.set_master(param, tensors.pop(param.name))
    return LoadReport(ignored=tuple(sorted(tensors)))


def initialise(spec: ModelSpec, state: ModelState, *, seed: int) -> None:
    """Fill ``state`` with Hugging Face's own initialisation of the model's class.

    Every unit draws from its own stream of ``seed``, so a unit's values do not depend on the
    others; memory peaks at one unit.
    """
    for number, (layout, unit) in enumerate(zip(state.layouts, state.units, strict=True)):
        values = _fresh_values(spec, number, seed=seed)
        for param in layout.params:
            if not param.adapter:
                unit.set_master(param, values[plain_name(param.local_name)])


def _fresh_values(spec: ModelSpec, number: int, *, seed: int) -> dict[str, torch.Tensor]:
    """A unit's tensors as a fresh model has them, by local name in the plain model."""
    rule: Callable[[nn.Module], None] = spec.model._init_weights  # type: ignore[assignment]  # noqa: SLF001 - the class's own rule has no public name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + number)
        values = dict(_initialised(spec.unit_modules(number), rule))
    for param in spec.units[number].params:
        constant = None if param.adapter else spec.constant(param.name)
        if constant is not None:
            values[plain_name(param.local_name)].fill_(constant)
    return values


def _initialised(
    modules: Iterable[tuple[str, nn.Module]], rule: Callable[[nn.Module], None]
) -> Iterable[tuple[str, torch.Tensor]]:
    for prefix, template in modules:
        module = copy.deepcopy(template).to_empty(device="cpu")
        for tensor in (*module.parameters(), *module.buffers()):
            # Memory from to_empty may hold anything; what the rule misses is a constant.
            torch.nn.init.zeros_(tensor)
        for part in module.modules():
            rule(part)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield prefix + name, tensor.detach()
