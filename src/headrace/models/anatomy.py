"""Where the parts of a causal LM are, and whether its layers can be streamed.

A tiny twin of the model (same class, same switches) runs its own forward pass on the CPU while
hooks watch. From what they see follow the paths of embedding, layers, final norm and head, and the
contract that the streamed step relies on: every layer is called once, in order, on the output of
the one before; whatever else a layer is given does not come out of another layer or out of a
parameter; nothing is computed between layers. A model that breaks it is refused with the reason.
"""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.errors import ModelRefusedError
from headrace.models.buffers import is_unset, unset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NUM_ROWS, NUM_POSITIONS = 2, 7


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Paths of a causal LM's parts.

    Attributes:
        base_path: the base model inside the causal LM.
        layers_path: the list of decoder layers inside the base model.
        tail_paths: the modules between the last layer and the base model's output, in order.
        head_path: the matrix that gives logits, inside the causal LM.
        float32: names of parameters and buffers that a bfloat16 model keeps in float32, with
            ``*`` for the number of a layer.
        constants: values of those that are set where modules are made, not by the class's
            initialisation rule; None for a value that is not one number.
    """

    base_path: str
    layers_path: str
    tail_paths: tuple[str, ...]
    head_path: str
    float32: frozenset[str] = frozenset()
    constants: Mapping[str, float | None] = field(default_factory=dict)

    def without_number(self, name: str) -> str:
        """A parameter's name with ``*`` for the number of its layer."""
        prefix = f"{self.base_path}.{self.layers_path}."
        if not name.startswith(prefix):
            return name
        return f"{prefix}*.{name.removeprefix(prefix).partition('.')[2]}"


def find_layers(base: nn.Module) -> str:
    """The path of the largest list of modules that is not inside another one.

    Raises:
        ModelRefusedError: there is none.
    """
    lists: dict[str, int] = {}
    for path, module in base.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            lists[path] = sum(p.numel() for p in module.parameters())
    if not lists:
        raise ModelRefusedError(f"{type(base).__name__} has no list of decoder layers")
    return max(lists, key=lambda path: lists[path])


def find_base(model: nn.Module) -> str:
    """The path of the base model inside a causal LM.

    Raises:
        ModelRefusedError: there is none.
    """
    path = str(getattr(model, "base_model_prefix", ""))
    if path and isinstance(getattr(model, path, None), nn.Module):
        return path
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    for name, child in model.named_children():
        if any(module is embedding for module in child.modules()) and child is not embedding:
            return name
    raise ModelRefusedError(f"{type(model).__name__} has no base model under {path!r}")


