"""Which tensors of a model stream together: embedding, decoder layers, head.

Invariant: every parameter of the causal LM belongs to exactly one unit, a tied head to the
embedding's; names are those of the plain model's state dict (and of PEFT's files for adapters),
local names those of the templates. Pure: reads structure, allocates nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ConfigError, ModelRefusedError
from headrace.models.adapters import is_adapter, is_saved_whole, plain_name
from headrace.store.layout import UnitLayout, plan_unit

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from headrace.models.anatomy import Anatomy
    from headrace.models.lora import LoraSettings
    from headrace.models.spec import Parts

_Entry = tuple[str, str, tuple[int, ...], bool]


def plan_units(
    model: nn.Module,
    parts: Parts,
    anatomy: Anatomy,
    trainable: Callable[[str], bool],
) -> tuple[UnitLayout, ...]:
    """Layouts in order of use.

    Args:
        model: the plain causal LM.
        parts: its modules by role; layers may have adapters in them.
        anatomy: of its class.
        trainable: says of a plain parameter's name whether it is trained.

    Raises:
        ModelRefusedError: a tensor cannot be streamed.
    """
    saved = model.state_dict().keys()
    parameters = {name for name, _ in model.named_parameters()}
    # A class may freeze one for good, such as a routing bias that its training sets otherwise.
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    seen: set[int] = set()
    planned: set[str] = set()

    def entries(module: nn.Module, path: str, local: str = "") -> list[_Entry]:
        found = []
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            full, adapter = plain_name(f"{path}.{name}"), is_adapter(name)
            if id(tensor) in seen or (full not in saved and not adapter):
                continue
            seen.add(id(tensor))
            planned.add(full)
            if not tensor.is_floating_point():
                raise ModelRefusedError(
                    f"{type(model).__name__} has a buffer of integers in its checkpoint, "
                    f"{full}, and headrace streams weights only"
                )
            trained = adapter or (full in learned and trainable(full))
            found.append((full, local + name, tuple(tensor.shape), trained))
        return found

    base = parts.base_path
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    path = path_of(model, embedding)
    # The token embedding first: a tied head is its, not the other way round.
    embed = entries(embedding, path, path.removeprefix(f"{base}.") + ".")
    layers, tail = [], []
    for i, layer in enumerate(parts.layers):
        layers.append(entries(layer, f"{base}.{parts.layers_path}.{i}"))
    for number, (module, place) in enumerate(zip(parts.tail, parts.tail_paths, strict=True)):
        tail += entries(module, f"{base}.{place}", f"tail.{number}.")
    head = entries(parts.head, parts.head_path, "head.")
    # Layers with adapters are others than the base's own.
    embed += [entry for entry in entries(parts.base, base) if entry[0] not in _names(layers)]
    rest = [name for name in parameters if name not in planned]
    if rest:
        raise ModelRefusedError(
            f"{type(model).__name__} has parameters outside its base model and its head: "
            f"{', '.join(sorted(rest)[:3])}"
        )
    float32 = {name for name in saved if anatomy.without_number(name) in anatomy.float32}
    named = [("embed", embed), *((f"layers.{i}", e) for i, e in enumerate(layers))]
    return tuple(
        plan_unit(
            name,
            entry,
            buffers=saved - parameters,
            float32=float32,
            adapters={full for full, local, _, _ in entry if is_adapter(local)},
        )
        for name, entry in (*named, ("head", tail + head))
    )


def _names(layers: list[list[_Entry]]) -> set[str]:
    return {entry[0] for layer in layers for entry in layer}


def path_of(model: nn.Module, wanted: nn.Module) -> str:
    """The path of a module."""
    path: str = next(path for path, module in model.named_modules() if module is wanted)
    return path


def trained_with_adapters(
    model: nn.Module, settings: LoraSettings, tied: tuple[str, ...]
) -> Callable[[str], bool]:
    """Which plain parameters are trained beside adapters: those of ``modules_to_save``.

    Args:
        model: the plain causal LM.
        settings: of the adapters.
        tied: paths of embedding and head when they are one matrix.

    Raises:
        ConfigError: a name means no module.
        ModelRefusedError: it means a tied matrix.
    """
    names = [name for name, _ in model.named_parameters()]
    whole = {name for name in names if is_saved_whole(name, settings)}
    paths = [path for path, _ in model.named_modules()]
    for wanted in settings.modules_to_save:
        means = [path for path in paths if path.endswith(wanted)]
        if not means:
            raise ConfigError(
                f"lora_modules_to_save: no module of {type(model).__name__} is named {wanted!r}",
                remedy="remove it, or correct it",
            )
        if set(means) & set(tied):
            raise ModelRefusedError(
                f"lora_modules_to_save: {wanted} of {type(model).__name__} is embedding and head "
                "in one matrix, which PEFT would save as two that differ",
                remedy="leave it out",
            )
    return lambda name: name in whole
