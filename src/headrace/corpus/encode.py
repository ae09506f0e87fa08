"""Texts to token ids: the ways there are, and the check that they agree.

:class:`ReferenceEncoder` is the tokenizer library itself. :func:`make_encoder` gives a fast way
only for tokenizers whose parts are known to it: the compiled one, or, where that was not built
or does not know the pattern, remembered pieces. The invariant: the ids are the library's. A fast
way is compared with it on made-up texts when it is loaded and on the first texts of every unit;
a difference ends its use, and is reported.
"""

from __future__ import annotations

import functools
import json
import logging
import random
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from headrace.corpus.compiled import compiled_encoder
from headrace.corpus.pieces import PieceEncoder, cuts_at_spaces, is_plain
from headrace.corpus.tokens import Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

ENCODER_VERSION = 1

_LOGGER = logging.getLogger(__name__)
_CHECKED_TEXTS = 24
_CHECKED_CHARS = 24_000
_MADE_UP_TEXTS = 200


class Encoder(Protocol):
    """Token ids of texts, special tokens as the tokenizer's post-processor adds them."""

    def encode_column(self, texts: pa.LargeStringArray) -> Tokens:
        """Ids of the texts of an Arrow column, each with the end-of-sequence id last."""
        ...


class ReferenceEncoder:
    """The tokenizer library, text by text."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        """Use ``tokenizer`` as it is configured."""
        self._tokenizer = tokenizer
        self._eos = eos_token_id

    def encode_column(self, texts: pa.LargeStringArray) -> Tokens:
        """Ids of the texts of an Arrow column, each with the end-of-sequence id last."""
        encoded = self._tokenizer.encode_batch_fast(texts.to_pylist())
        return Tokens.joined(
            [_ended(np.array(text.ids, dtype=np.int32), self._eos) for text in encoded]
        )


def _ended(ids: NDArray[np.int32], eos: int) -> NDArray[np.int32]:
    if ids.size and ids[-1] == eos:
        return ids
    return np.append(ids, np.int32(eos))


class CheckedEncoder:
    """A fast way, and the library beside it on some texts."""

    def __init__(self, fast: Encoder, reference: ReferenceEncoder) -> None:
        """Compare the two on made-up texts."""
        self.fast = fast
        self._reference = reference
        self._num_left = 0
        self.differs = False
        """Whether a comparison failed, and the reference is used instead."""
        self._compare(pa.array(made_up_texts(), pa.large_string()))

    def start_unit(self) -> None:
        """Compare the coming texts with the reference."""
        self._num_left = _CHECKED_TEXTS

    def encode_column(self, texts: pa.LargeStringArray) -> Tokens:
        """Ids of the texts of an Arrow column, each with the end-of-sequence id last."""
        if self._num_left > 0 and not self.differs:
            first = texts.slice(0, self._num_left)
            self._num_left -= len(first)
            self._compare(_together_short(first))
        return (self._reference if self.differs else self.fast).encode_column(texts)

    def _compare(self, texts: pa.LargeStringArray) -> None:
        got, wanted = self.fast.encode_column(texts), self._reference.encode_column(texts)
        if not (np.array_equal(got.ids, wanted.ids) and np.array_equal(got.counts, wanted.counts)):
            self.differs = True
            _LOGGER.warning(
                "the fast encoder gave other tokens than the tokenizer library, which is used "
                "instead: slower, with the same result"
            )


def _together_short(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Those of the texts that can be compared without costing much."""
    rows, held = [], 0
    for row, length in enumerate(pa.compute.binary_length(texts).to_pylist()):
        if held + length <= _CHECKED_CHARS:
            rows.append(row)
            held += length
    return texts.take(pa.array(rows, pa.int64()))


_PARTS = (
    "the", "The", "of", "wheat", "don't", "DON'T", "wheel's", "they'll", "I've", "'re", "1", "2017",
    "1234567", "3.14", "a1b2", "_", "__init__", "(", ")", ");", ",", ".", "...", "--", "/", "//",
    "http://", "\\n", "{}", "<|", "|>", "#", "$", "caf\u00e9", "K\u00f6ln", "na\u00efve", "\u2019s",
    "\u201cquoted\u201d", "\u2014", "\u041c\u043e\u0441\u043a\u0432\u0430", "\u5c0f\u9ea6",
    "\ud55c\uad6d", "\u3042", "\u0663", "\u00bd", "\u0939\u093f", "\u0e01\u0e34", "\U0001f600",
    "e\u0301", "\ufb01", "\u017f", "x" * 70, "=" * 90, "\u5c0f" * 40,
)  # fmt: skip
_GAPS = (
    "", "", " ", " ", " ", " ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\t", " \t", "\r\n", "\r",
    "\u00a0", "\u3000", "\u2028", "\x1c", "\x0b", "\u200b", "\x00",
)  # fmt: skip


@functools.cache
def made_up_texts() -> list[str]:
    """Texts of what cutters and normalisers differ in; the same ones every time."""
    draw = random.Random(0)  # noqa: S311 - a repeatable draw
    texts = ["", " ", "\n", "a"]
    for _ in range(_MADE_UP_TEXTS):
        count = draw.randint(1, 24)
        texts.append("".join(draw.choice(_PARTS) + draw.choice(_GAPS) for _ in range(count)))
    return texts


def make_encoder(tokenizer: Tokenizer, eos_token_id: int) -> ReferenceEncoder | CheckedEncoder:
    """A fast encoder where the tokenizer's parts allow it, else the reference."""
    reference = ReferenceEncoder(tokenizer, eos_token_id)
    parts = json.loads(tokenizer.to_str())
    if not is_plain(parts):
        return reference
    fast: Encoder | None = compiled_encoder(
        tokenizer, parts, eos_token_id, refused=reference.encode_column
    )
    if fast is None and cuts_at_spaces(parts):
        fast = PieceEncoder(tokenizer, eos_token_id)
    return reference if fast is None else CheckedEncoder(fast, reference)
