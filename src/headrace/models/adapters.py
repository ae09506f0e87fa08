"""Low-rank adapters (LoRA, arXiv:2106.09685) on the layers of a model that itself stays frozen.

PEFT's own modules stand in the layer templates, so that what runs is what PEFT runs, but for
experts (:mod:`headrace.models.expert_adapters`); here is decided which matrices get one, and how
PEFT's names and the model's belong together. Invariant: PEFT, given the configuration that is
saved, puts adapters on the same matrices and no others.
Adapters have masters and moments; everything else has neither. This module holds no values.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from headrace.errors import ConfigError, ModelRefusedError
from headrace.models.dropout import SeededDropout
from headrace.models.expert_adapters import AdaptedExperts
from headrace.models.experts import runs_as_ours
from headrace.models.lora import ALL_LINEAR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.models.lora import LoraSettings

ADAPTER = "default"  # PEFT's name for the only adapter of a model
KEY_PREFIX = "base_model.model."  # of every name in PEFT's files
STACKED = 3  # dimensions of a parameter that holds a matrix an expert
_WRAPPED = re.compile(r"(\.base_layer)+\.")


@dataclass(frozen=True)
class Adapters:
    """The adapters of one model.

    Attributes:
        settings: what was asked for.
        peft_config: PEFT's configuration of the same adapters.
        layers: the decoder layers with PEFT's modules in them, on the meta device.
        layers_path: where the plain model has them.
        targets: paths of the matrices that have an adapter, in the plain model.
        parameters: paths of the stacked parameters that have adapters, in the plain model.
        skipped: matrices that ``all-linear`` leaves out, because PEFT gives their names to experts.
    """

    settings: LoraSettings
    peft_config: Any
    layers: nn.ModuleList
    layers_path: str
    targets: tuple[str, ...]
    parameters: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def relative_targets(self) -> tuple[str, ...]:
        """Paths inside a layer of the matrices that have an adapter."""
        return self._inside(self.targets)

    @property
    def relative_parameters(self) -> tuple[str, ...]:
        """Paths inside a layer of the stacked parameters that have adapters."""
        return self._inside(self.parameters)

    def _inside(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        inside = {path.removeprefix(f"{self.layers_path}.").partition(".")[2] for path in paths}
        return tuple(sorted(inside))

    def module(self, target: str) -> Any:
        """PEFT's module of a target."""
        return self.layers.get_submodule(target.removeprefix(f"{self.layers_path}."))

    def on_parameter(self, name: str) -> tuple[str, AdaptedExperts]:
        """Path and module of the adapters on one of ``parameters``."""
        path, _, parameter = name.rpartition(".")
        for part in self.module(path).nested():
            if part.parameter_name == parameter:
                return path, part
            path += ".base_layer"
        raise KeyError(name)

    def rank(self, name: str, rows: int) -> int:
        """The rank of an A by its path in PEFT's files and its rows: experts have one each."""
        part = self.module(name.rpartition(".lora_A.")[0])
        return rows // part.num_experts if isinstance(part, AdaptedExperts) else rows


def attach(
    plain: nn.Module, layers_path: str, settings: LoraSettings, build: Callable[[], nn.Module]
) -> Adapters:
    """Give a twin of ``plain`` adapters.

    Args:
        plain: the causal LM.
        layers_path: where it has its decoder layers.
        settings: which adapters.
        build: makes another causal LM like ``plain``, on the meta device.

    Raises:
        ConfigError: a target means no matrix, or peft is not installed.
        ModelRefusedError: a target cannot have an adapter here.
    """
    parameters = find_parameters(plain, layers_path, settings)
    targets = find_targets(plain, layers_path, settings)

    def injected() -> tuple[Any, nn.ModuleList, set[str], set[str]]:
        return _injected(build(), layers_path, settings, targets, parameters)

    config, layers, found, adapted = injected()
    elsewhere = sorted(set(targets) - found)
    if elsewhere:
        # PEFT gives the names of experts' former modules to the experts' fused tensors.
        if settings.target_modules != ALL_LINEAR:
            meant = sorted({path.split(".", 3)[-1] for path in adapted})
            raise ModelRefusedError(
                f"PEFT puts an adapter for {elsewhere[0]} on the fused experts of "
                f"{type(plain).__name__}, at twice the rank where two of them are one tensor",
                remedy="leave these names out of lora_target_modules, or use all-linear, which "
                f"does; lora_target_parameters: [{', '.join(meant)}] gives experts adapters",
            )
        targets = [target for target in targets if target not in elsewhere]
        config, layers, found, adapted = injected()
    strange = sorted(found ^ set(targets)) or sorted(adapted ^ set(parameters))
    if strange or not (targets or parameters):
        raise ModelRefusedError(
            f"PEFT puts adapters elsewhere than on what was asked for of {type(plain).__name__}"
            + (f": {strange[0]}" if strange else "")
        )
    return Adapters(
        settings, config, layers, layers_path, tuple(targets), tuple(parameters), tuple(elsewhere)
    )


