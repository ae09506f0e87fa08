"""Whether the tokens of a corpus are those of the model that is to learn them.

Owns one comparison: the ids of ``CORPUS/tokens`` against ``CORPUS/tokenizer`` beside it. The
invariant: every token of a corpus has the same id in the run's tokenizer. Ids of another tokenizer
below the model's vocabulary would train without a word and mean something else. Tokens that lie
without their tokenizer are taken as they are.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.data.sources import DatasetSource


def check_corpus_tokenizer(source: DatasetSource, tokenizer: Any) -> None:
    """Refuse the tokens of a corpus whose tokenizer is not the run's.

    The run's tokenizer may have further tokens.

    Args:
        source: an entry of ``datasets``; only ``tokens`` of a corpus are looked at.
        tokenizer: the run's.

    Raises:
        DataError: naming a token, both of its ids, and what to change.
    """
    if source.type != "tokens":
        return
    for file in _tokenizer_files(source.path):
        theirs = _vocabulary(file)
        ours = tokenizer.get_vocab()
        differing = [token for token, number in theirs.items() if ours.get(token) != number]
        if not differing:
            continue
        token = min(differing, key=theirs.__getitem__)
        here = f"{ours[token]}" if token in ours else "none"
        raise DataError(
            f"dataset {source.label!r} was tokenised with another tokenizer than the run's: "
            f"{len(differing):,} of {len(theirs):,} tokens differ, {token!r} has the id "
            f"{theirs[token]} in {file.parent} and {here} here",
            remedy="build the corpus with `tokenizer: FOLDER` of the model; or, to train from "
            f"random weights, tokenizer_name_or_path: {file.parent}",
        )


def _tokenizer_files(path: str) -> Iterator[Path]:
    """``CORPUS/tokenizer/tokenizer.json`` of every corpus whose ``tokens`` ``path`` names."""
    given = Path(path).expanduser()
    folder = given if given.name == "tokens" else given.parent
    if folder.name != "tokens":
        return
    for corpus in sorted(glob.glob(str(folder.parent))):  # noqa: PTH207 - absolute too
        file = Path(corpus) / "tokenizer" / "tokenizer.json"
        if (Path(corpus) / "manifest.json").is_file() and file.is_file():
            yield file


def _vocabulary(file: Path) -> dict[str, int]:
    from tokenizers import Tokenizer  # noqa: PLC0415 - only where there is a corpus

    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))
    except Exception as error:  # the library raises bare exceptions
        raise DataError(
            f"{file} cannot be read: {error}", remedy="build the corpus again"
        ) from error
