"""Models behind ``headrace embed``: a plain Hugging Face one, or one streamed by the engine.

Owns loading and closing. The invariant: both give the same callable, ``(ids, lengths) ->
hidden``, so nothing after it knows whether the model fits on the device. It lives in the
command line because the audit imports no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from headrace.audit.stack import (
    describe_stack,
    hash_weight_files,
    hash_weights,
    hf_forward,
    untrained_model,
)
from headrace.errors import ConfigError
from headrace.folders import check_model_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from headrace.audit.embed import Forward

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Embedder:
    """A model ready to embed; a context manager that frees it."""

    tokenizer: Any
    forward: Forward
    weights: str
    stack: dict[str, str]
    source: str
    close: Callable[[], None] = field(default=lambda: None)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free the model."""
        self.close()


def _tokenizer(model: str) -> Any:
    from headrace.data.hf_tokenizer import read_tokenizer

    folder = Path(model)
    if folder.is_absolute() or model.startswith(".") or folder.is_dir():  # no name on a hub
        files = ("config.json", "adapter_config.json")
        if not (folder / files[1]).is_file():
            check_model_folder(folder)
        if not any((folder / name).is_file() for name in files):
            raise ConfigError(
                f"no model at {model!r}: it holds neither {' nor '.join(files)}",
                remedy="give the folder that headrace export or save_pretrained wrote",
            )
    return read_tokenizer(model, remedy="put the model's tokenizer files into its folder")


def _absent(what: str, model: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"no {what} at {model!r}: {str(error).splitlines()[0]}",
        remedy="give a model folder with its tokenizer, or the name of a model that was downloaded",
    )


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(
            f"dtype {name!r} is no type to compute in", remedy=f"one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def load_whole(model: str, *, device: str) -> tuple[Any, Any]:
    """A causal LM with its head, in float32 on ``device``, and its tokenizer.

    Raises:
        ConfigError: no model or tokenizer there.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer(model)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise _absent("model", model, error) from error
    return loaded.to(device).eval(), tokenizer


def _source(model: str, untrained: int | None) -> str:
    return model if untrained is None else f"{model}, untrained twin {untrained}"


def plain_embedder(
    model: str, *, layer: int, device: str, dtype: str, attention: str, untrained: int | None
) -> Embedder:
    """Load a model whole on ``device``.

    Raises:
        ConfigError: no model or tokenizer there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch_dtype = _dtype(dtype)
    tokenizer = _tokenizer(model)
    try:
        if untrained is not None:
            config = AutoConfig.from_pretrained(model, attn_implementation=attention)
            loaded = untrained_model(config, seed=untrained, dtype=torch_dtype)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(
                model, dtype=torch_dtype, attn_implementation=attention
            )
    except (OSError, ValueError) as error:
        raise _absent("model", model, error) from error
    loaded = loaded.to(device)
    return Embedder(
        tokenizer=tokenizer,
        forward=hf_forward(loaded, layer=layer),
        weights=hash_weights(loaded),
        stack=describe_stack(
            device=device, dtype=dtype, attention=attention, runner="transformers"
        ),
        source=_source(model, untrained),
    )


def streaming_embedder(
    model: str, *, layer: int, device: str, dtype: str, untrained: int | None
) -> Embedder:
    """Keep the weights on the host and stream them through the engine, forward only.

    No parameter is trainable, so the host holds the working weights and nothing else: 2 bytes a
    parameter in bfloat16.

    Raises:
        ConfigError: a model that is no local folder, or a type the engine does not keep.
        CapacityError: the host's memory will not do.
    """
    from headrace.engine import Engine
    from headrace.models.building import load_config
    from headrace.models.spec import ModelSpec
    from headrace.store.loading import initialise, load_pretrained
    from headrace.store.state import ModelState

    if dtype not in {"float32", "bfloat16"}:
        raise ConfigError(
            f"dtype {dtype!r}: the engine streams float32 or bfloat16",
            remedy="--dtype bfloat16, or leave --stream out",
        )
    folder = Path(model)
    if not folder.is_dir():
        raise ConfigError(
            f"--stream reads weights unit by unit from a folder; {model!r} is none",
            remedy="download the model and give its folder",
        )
    tokenizer = _tokenizer(model)
    spec = ModelSpec(load_config(model), trainable=lambda _: False)
    state = ModelState.allocate(spec, dtype, device=device)  # type: ignore[arg-type]  # checked above
    if untrained is None:
        load_pretrained(spec, state, folder)
        weights = hash_weight_files(folder)
    else:
        initialise(spec, state, seed=untrained)
        config_hash = hash_weight_files(folder)
        weights = f"untrained:{untrained}:{config_hash}"
    engine = Engine(spec, state, device=device)

    def forward(ids_BT: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        del lengths_B  # rows are padded on the right and the model is causal
        return engine.hidden_states(ids_BT, layer=layer)

    def close() -> None:
        engine.close()
        state.close()

    computed = "float32" if torch.device(device).type == "cpu" else dtype
    return Embedder(
        tokenizer=tokenizer,
        forward=forward,
        weights=weights,
        stack=describe_stack(
            device=device,
            dtype=dtype if computed == dtype else f"{dtype}, computed in {computed}",
            attention="headrace",
            runner="headrace",
        ),
        source=_source(model, untrained),
        close=close,
    )
