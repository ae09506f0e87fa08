"""Small corpora that the tests of this folder build."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from headrace.corpus.build import build_corpus
from headrace.corpus.config import config_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from headrace.corpus.manifest import Manifest

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "river",
    "mill",
    "wheel",
    "stone",
    "ledger",
    "price",
    "wheat",
    "rye",
    "frost",
    "winter",
    "gauge",
    "weir",
    "noon",
    "pond",
    "sluice",
    "water",
    "market",
    "board",
    "rate",
    "quarter",
    "export",
    "import",
    "bond",
    "yield",
    "crop",
    "barley",
    "canal",
    "lock",
]


def prose(seed: int, num_words: int = 60) -> str:
    """Made-up sentences that no other seed makes."""
    rng = random.Random(seed)
    words = [rng.choice(WORDS) for _ in range(num_words)]
    return f"Note {seed * 7919} of the mill. " + " ".join(words) + "."


@pytest.fixture(name="prose")
def prose_fixture() -> Callable[..., str]:
    return prose


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Rows as JSON lines; strings and bytes are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for row in rows:
            line = row if isinstance(row, bytes) else json.dumps(row).encode()
            file.write(line + b"\n")
    return path


@pytest.fixture(name="write_jsonl")
def write_jsonl_fixture() -> Callable[..., Path]:
    return write_jsonl


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Manifest]:
    """Build a corpus from sources below ``tmp_path``; keys change the configuration."""

    def make(*sources: dict[str, Any], output: str = "corpus", **settings: Any) -> Manifest:
        settings.setdefault("cutoff", "2016-12-31")
        if "cutoffs" in settings:
            del settings["cutoff"]
        settings.setdefault("num_workers", 1)
        named = [
            {"name": f"s{i}", "type": "jsonl", "available_at": "date", **source}
            for i, source in enumerate(sources)
        ]
        values = {"output_dir": str(tmp_path / output), "sources": named, **settings}
        return build_corpus(config_from(values))

    return make