def accepted(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that ``function`` takes by name, or all if it takes any."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def bind(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A layer's call as its hidden state and everything else by name."""
    names = [
        name
        for name, p in inspect.signature(layer.forward).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    named = dict(zip(names, args, strict=False)) | kwargs
    hidden = named.pop(names[0])
    return hidden, named


@dataclass
class _Call:
    """One call of a layer, as a hook saw it."""

    index: int
    hidden: Any
    arguments: dict[str, Any]
    output: Any = None


@dataclass
class _Visit:
    """One call of another module, after ``num_layers`` layers."""

    path: str
    num_layers: int
    taken: Any
    given: Any


@dataclass
class _Record:
    """What happened during one forward pass of the twin."""

    calls: list[_Call] = field(default_factory=list)
    after: list[_Visit] = field(default_factory=list)
    before: set[str] = field(default_factory=set)


def examine(twin: nn.Module) -> Anatomy:
    """Run ``twin`` once and take it apart.

    Args:
        twin: a causal LM with real weights on the CPU.

    Raises:
        ModelRefusedError: it cannot be streamed; the message says why.
    """
    kind = type(twin).__name__
    base_path = find_base(twin)
    base = twin.get_submodule(base_path)
    layers_path = find_layers(base)
    layers = base.get_submodule(layers_path)
    assert isinstance(layers, nn.ModuleList)
    record = _Record()
    embedding = twin.get_input_embeddings()  # type: ignore[operator]
    ids_BT = torch.arange(NUM_ROWS * NUM_POSITIONS).view(NUM_ROWS, NUM_POSITIONS) + 3
    arguments = {
        "input_ids": ids_BT % embedding.num_embeddings,
        "position_ids": torch.arange(NUM_POSITIONS).expand(NUM_ROWS, -1).contiguous(),
        "use_cache": False,
    }
    handles = list(_watch(base, layers_path, record))
    try:
        with torch.enable_grad():
            output = base(**accepted(base.forward, arguments))
    except ModelRefusedError:
        # State that is passed on shows first as an argument that attention does not know.
        _check_chain(kind, record.calls)
        raise
    finally:
        for handle in handles:
            handle.remove()
    _check_calls(kind, record, len(layers))
    last = getattr(output, "last_hidden_state", None)
    if last is None:
        last = output[0]
    tail = _tail(kind, record, last)
    _check_outside(kind, base, layers_path, tail, record)
    head = twin.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise ModelRefusedError(f"{kind} has no linear head over the vocabulary")
    head_path = next(path for path, module in twin.named_modules() if module is head)
    anatomy = Anatomy(
        base_path=base_path, layers_path=layers_path, tail_paths=tail, head_path=head_path
    )
    _check_random(kind, base, arguments, last)
    return anatomy


def float32_names(twin: nn.Module, anatomy: Anatomy) -> frozenset[str]:
    """What stays float32 when transformers loads a model in bfloat16.

    Args:
        twin: the model built in bfloat16.
        anatomy: of the same class.
    """
    strict = getattr(twin, "_keep_in_fp32_modules_strict", None) or ()
    return frozenset(
        anatomy.without_number(name)
        for name, value in twin.state_dict().items()
        if value.dtype == torch.float32 or any(re.search(pattern, name) for pattern in strict)
    )


def constructed_values(twin: nn.Module, anatomy: Anatomy) -> dict[str, float | None]:
    """What a fresh model holds that its class's initialisation rule does not set.

    Args:
        twin: as transformers makes it, with its fresh values.
        anatomy: of the class.
    """
    rule: Any = twin._init_weights  # noqa: SLF001 - the class's own rule has no public name
    blank = copy.deepcopy(twin)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for tensor in blank.state_dict().values():
            tensor.copy_(unset(tensor))
        for module in blank.modules():
            rule(module)
    fresh, found = twin.state_dict(), {}
    for name, tensor in blank.state_dict().items():
        if is_unset(tensor):
            value = fresh[name]
            one = value.numel() > 0 and bool((value == value.flatten()[0]).all())
            found[anatomy.without_number(name)] = float(value.flatten()[0]) if one else None
    return found


def _watch(base: nn.Module, layers_path: str, record: _Record) -> Iterator[Any]:
    layers = base.get_submodule(layers_path)
    assert isinstance(layers, nn.ModuleList)

    def layer_called(index: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        hidden, named = bind(layer, args, kwargs)
        snapshot = {k: dict(v) if isinstance(v, dict) else v for k, v in named.items()}
        record.calls.append(_Call(index, hidden, snapshot))

    def layer_returned(output: Any) -> None:
        record.calls[-1].output = output

    for index, layer in enumerate(layers):
        yield layer.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: layer_called(index, module, args, kwargs),
            with_kwargs=True,
        )
        yield layer.register_forward_hook(lambda _m, _a, output: layer_returned(output))
    for path, module in beside(base, layers_path):

        def called(_module: Any, args: Any, output: Any, path: str = path) -> None:
            if not record.calls:
                record.before.add(path)
            else:
                record.after.append(
                    _Visit(path, len(record.calls), args[0] if args else None, output)
                )

        yield module.register_forward_hook(called)


def beside(base: nn.Module, layers_path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the base that stand beside the list of layers or beside what holds it."""
    holder = ""
    for step in layers_path.split("."):
        for name, module in base.get_submodule(holder).named_children():
            if name != step:
                yield f"{holder}.{name}".lstrip("."), module
        holder = f"{holder}.{step}".lstrip(".")


def _check_calls(kind: str, record: _Record, num_layers: int) -> None:
    order = [call.index for call in record.calls]
    if order != list(range(num_layers)):
        what = "more than once" if len(set(order)) < len(order) else f"in the order {order[:8]}"
        raise ModelRefusedError(f"{kind} calls its layers {what}; they must run once each in order")
    _check_chain(kind, record.calls)


def _check_chain(kind: str, calls: list[_Call]) -> None:
    outputs: list[Any] = []
    for call in calls:
        if call.index and call.hidden is not first_tensor(outputs[-1]):
            raise ModelRefusedError(
                f"{kind} computes something between layers {call.index - 1} and {call.index}; "
                "a streamed layer must take what the one before returned"
            )
        _check_arguments(kind, call, outputs)
        outputs.append(call.output)


def _check_arguments(kind: str, call: _Call, outputs: list[Any]) -> None:
    earlier = {id(tensor) for output in outputs for tensor in _tensors(output)}
    for name, value in call.arguments.items():
        for tensor in _tensors(value):
            if id(tensor) in earlier or tensor.requires_grad:
                source = "another layer" if id(tensor) in earlier else "trained weights"
                raise ModelRefusedError(
                    f"{kind} passes state between layers: argument {name!r} of layer "
                    f"{call.index} comes from {source}, whose gradient would be lost"
                )
        if not _is_plain(value):
            raise ModelRefusedError(
                f"{kind} passes state between layers: argument {name!r} of layer {call.index} "
                f"is a {type(value).__name__}"
            )


def _is_plain(value: Any) -> bool:
    """Numbers, tensors and fixed collections of them; not what layers could write to."""
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return bool(value) and all(_is_plain(item) for item in value.values())
    plain = (type(None), bool, int, float, str, torch.Tensor, torch.dtype)
    return isinstance(value, plain) or type(value).__name__ == "Pattern"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def first_tensor(output: Any) -> Any:
    """A layer's hidden state: what it returned, or the first of it."""
    return output[0] if isinstance(output, (tuple, list)) else output


def _tail(kind: str, record: _Record, last: torch.Tensor) -> tuple[str, ...]:
    """The modules from the last layer to the output, each fed by the one before."""
    hidden = first_tensor(record.calls[-1].output)
    paths = []
    for visit in record.after:
        if visit.num_layers < len(record.calls) or visit.taken is not hidden:
            raise ModelRefusedError(
                f"{kind} computes something between layer {visit.num_layers - 1} and "
                f"{visit.path!r}; a streamed layer must take what the one before returned"
            )
        hidden = first_tensor(visit.given)
        paths.append(visit.path)
    if hidden is not last and not _is_view(last, hidden):
        raise ModelRefusedError(f"{kind} computes something after its last layer and final norm")
    return tuple(paths)


def _check_outside(
    kind: str, base: nn.Module, layers_path: str, tail: tuple[str, ...], record: _Record
) -> None:
    """Every parameter outside the layers is used before them or after them, not both."""
    for name, _ in base.named_parameters():
        if name.startswith(f"{layers_path}."):
            continue
        owner = name.rpartition(".")[0]
        used_before = any(_within(owner, path) for path in record.before)
        used_after = any(_within(owner, path) for path in tail)
        if used_before and used_after:
            raise ModelRefusedError(f"{kind} uses {owner!r} both before and after its layers")
        if owner and not used_before and not used_after:
            raise ModelRefusedError(
                f"{kind} has a parameter that its forward pass does not use: {name}"
            )


def _is_view(tensor: torch.Tensor, source: Any) -> bool:
    """The same values under another view."""
    return (
        isinstance(source, torch.Tensor)
        and tensor.data_ptr() == source.data_ptr()
        and tensor.shape == source.shape
        and tensor.stride() == source.stride()
    )


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _check_random(
    kind: str, base: nn.Module, arguments: dict[str, Any], first: torch.Tensor
) -> None:
    with torch.no_grad():
        output = base(**accepted(base.forward, arguments))
    again = output[0] if isinstance(output, tuple) else output.last_hidden_state
    if not torch.equal(first, again):
        raise ModelRefusedError(
            f"{kind} is random in training (dropout or noise): forward and recompute would differ",
            remedy="set its dropout and noise to 0 in config.json",
        )
