"""Write the tables of keys in ``docs/training.md``, and the JSON schema for editors.

    python docs/generate_training.py

A test fails when they and the program differ.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from headrace.engine.config import EngineConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.schema import attribute_docs, json_schema, one_line

TARGET = Path(__file__).with_name("training.md")
SCHEMA = Path(__file__).with_name("headrace.schema.json")


def training_rows() -> list[tuple[str, str, str]]:
    """Key, default and meaning of every key of a training file."""
    rows = []
    for name, field in TrainConfig.model_fields.items():
        default = field.get_default(call_default_factory=True)
        required = field.is_required() or name == "engine" or default is None or default == []
        shown = "" if required else f"`{json.dumps(default, default=str)}`"
        rows.append((field.alias or name, shown, one_line(field.description or "")))
    return rows


def engine_rows() -> list[tuple[str, str, str]]:
    """The same for the keys under ``engine:``, meanings from the docstring of its settings."""
    rows = []
    for name, meaning in attribute_docs(EngineConfig).items():
        default: Any = EngineConfig.__dataclass_fields__[name].default
        rows.append((name, "" if default is None else f"`{json.dumps(default)}`", meaning))
    return rows


def schema_text() -> str:
    """The JSON schema for editors, as the file holds it."""
    return json.dumps(json_schema(), indent=1, default=str) + "\n"


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
    SCHEMA.write_text(schema_text(), encoding="utf-8")
