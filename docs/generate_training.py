"""Write the tables of keys in ``docs/training.md`` from the configuration itself.

    python docs/generate_training.py

A test fails when the page and the program differ.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from headrace.engine.config import EngineConfig
from headrace.trainer.config import TrainConfig

TARGET = Path(__file__).with_name("training.md")


def training_rows() -> list[tuple[str, str, str]]:
    """Key, default and meaning of every key of a training file."""
    rows = []
    for name, field in TrainConfig.model_fields.items():
        default = field.get_default(call_default_factory=True)
        required = field.is_required() or name == "engine" or default is None or default == []
        shown = "" if required else f"`{json.dumps(default, default=str)}`"
        rows.append((field.alias or name, shown, field.description or ""))
    return rows


def engine_rows() -> list[tuple[str, str, str]]:
    """The same for the keys under ``engine:``, meanings from the docstring of its settings."""
    text = re.sub(r"\s+", " ", EngineConfig.__doc__ or "")
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    rows = []
    for field in dataclasses.fields(EngineConfig):
        rest = text.split(f" {field.name}: ", 1)[1]
        meaning = re.split(rf" (?:{'|'.join(names)}): ", rest)[0].strip()
        default: Any = field.default
        shown = "" if default is None else f"`{json.dumps(default)}`"
        rows.append((field.name, shown, meaning[0].upper() + meaning[1:]))
    return rows


def fill(text: str, marker: str, rows: list[tuple[str, str, str]]) -> str:
    """``text`` with the table between ``<!-- marker -->`` and its end replaced."""
    lines = [
        f"| `{key}` | {shown} | {meaning.replace('``', '`').replace('|', chr(92) + '|')} |\n"
        for key, shown, meaning in rows
    ]
    table = "\n| key | default | meaning |\n|---|---|---|\n" + "".join(lines) + "\n"
    pattern = rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)"
    return re.sub(pattern, lambda match: match[1] + table + match[2], text, flags=re.DOTALL)


def generate() -> str:
    """The page with both tables as the program has them."""
    text = TARGET.read_text(encoding="utf-8")
    return fill(fill(text, "keys", training_rows()), "engine", engine_rows())


if __name__ == "__main__":
    TARGET.write_text(generate(), encoding="utf-8")
