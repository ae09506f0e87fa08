"""Fingerprints of a column of texts: exact keys, and signatures where they are wanted.

One answer two ways: the plain functions of :mod:`headrace.corpus.fingerprints`, text by text,
and compiled passes over the buffer of an Arrow column. The invariant: they agree on every bit.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.corpus.fingerprints import KEY_BYTES, MinHasher, exact_key, fold
from headrace.corpus.text_buffers import text_buffers

try:
    from headrace.corpus import _text
except ImportError:  # built without a compiler
    _text = None  # type: ignore[assignment]  # its absence

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa
    from numpy.typing import NDArray


FOLDED_CODES = 0x20000
"""Later code points fold to themselves."""


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Exact keys (N, 2), and MinHash signatures (N, P) or ``None`` where they are not wanted."""

    keys: NDArray[np.uint64]
    signatures: NDArray[np.uint32] | None

    def of(self, rows: list[int]) -> Fingerprints:
        """Those of some rows."""
        return Fingerprints(
            self.keys[rows], None if self.signatures is None else self.signatures[rows]
        )


class Signer(Protocol):
    """Made once a worker."""

    def sign(self, texts: pa.LargeStringArray) -> Fingerprints:
        """Fingerprints of every text of a column."""
        ...


def _keys(digests: Iterable[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


class PlainSigner:
    """The plain functions, text by text."""

    def __init__(self, hasher: MinHasher | None) -> None:
        """``hasher`` is ``None`` where near-duplicates are not sought."""
        self._hasher = hasher

    def sign(self, texts: pa.LargeStringArray) -> Fingerprints:
        """Fingerprints of every text of a column."""
        folded = [fold(text) for text in texts.to_pylist()]
        return Fingerprints(
            _keys(map(exact_key, folded)),
            None if self._hasher is None else self._hasher.signatures(folded),
        )


class CompiledSigner:
    """Folding and shingles in C++; the digest is the standard library's."""

    def __init__(self, hasher: MinHasher | None) -> None:
        """Tell the module how characters fold, and the permutations of ``hasher``."""
        self._folder = _text.Folder()
        for code in range(0x80, FOLDED_CODES):
            character = chr(code)
            if (folded := character.casefold()) != character:
                self._folder.add(code, folded)
        self._native = None if hasher is None else _text.make_min_hasher(*hasher.parameters())
        self._num_perm = 0 if hasher is None else hasher.num_perm

    def sign(self, texts: pa.LargeStringArray) -> Fingerprints:
        """Fingerprints of every text of a column."""
        data, offsets, bare, ends = self._folder.fold(*text_buffers(texts))
        view, bounds = bare.data, ends.tolist()
        digests = [
            hashlib.blake2b(view[start:end], digest_size=KEY_BYTES).digest()
            for start, end in itertools.pairwise(bounds)
        ]
        signatures = None
        if self._native is not None:
            signatures = self._native.sign(data, offsets).reshape(-1, self._num_perm)
        return Fingerprints(_keys(digests), signatures)


def make_signer(hasher: MinHasher | None) -> Signer:
    """The compiled passes where they were built, else the plain functions."""
    return PlainSigner(hasher) if _text is None else CompiledSigner(hasher)
