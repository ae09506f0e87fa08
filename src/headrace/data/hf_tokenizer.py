"""The tokenizer of a model folder, as transformers reads it, or the reason why there is none.

The invariant: what is returned turns text into tokens of text. transformers makes a tokenizer of
special tokens alone from a folder that holds only ``config.json`` (Qwen's drops every word, Gemma's
reads each text as ``<unk>``), and training on that would teach nothing without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def read_tokenizer(folder: Path | str, *, remedy: str, **options: Any) -> Any:
    """The tokenizer that lies in ``folder``.

    Args:
        folder: a folder, or a name in the local hub cache.
        remedy: what the user can do where there is none.
        options: of ``AutoTokenizer.from_pretrained``.

    Raises:
        ConfigError: there is none, its files are damaged, or it has special tokens alone.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds; only when there is one to read

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
    except MemoryError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions for a damaged file
        raise ConfigError(f"no tokenizer in {folder}: {_reason(error)}", remedy=remedy) from error
    vocabulary = set(tokenizer.get_vocab())
    if vocabulary <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        raise ConfigError(
            f"no tokenizer in {folder}: it holds no vocabulary, and what transformers makes of it "
            f"has {len(vocabulary)} special token(s) and none of text",
            remedy=remedy,
        )
    return tokenizer


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)