def find_parameters(plain: nn.Module, layers_path: str, settings: LoraSettings) -> list[str]:
    """Paths of the stacked parameters that ``settings`` mean.

    Raises:
        ConfigError: a name means nothing.
        ModelRefusedError: it means what can have no adapter there.
    """
    if not settings.target_parameters:
        return []
    prefix = f"{layers_path}."
    stacked = _stacked(plain, prefix)
    known = _known(stacked, prefix)
    remedy = "leave it out: the model has no stacked experts"
    if known:
        remedy = f"its stacked experts have {', '.join(known)}"
    found, used = [], set()
    for path, _ in plain.named_parameters():
        names = {wanted for wanted in settings.target_parameters if _ends_with(path, wanted)}
        used |= names
        layers = settings.layers if settings.layers_of_parameters else None
        if not names or not _in_layers(path, prefix, layers):
            continue
        if path not in stacked:
            raise ModelRefusedError(
                f"lora_target_parameters: {path} is no parameter of stacked experts",
                remedy=f"{remedy}; PEFT merges an adapter on others into its model",
            )
        if is_saved_whole(path, settings):
            raise ConfigError(
                f"{path} is to be trained whole (lora_modules_to_save) and to have adapters",
                remedy="remove it from one of them",
            )
        found.append(path)
    lacking = sorted(set(settings.target_parameters) - used)
    if lacking or not found:
        raise ConfigError(
            f"lora_target_parameters: no parameter of {type(plain).__name__} is named "
            f"{(lacking or settings.target_parameters)[0]!r}"
            + ("" if settings.layers is None else " in the layers asked for"),
            remedy=remedy,
        )
    return found


def _stacked(plain: nn.Module, prefix: str) -> set[str]:
    """Paths of the parameters that hold a matrix an expert."""
    return {
        f"{path}.{name}"
        for path, module in plain.named_modules()
        if path.startswith(prefix) and runs_as_ours(module)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == STACKED
    }


def _known(stacked: set[str], prefix: str) -> list[str]:
    return sorted({path.removeprefix(prefix).partition(".")[2] for path in stacked})


def find_targets(plain: nn.Module, layers_path: str, settings: LoraSettings) -> list[str]:
    """Paths of the matrices that ``settings`` mean.

    Raises:
        ConfigError: a name means nothing.
        ModelRefusedError: a name means what can have no adapter.
    """
    prefix = f"{layers_path}."
    wanted = settings.target_modules
    if not wanted and settings.target_parameters:
        return []
    found, used = [], set()
    for path, module in plain.named_modules():
        if wanted == ALL_LINEAR:
            chosen = path.startswith(prefix) and _is_linear(module)
        elif isinstance(wanted, str):
            chosen = re.fullmatch(wanted, path) is not None
        else:
            names = {name for name in wanted if _ends_with(path, name)}
            used |= names
            chosen = bool(names)
        if not chosen or not _in_layers(path, prefix, settings.layers):
            continue
        if is_saved_whole(f"{path}.weight", settings):
            continue
        _check_target(path, module, prefix)
        found.append(path)
    lacking = [] if isinstance(wanted, str) else sorted(set(wanted) - used)
    if lacking or not found:
        what = ", ".join(map(repr, lacking)) or repr(wanted)
        known = sorted({path.rpartition(".")[2] for path in _linear_paths(plain, prefix)})
        near = difflib.get_close_matches(lacking[0] if lacking else str(wanted), known, n=1)
        remedy = f"did you mean {near[0]}? " if near else ""
        if stacks := _known(_stacked(plain, prefix), prefix):
            remedy = f"lora_target_parameters: [{', '.join(stacks)}] means its experts; "
        raise ConfigError(
            f"adapter targets: no module of {type(plain).__name__} is named {what}"
            + ("" if settings.layers is None else " in the layers asked for"),
            remedy=f"{remedy}its layers have {', '.join(known)}",
        )
    return found


def _in_layers(path: str, prefix: str, layers: tuple[int, ...] | None) -> bool:
    if layers is None or not path.startswith(prefix):
        return True
    return int(path.removeprefix(prefix).partition(".")[0]) in layers


