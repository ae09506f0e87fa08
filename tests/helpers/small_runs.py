"""Small complete trainings: a tokenizer, a corpus and a configuration that runs in a second."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from headrace.trainer import train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.trainer import TrainResult


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> Path:
    """24 documents of one to eight sentences."""
    rows = [{"text": " ".join(sentences[(k + i) % 8] for i in range(1 + k % 8))} for k in range(24)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_config(
    tmp_path: Path, corpus: Path, tokenizer_dir: Path, tiny_model: Callable[..., dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """A configuration of eight steps; keyword arguments replace keys."""

    def make(**changes: Any) -> dict[str, Any]:
        return {
            "model_config": tiny_model(),
            "tokenizer_name_or_path": str(tokenizer_dir),
            "datasets": [{"path": str(corpus)}],
            "data_cache_dir": str(tmp_path / "cache"),
            "output_dir": str(tmp_path / "run"),
            "max_length": 64,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "max_steps": 8,
            "logging_steps": 1,
            "save_strategy": "no",
            "device": "cpu",
            "progress": "none",
        } | changes

    return make


@pytest.fixture
def run_config(make_config: Callable[..., dict[str, Any]]) -> Callable[..., TrainResult]:
    """Train with :func:`make_config`'s keys; ``callbacks`` are passed on."""

    def run(*, callbacks: Any = (), **changes: Any) -> TrainResult:
        return train(make_config(**changes), callbacks=callbacks)

    return run
