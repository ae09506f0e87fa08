"""Configurations of well-known models, facts only, with the source of each.

``find_record`` looks a name up; the JSON files beside this module hold, for each model, the keys
of its ``config.json`` that decide sizes, the published number of parameters that they were checked
against, and runs that were published with their figures.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Record:
    """One shipped model.

    Attributes:
        name: repository name.
        config: keys of its ``config.json`` that decide sizes.
        published: ``num_parameters`` (and ``num_active_parameters``) as published, a string.
        sources: where each of them comes from.
        runs: published training runs with their figures and source.
    """

    name: str
    config: dict[str, Any]
    published: dict[str, str]
    sources: dict[str, str]
    runs: tuple[dict[str, Any], ...]


@cache
def _records() -> dict[str, Record]:
    found: dict[str, Record] = {}
    for entry in sorted(resources.files(__name__).iterdir(), key=lambda item: item.name):
        if not entry.name.endswith(".json"):
            continue
        for model in json.loads(entry.read_text(encoding="utf-8"))["models"]:
            record = Record(
                name=model["name"],
                config=model["config"],
                published=model["published"],
                sources=model["sources"],
                runs=tuple(model.get("runs", ())),
            )
            found |= dict.fromkeys((model["name"], *model["aliases"]), record)
    return found


def all_records() -> list[Record]:
    """Every shipped model once, whatever its aliases."""
    return list({record.name: record for record in _records().values()}.values())


def record_names() -> list[str]:
    """All names that are shipped."""
    return list(_records())


def find_record(name: str) -> Record | None:
    """The record of a repository name, its owner and case optional; None if there is none."""
    records = _records()
    wanted = name.lower()
    for full in records:
        if wanted in {full.lower(), full.lower().rpartition("/")[2]}:
            return records[full]
    return None


def nearest_names(name: str) -> list[str]:
    """Up to three shipped names that resemble ``name``."""
    lowered = {full.lower(): full for full in _records()}
    shorts = {full.rpartition("/")[2]: lowered[full] for full in lowered}
    near = difflib.get_close_matches(name.lower(), [*lowered, *shorts], n=3)
    return list(dict.fromkeys(lowered.get(x) or shorts[x] for x in near))


def size_in_name(name: str) -> int | None:
    """The number of parameters that a name states: 35 billion for ``Qwen3.5-35B-A3B``."""
    match = re.search(r"(?:^|[-_/])(\d+(?:\.\d+)?)([bBmM])(?:[-_.]|$)", name)
    if match is None:
        return None
    return round(float(match[1]) * {"b": 10**9, "m": 10**6}[match[2].lower()])