def _linear_paths(plain: nn.Module, prefix: str) -> Iterator[str]:
    for path, module in plain.named_modules():
        if path.startswith(prefix) and _is_linear(module):
            yield path


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - slow; a model exists by now

    return type(module) in (nn.Linear, Conv1D)


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _check_target(path: str, module: nn.Module, prefix: str) -> None:
    if not path.startswith(prefix):
        raise ModelRefusedError(
            f"adapters on {path} are not supported: embedding and head stream with the loss, and "
            "only decoder layers have adapters",
            remedy="lora_modules_to_save trains them whole",
        )
    if not _is_linear(module):
        raise ModelRefusedError(
            f"adapters on {path} are not supported: it is a {type(module).__name__}, and only "
            "linear layers have adapters (experts are one fused tensor, routers choose by theirs)",
            remedy="lora_modules_to_save trains it whole",
        )


def _injected(
    model: nn.Module,
    layers_path: str,
    settings: LoraSettings,
    targets: list[str],
    parameters: list[str],
) -> tuple[Any, nn.ModuleList, set[str], set[str]]:
    """PEFT's configuration, the layers with its modules, and which matrices it gave adapters.

    Those of linear layers by the layers' paths, those of stacked parameters by theirs.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415 - optional, slow
        from peft.tuners.lora.layer import LoraLayer, ParamWrapper  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ConfigError(
            "adapter: lora needs the package peft", remedy="pip install 'headrace[lora]'"
        ) from error
    import warnings  # noqa: PLC0415 - beside its only use

    if not targets and not parameters:
        raise ModelRefusedError(f"no linear layer of {type(model).__name__} can have an adapter")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=_whole(settings.alpha),
        target_modules=_shortest(targets, [path for path, _ in model.named_modules()]),
        target_parameters=_shortest(parameters, [path for path, _ in model.named_parameters()])
        or None,
        use_rslora=settings.use_rslora,
        init_lora_weights=True if settings.initialisation == "default" else "gaussian",
        rank_pattern=dict(settings.rank_pattern),
        alpha_pattern={pattern: _whole(alpha) for pattern, alpha in settings.alpha_pattern},
        bias="none",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT remarks on is checked by its result
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    model.train()
    wrappers, found = {}, set()
    for path, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            wrappers[path] = module
        elif isinstance(module, LoraLayer):
            found.add(path)
    adapted = {
        f"{_without_wrappers(path)}.{wrapper.parameter_name}" for path, wrapper in wrappers.items()
    }
    for path, wrapper in wrappers.items():
        if not path.endswith(".base_layer"):
            model.set_submodule(path, AdaptedExperts(wrapper, ADAPTER))
    config.modules_to_save = list(settings.modules_to_save) or None
    config.inference_mode = True  # as PEFT saves it
    config.lora_dropout = settings.dropout  # any but 0 PEFT refuses to try on experts
    layers = model.get_submodule(layers_path)
    assert isinstance(layers, nn.ModuleList)
    if settings.dropout:
        _seed_dropout(layers, LoraLayer, settings.dropout)
    return config, layers, found, adapted


def _seed_dropout(layers: nn.ModuleList, kind: type[Any], probability: float) -> None:
    """Put dropout where PEFT has it; of PEFT's own, recompute would draw another mask."""
    for layer in layers:
        for path, module in list(layer.named_modules()):
            if isinstance(module, kind):
                module.lora_dropout[ADAPTER] = SeededDropout(probability, path)


def _shortest(wanted: list[str], existing: list[str]) -> list[str]:
    """Names by which PEFT finds the same paths: their last parts, if these mean no others."""
    leaves = {path.rpartition(".")[2] for path in wanted}
    meant = {path for path in existing if path.rpartition(".")[2] in leaves}
    return sorted(leaves) if meant == set(wanted) else list(wanted)


def _without_wrappers(path: str) -> str:
    return _WRAPPED.sub(".", f"{path}.").rstrip(".")


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value


# -- names ---------------------------------------------------------------------------------


def is_adapter(name: str) -> bool:
    """A parameter's path in the templates is that of an adapter's matrix."""
    return f".{ADAPTER}." in name and ".lora_" in name


def plain_name(name: str) -> str:
    """A parameter's path in the templates, as the plain model or PEFT's files name it."""
    if not is_adapter(name):  # adapters keep it: PEFT nests those of a module's parameters
        name = _WRAPPED.sub(".", name)
    return name.replace(f".{ADAPTER}.", ".")


def is_saved_whole(name: str, settings: LoraSettings) -> bool:
    """A plain parameter belongs to one of ``modules_to_save``."""
    module = name.rpartition(".")[0]
    while module:
        if any(module.endswith(wanted) for wanted in settings.modules_to_save):
            return True
        module = module.rpartition(".")[0]
    return False
