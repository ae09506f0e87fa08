"""The corpus's tokenizer: a folder or file as given, or a BPE trained before the cutoff.

A vocabulary is learned from text, so it has a vintage like a model. One trained here sees
only documents available by the *earliest* cutoff; one that was given is named in the manifest
with its hash, and its vintage is the user's to know.

The result is a folder that ``AutoTokenizer.from_pretrained`` loads. A tokenizer without an
end-of-sequence token is refused: documents could not be told apart.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.corpus.files import file_sha256, hash_of
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.corpus.config import TokenizerSettings

TRAINING_VERSION = 1
END_OF_TEXT = "<|endoftext|>"
_CONFIG = "tokenizer_config.json"
_FILES = (
    "tokenizer.json",
    _CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """What the manifest says about a tokenizer."""

    folder: Path
    sha256: str
    vocab_size: int
    eos_token: str
    eos_token_id: int
    origin: str

    def to_json(self) -> dict[str, Any]:
        """Without the folder: the manifest does not depend on where it lies."""
        return {
            "sha256": self.sha256,
            "vocab_size": self.vocab_size,
            "eos_token": self.eos_token,
            "eos_token_id": self.eos_token_id,
            "origin": self.origin,
        }


def find_tokenizer_file(given: str) -> Path:
    """``tokenizer.json`` of a folder, or the file itself.

    Raises:
        ConfigError: neither.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"tokenizer {given}: no tokenizer.json there",
            remedy="save it with AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        )
    return path


def load_tokenizer(path: Path) -> Tokenizer:
    """A ``tokenizers`` object that reads special tokens in documents as plain text.

    Raises:
        ConfigError: the file is not a tokenizer.
    """
    try:
        return _parsed(path.read_bytes())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{path} is not a tokenizer: {error}",
            remedy="name the tokenizer.json of a fast tokenizer, or the folder that holds it",
        ) from error


@functools.lru_cache(maxsize=1)  # a build asks for the same one some times
def _parsed(content: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # A document that spells "<|endoftext|>" must not end a document.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", remedy="copy the tokenizer's folder again"
        ) from error
    return loaded if isinstance(loaded, dict) else {}


def end_of_sequence(tokenizer: Tokenizer, file: Path, wanted: str | None) -> tuple[str, int]:
    """The end-of-sequence token and its id.

    Raises:
        ConfigError: none is declared, or it is not in the vocabulary.
    """
    token = wanted
    for name in (_CONFIG, "special_tokens_map.json"):
        if token is None:
            declared = _read_json(file.parent / name).get("eos_token")
            token = declared.get("content") if isinstance(declared, dict) else declared
    if token is None:
        raise ConfigError(
            f"tokenizer {file} has no end-of-sequence token",
            remedy="name one of its tokens: tokenizer: {path: …, eos_token: '</s>'}",
        )
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ConfigError(
            f"end-of-sequence token {token!r} is not in the vocabulary of {file}",
            remedy="name one that is, with tokenizer.eos_token",
        )
    return token, token_id


def adopt_tokenizer(settings: TokenizerSettings, folder: Path) -> TokenizerInfo:
    """Copy a given tokenizer's files into ``folder`` and describe it."""
    assert settings.path is not None
    file = find_tokenizer_file(settings.path)
    tokenizer = load_tokenizer(file)
    token, token_id = end_of_sequence(tokenizer, file, settings.eos_token)
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (file.parent / name).is_file() and (name != "tokenizer.json"):
            shutil.copyfile(file.parent / name, folder / name)
    shutil.copyfile(file, folder / "tokenizer.json")
    config = dict(_read_json(folder / _CONFIG))
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config["eos_token"] = token
    _write_json(folder / _CONFIG, config)
    return _describe(folder, tokenizer, token, token_id, "given")


def train_tokenizer(
    settings: TokenizerSettings, texts: Iterable[str], folder: Path, *, origin: str
) -> TokenizerInfo:
    """Train a byte-level BPE and save it as a Hugging Face tokenizer folder."""
    token = settings.eos_token or END_OF_TEXT
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(
        folder / _CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": token,
            "pad_token": token,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,
        },
    )
    _write_json(folder / "special_tokens_map.json", {"eos_token": token, "pad_token": token})
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, "a special token is in the vocabulary it was given to"
    return _describe(folder, tokenizer, token, token_id, origin)


def describe_folder(folder: Path, *, origin: str) -> TokenizerInfo:
    """A folder made by one of the two ways, read again."""
    file = folder / "tokenizer.json"
    tokenizer = load_tokenizer(file)
    token, token_id = end_of_sequence(tokenizer, file, None)
    return _describe(folder, tokenizer, token, token_id, origin)


def _describe(
    folder: Path, tokenizer: Tokenizer, token: str, token_id: int, origin: str
) -> TokenizerInfo:
    hashes = {
        path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name in _FILES
    }
    return TokenizerInfo(
        folder=folder,
        sha256=hash_of(hashes),
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        eos_token=token,
        eos_token_id=token_id,
        origin=origin,
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def single_threaded() -> None:
    """Keep the Rust pool out of a worker: parallelism is by units, one process each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
