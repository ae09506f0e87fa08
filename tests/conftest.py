"""Small real inputs that several parts of the suite share; none needs the network."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

# Before anything imports torch: thread pools that spin between two tiny matrices make a busy
# machine three times slower, and a pool gains nothing at these sizes. Nothing is downloaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# A time limit an example says more about the machine's other work than about the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Verdicts on models are remembered for the session alone.
_CACHE = tempfile.TemporaryDirectory(prefix="headrace-tests-", ignore_cleanup_errors=True)
os.environ["HEADRACE_CACHE_DIR"] = _CACHE.name

SENTENCES = [
    "The committee met in March and left the rate unchanged.",
    "Water in the race drives the wheel; the wheel drives the stones.",
    "Exports rose by four percent in the second quarter of the year.",
    "A gauge at the weir is read every morning and entered in the ledger.",
    "The miller's daughter kept accounts in a hand that nobody else could read.",
    "Prices of wheat and rye moved together until the frost of that winter.",
    "No forecast made before the flood knew of the flood.",
    "The sluice was opened at noon, and by dusk the pond had fallen a foot.",
]


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Eight English sentences of 10 to 15 words."""
    return list(SENTENCES)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of at most 384 tokens with ``<eos>``, saved as Hugging Face saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - only when asked for
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_dir: Path):
    """A fresh instance of the tokenizer in ``tokenizer_dir``."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - only when asked for

    return AutoTokenizer.from_pretrained(tokenizer_dir)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., dict[str, Any]]:
    """Makes the ``model_config`` of a model of two layers, small enough for a step in 10 ms."""

    def make(family: str = "qwen3", *, tied: bool = True, **changes: Any) -> dict[str, Any]:
        return {
            "model_type": family,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "tie_word_embeddings": tied,
            # Large enough for the loss to move within a few steps.
            "initializer_range": 0.1,
            **changes,
        }

    return make
