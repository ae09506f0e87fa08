"""The model that ``--model`` names, as a Hugging Face folder that every step can read.

A folder with safetensors is copied as it is (by name, not by content: files are linked where
the file system can). A folder with one GGUF file, and the file itself, are converted through
the store. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def open_base(model: Path, out: Path) -> str:
    """Make ``out`` a model folder with a tokenizer; returns a line about it.

    Args:
        model: Hugging Face folder, folder with one GGUF file, or GGUF file.
        out: replaced if it exists.

    Raises:
        ConfigError: there is no model, or no tokenizer with it.
    """
    shutil.rmtree(out, ignore_errors=True)
    if model.is_dir() and any(model.glob("*.safetensors")):
        _link(model, out)
        kind = "safetensors"
    else:
        _convert(_gguf_file(model), out)
        kind = "GGUF, converted"
    if not (out / "tokenizer.json").is_file():
        raise ConfigError(
            f"{model} brings no tokenizer.json",
            remedy="save the model's tokenizer into its folder",
        )
    return f"{kind}: {out}"


def _link(model: Path, out: Path) -> None:
    out.mkdir(parents=True)
    for path in sorted(model.iterdir()):
        if path.is_file():
            try:
                os.link(path.resolve(), out / path.name)
            except OSError:
                shutil.copyfile(path, out / path.name)


def _gguf_file(model: Path) -> Path:
    if model.suffix == ".gguf" and model.is_file():
        return model
    found = sorted(model.glob("*.gguf")) if model.is_dir() else []
    if len(found) != 1:
        what = f"{len(found)} GGUF files" if found else "no weights"
        raise ConfigError(
            f"--model {model}: {what} there",
            remedy="give a folder with *.safetensors, or one GGUF file; nothing is downloaded",
        )
    return found[0]


def _convert(gguf: Path, out: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415 (seconds)
    from transformers.utils import logging  # noqa: PLC0415 (as above)

    from headrace.models.spec import ModelSpec  # noqa: PLC0415 (loads torch)
    from headrace.store.checkpoint import export_pretrained  # noqa: PLC0415 (as above)
    from headrace.store.loading import load_pretrained  # noqa: PLC0415 (as above)
    from headrace.store.state import ModelState  # noqa: PLC0415 (as above)

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    spec = ModelSpec(AutoConfig.from_pretrained(**source), trainable=lambda _: False)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    state = ModelState.allocate(spec, "bfloat16", device="cpu")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        load_pretrained(spec, state, gguf)
        export_pretrained(spec, state, out, tokenizer=tokenizer)
    finally:
        state.close()
        if bars:
            logging.enable_progress_bar()
