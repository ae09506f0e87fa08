"""The JSON schema of a training file, with the meaning of every key, for editors.

Descriptions come from where the keys are defined: field docstrings, and the attributes in the
docstrings of dataclasses. Checks nothing.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from headrace.data.sources import DatasetSource
from headrace.engine.config import EngineConfig, ParamGroup
from headrace.trainer.config import TrainConfig


def json_schema() -> dict[str, Any]:
    """JSON schema of the YAML file."""
    schema: dict[str, Any] = TrainConfig.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "headrace training configuration"
    for kind in (DatasetSource, EngineConfig, ParamGroup):
        meanings = attribute_docs(kind)
        found = schema["$defs"][kind.__name__]
        found["additionalProperties"] = False
        for name, entry in found["properties"].items():
            entry["description"] = meanings[name]
    for entry in schema["properties"].values():
        if "description" in entry:
            entry["description"] = one_line(entry["description"])
    # Sizes may be written with a unit.
    chunk = schema["$defs"]["EngineConfig"]["properties"]["chunk_bytes"]
    chunk["type"] = ["integer", "string"]
    return schema


def one_line(text: str) -> str:
    """A docstring of several lines as one, as a row of a table holds it."""
    return " ".join(text.split())


def attribute_docs(kind: Any) -> dict[str, str]:
    """What the docstring of a dataclass says of each of its fields, on one line."""
    text = one_line(kind.__doc__ or "")
    names = [field.name for field in dataclasses.fields(kind)]
    found = {}
    for name in names:
        rest = text.split(f" {name}: ", 1)[1]
        meaning = re.split(rf" (?:{'|'.join(names)}): ", rest)[0].strip().replace("``", "`")
        found[name] = meaning[0].upper() + meaning[1:]
    return found
