"""What can be refused before long work begins: model, tokenizer, lengths, disk.

Owns the reading of a run's inputs up to the point where data must be tokenised or weights
loaded. The invariant: nothing is written and no large memory is taken here, and every refusal
says what was given, the limit and the remedy.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.data.files import resolve_files
from headrace.data.hf_tokenizer import read_tokenizer
from headrace.data.templates import resolve_template
from headrace.errors import CapacityError, ConfigError
from headrace.folders import check_model_folder
from headrace.models.building import load_config
from headrace.models.nearby import missing_model
from headrace.models.sizes import check_sizes
from headrace.parallel.launch import place_of
from headrace.store.checkpoint import list_checkpoints
from headrace.trainer.absent import WHERE_FROM, needs_tokenizer, tokenizer_name
from headrace.trainer.model_config import refuse_unknown_keys, usable
from headrace.units import format_bytes

if TYPE_CHECKING:
    from headrace.trainer.config import TrainConfig


_TOKEN_ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


def choose_device(name: str) -> torch.device:
    """The device that ``device:`` names.

    Raises:
        ConfigError: torch knows no such device, or it is not there.
    """
    # Read when CUDA starts. Placement fills a card, and a full card has no room for the holes that
    # blocks of fixed size leave.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is no device", remedy="auto, cpu or cuda") from error
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(
            f"device: {name!r}: headrace computes on the CPU and on CUDA devices",
            remedy="auto, cpu or cuda",
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device: {name} is asked for, but this torch ({torch.__version__}) sees no GPU",
            remedy="device: cpu, or install a CUDA build of torch",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {name}: there are {torch.cuda.device_count()} GPUs, counted from 0",
            remedy="device: cuda",
        )
    return device


def refuse_several_processes(verb: str) -> None:
    """Refuse to be started by a launcher that starts several processes.

    Raises:
        ConfigError: each would do the same and write the same files.
    """
    place = place_of()
    if place.size > 1:
        error = ConfigError(
            f"headrace {verb} was started as one of {place.size} processes, and works in one",
            remedy="start it once, without torchrun or srun",
        )
        error.said = place.rank > 0  # all of them are refused
        raise error


def check_files(config: TrainConfig) -> None:
    """Every dataset path means at least one readable file.

    Raises:
        DataError: naming the first that does not.
    """
    for source in (*config.datasets, *config.eval_datasets):
        resolve_files(source.path, source.split)


def model_folder(name: str, key: str = "model_name_or_path") -> Path:
    """The folder of a model: a path, or the local copy of a hub name.

    Args:
        name: what the configuration holds.
        key: where.

    Raises:
        ConfigError: it is neither; nothing is downloaded.
    """
    if (path := _existing(name)) is not None:
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for names
    from huggingface_hub.errors import (  # noqa: PLC0415 - as above
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise missing_model(name, key) from error


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, nobody's home
        return None


def load_tokenizer(config: TrainConfig) -> Any:
    """The run's tokenizer, or ``None`` when there is none and no dataset needs one.

    Raises:
        ConfigError: a dataset holds text and there is no tokenizer, or ``eos_token`` is not a
            token of it.
    """
    name = tokenizer_name(config)
    if name is None:
        return None
    key = (
        "model_name_or_path" if config.tokenizer_name_or_path is None else "tokenizer_name_or_path"
    )
    folder = model_folder(name, key)
    if config.tokenizer_name_or_path is None:
        check_model_folder(folder)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.tokenizer_name_or_path is None and (gguf := _gguf_file(config, folder)):
        folder, options["gguf_file"] = gguf.parent, gguf.name
    try:
        tokenizer = read_tokenizer(
            folder.parent if folder.suffix == ".json" else folder,
            remedy=f"name one with tokenizer_name_or_path: {WHERE_FROM}",
            **options,
        )
    except ConfigError:
        if not needs_tokenizer(config) and config.tokenizer_name_or_path is None:
            return None
        if config.tokenizer_name_or_path is None and "gguf_file" not in options:
            load_config(str(folder), trust_remote_code=config.trust_remote_code)  # or is it that?
        raise
    given = dict(config.special_tokens)
    if config.eos_token is not None:
        given["eos_token"] = config.eos_token
    for role, token in given.items():
        if token not in tokenizer.get_vocab():
            raise ConfigError(
                f"{role}: {token!r} is not a token of the tokenizer in {folder}",
                remedy="name one of its tokens, such as <|endoftext|> or </s>",
            )
        if role not in _TOKEN_ROLES:
            raise ConfigError(
                f"special_tokens: {role} is no role of a token",
                remedy=f"one of {', '.join(_TOKEN_ROLES)}",
            )
        setattr(tokenizer, role, token)
    if config.chat_template is not None:
        tokenizer.chat_template = resolve_template(config.chat_template, tokenizer)
    return tokenizer


def _gguf_file(config: TrainConfig, folder: Path) -> Path | None:
    if folder.suffix == ".gguf":
        return folder
    return folder / config.gguf_file if config.gguf_file else None


def load_model_config(config: TrainConfig, tokenizer: Any) -> Any:
    """The transformers configuration of the model to train.

    Raises:
        ConfigError: there is none, or its contents are not usable.
    """
    with usable("model_config" if config.scratch_config is not None else "the model's config.json"):
        found = _read_model_config(config, tokenizer)
    check_sizes(found.get_text_config(decoder=True))
    return found


def _read_model_config(config: TrainConfig, tokenizer: Any) -> Any:
    from transformers import (  # noqa: PLC0415 - seconds; configuration errors first
        CONFIG_MAPPING,
        AutoConfig,
    )

    scratch = config.scratch_config
    if isinstance(scratch, str):
        source = _existing(scratch)
        return load_config(
            scratch if source is None else str(source), trust_remote_code=config.trust_remote_code
        )
    if scratch is None:
        assert config.model_name_or_path is not None
        folder = model_folder(config.model_name_or_path)
        if gguf := _gguf_file(config, folder):
            if not gguf.is_file():
                raise ConfigError(f"no GGUF file {gguf}", remedy="correct gguf_file")
            return AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        return load_config(str(folder), trust_remote_code=config.trust_remote_code)
    values = dict(scratch)
    if "model_type" not in values:
        raise ConfigError(
            "model_config has no model_type", remedy="model_type: qwen3, llama, mistral, ..."
        )
    if values["model_type"] not in CONFIG_MAPPING:
        raise ConfigError(
            f"model_config: transformers knows no model_type {values['model_type']!r}",
            remedy="model_type: qwen3, llama, mistral, ...",
        )
    refuse_unknown_keys(values, CONFIG_MAPPING[values["model_type"]])
    if tokenizer is not None:
        # A configuration class has the ids of some released tokenizer as defaults.
        values.setdefault("vocab_size", len(tokenizer))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            values.setdefault(name, getattr(tokenizer, name))
    return AutoConfig.for_model(**values)


def check_disk(
    config: TrainConfig, *, checkpoint_bytes: int, num_saves: int, first_step: int
) -> None:
    """The disk of ``output_dir`` holds the checkpoints that will exist at one time.

    Args:
        config: the run.
        checkpoint_bytes: of one.
        num_saves: that the run will make.
        first_step: above 0 when existing checkpoints stay.

    Raises:
        CapacityError: with the arithmetic.
    """
    limit = config.save_total_limit
    # The new one is complete before the oldest is deleted.
    most = num_saves if limit is None else min(num_saves, limit + 1)
    existing = len(list_checkpoints(config.output_dir)) if first_step else 0
    count = max(1, most - (existing if limit is not None else 0))
    place = config.output_dir.resolve()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        raise ConfigError(
            f"output_dir {config.output_dir}: {place} is not writable", remedy="choose another"
        )
    free = shutil.disk_usage(place).free
    if count * checkpoint_bytes > free:
        raise CapacityError(
            f"checkpoints need {count} x {format_bytes(checkpoint_bytes)} = "
            f"{format_bytes(count * checkpoint_bytes)}, {place} has {format_bytes(free)} free",
            remedy="free space, choose another output_dir"
            + (", or lower save_total_limit" if limit else ", or set save_total_limit")
            if count > 1
            else "free space, or choose another output_dir",
        )


def interval(value: float, num_steps: int) -> int:
    """Steps of an interval given as a count, or as a share of the run if below 1."""
    return max(1, math.ceil(num_steps * value) if value < 1 else int(value))
