"""Dataset entries of axolotl, key by key.

The invariant is that of ``aliases.py``. An entry that is headrace's own passes unchanged and
without a note. Reads no data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.trainer.axolotl import template_name

if TYPE_CHECKING:
    from collections.abc import Callable

_RENAMED = {"field": "text_field", "train_on_eot": "train_on_eos"}
_TYPES: dict[str, dict[str, Any]] = {
    "completion": {"type": "text"},
    "pretrain": {"type": "text"},
    "chat_template": {"type": "messages"},
    "sharegpt": {"type": "messages"},
    "input_output": {"type": "segments"},
    "alpaca_w_system.load": {"type": "alpaca", "field_system": "system"},
}
_OURS = ("text", "tokens", "messages", "prompt_completion", "alpaca", "instruction", "segments")
_DROPPED = {
    "ds_type": "the file's name says it",
    "trust_remote_code": "no code of a dataset is run",
    "preprocess_shards": "datasets are read in parts",
}
_REFUSED = {
    "revision": "the local copy is read",
    "shards": "a part of a dataset is named by split: train[:10%]",
    "shards_idx": "a part of a dataset is named by split: train[:10%]",
    "conversation": "the chat template says it",
    "input_transform": "rows are read as they are",
    "input_format": "rows are read as they are",
    "field_human": "use type: messages or prompt_completion",
    "field_model": "use type: messages or prompt_completion",
    "message_field_training_detail": "a turn is supervised whole or not at all",
    "drop_system_message": "rows are read as they are",
    "split_thinking": "the chat template says it",
    "logprobs_field": "headrace trains on the next token",
    "temperature": "headrace trains on the next token",
    "skip": "a part of a dataset is named by split: train[1000:]",
}
# Keys of the whole run, and the types of rows that they mean something for.
_SPREAD = {
    "train_on_inputs": ("messages", "prompt_completion", "alpaca", "instruction"),
    "chat_template_kwargs": ("messages", "prompt_completion", "instruction"),
}


def translate_entries(
    entries: list[Any], where: str, note: Callable[[str], None], *, axolotl: bool
) -> list[Any]:
    """The entries of ``datasets:`` or ``eval_datasets:`` in headrace's keys."""
    return [
        _entry(entry, f"{where}.{number}", note, axolotl=axolotl)
        if isinstance(entry, dict)
        else entry
        for number, entry in enumerate(entries)
    ]


def spread(key: str, value: Any, result: dict[str, Any], note: Callable[[str], None]) -> None:
    """Put a key of the whole run into every dataset that it means something for."""
    if not value:
        note(f"{key}: {value} -> dropped (it is off)")
        return
    for where in ("datasets", "eval_datasets"):
        for entry in result.get(where) or []:
            if isinstance(entry, dict) and entry.get("type") in _SPREAD[key]:
                entry.setdefault(key, value)
    note(f"{key}: {value} -> {key} of each dataset")


def _entry(
    given: dict[str, Any], where: str, note: Callable[[str], None], *, axolotl: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    mappings: dict[str, str] = dict(given.get("message_property_mappings") or {})
    for key, value in given.items():
        if key in _RENAMED:
            note(f"{where}: {key} -> {_RENAMED[key]}")
            result[_RENAMED[key]] = value
        elif key == "type":
            result |= _type(value, where, note)
        elif key in _DROPPED:
            note(f"{where}: {key}: {value} -> dropped ({_DROPPED[key]})")
        elif key in _REFUSED:
            if value:
                raise ConfigError(
                    f"{where}.{key}: {value!r} is refused: {_REFUSED[key]}", remedy="remove it"
                )
            note(f"{where}: {key}: {value} -> dropped (it is off)")
        elif key in {"message_field_role", "message_field_content"}:
            if value:
                mappings[key.removeprefix("message_field_")] = value
                note(f"{where}: {key} -> message_property_mappings")
        elif key == "field_thinking":
            mappings[given.get("template_thinking_key") or "reasoning_content"] = value
            note(f"{where}: field_thinking -> message_property_mappings")
        elif key == "data_files":
            result["path"] = _one_file(value, where)
            note(f"{where}: data_files -> path: {result['path']}")
        elif key == "chat_template" and value and axolotl:
            result[key] = template_name(value, given.get("chat_template_jinja"))
            if result[key] != value:
                note(f"{where}: chat_template: {value} -> {result[key]}")
        elif key == "chat_template_jinja":
            if value and not given.get("chat_template"):
                result["chat_template"] = value
            note(f"{where}: chat_template_jinja -> chat_template")
        elif key == "name" and axolotl and value:
            raise ConfigError(
                f"{where}.name: {value!r} is refused: a configuration of a hub dataset is a "
                "folder of it here",
                remedy="name that folder as path",
            )
        elif key in {"message_property_mappings", "template_thinking_key"} or value is None:
            continue
        elif key == "path" and "data_files" in given:
            continue  # json, parquet: a kind of file, in axolotl
        else:
            result[key] = value
    if mappings:
        result["message_property_mappings"] = mappings
    return result


def _type(value: Any, where: str, note: Callable[[str], None]) -> dict[str, Any]:
    if value is None:
        note(f"{where}: no type -> tokens (rows that are tokenised already)")
        return {"type": "tokens"}
    if isinstance(value, dict):  # a prompt of the user's own
        keys = {k: v for k, v in value.items() if v not in (None, "")}
        if "field" in keys:
            keys["field_output"] = keys.pop("field")
        shape = keys.pop("system_format", "{system}")
        if shape != "{system}" and "system_prompt" in keys:
            keys["system_prompt"] = str(shape).replace("{system}", keys["system_prompt"])
        note(f"{where}: type with a prompt of its own -> type: alpaca with the same keys")
        return {"type": "alpaca", **keys}
    if not isinstance(value, str) or value in _OURS:
        return {"type": value}
    name = "sharegpt" if value.startswith("sharegpt") else value
    if name not in _TYPES:
        raise ConfigError(
            f"{where}.type: {value!r} is not known",
            remedy=f"one of {', '.join((*_OURS, *_TYPES))}, or keys of a prompt of your own: "
            "{field_instruction, field_output, format}",
        )
    made = _TYPES[name]
    note(f"{where}: type: {value} -> " + ", ".join(f"{k}: {v}" for k, v in made.items()))
    return dict(made)


def _one_file(value: Any, where: str) -> str:
    files = [value] if isinstance(value, str) else list(value or [])
    if len(files) != 1:
        raise ConfigError(
            f"{where}.data_files holds {len(files)} files",
            remedy="name their folder or a pattern as path",
        )
    return str(files[0])
