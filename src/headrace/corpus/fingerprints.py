"""What says that two texts are the same: an exact key, and MinHash signatures of word shingles.

Folded text is case-folded UTF-8. The exact key leaves white space out. A shingle is
``shingle_words`` consecutive words; in scripts without spaces each character is a word.
Signatures equal those of datasketch's ``affine32`` scheme on the same 32-bit shingle hashes
(the plain reference in the tests); the arithmetic here is on whole arrays.

Sources: A. Broder, "On the resemblance and containment of documents", 1997; the finaliser is
MurmurHash3's.

Shapes: N documents, P permutations, M shingles.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FINGERPRINT_VERSION = 1
"""Changes whenever a text's key or signature could."""

KEY_BYTES = 16
_SEGMENT = 1 << 20
# Odd multipliers have inverses mod 2^64: a word's hash does not depend on where it stands.
_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_SHINGLE_BASE = np.uint64(0xD6E8FEB86659FD93)
_BLOCK = 2048
_SHORT = 16 << 10
_GROUP = 96 << 10


_LOWER = bytes(ord(chr(b).lower()) if b < 0x80 else b for b in range(256))
_WHITE = b" \t\n\r\v\f\x1c\x1d\x1e\x1f"


def fold(text: str) -> bytes:
    """UTF-8 of the case-folded text; white space stays."""
    return text.encode().translate(_LOWER) if text.isascii() else text.casefold().encode()


def exact_key(folded: bytes) -> bytes:
    """16 bytes that differ for texts that differ in more than case and white space (BLAKE2b)."""
    return hashlib.blake2b(folded.translate(None, _WHITE), digest_size=KEY_BYTES).digest()


def short_key(name: str) -> int:
    """64 bits of a name (an id, a source), never zero."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    table = np.full(count, base, dtype=np.uint64)
    table[0] = 1
    return np.multiply.accumulate(table)


def _word_table() -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.uint64]]:
    in_word = np.zeros(256, dtype=np.bool_)
    for low, high in ((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A), (0x80, 0xFF)):
        in_word[low : high + 1] = True
    # First bytes of kana, CJK, Hangul and everything in four bytes: characters as words.
    alone = np.zeros(256, dtype=np.bool_)
    alone[0xE3:0xEE] = True
    alone[0xF0:0xF5] = True
    values = np.random.default_rng(0).integers(1, 1 << 63, 256, dtype=np.uint64)
    return in_word, alone, values


class MinHasher:
    """Signatures of folded texts."""

    def __init__(self, *, num_perm: int, shingle_words: int, seed: int) -> None:
        """Draw the permutations ``h -> a*h + b mod 2^32``, ``a`` odd."""
        self.num_perm = num_perm
        self._shingle_words = shingle_words
        generator = np.random.RandomState(seed)
        half = generator.randint(0, 1 << 31, num_perm, dtype=np.uint32)
        self._a_P1 = (half * np.uint32(2) + np.uint32(1))[:, None]
        self._b_P1 = generator.randint(0, 1 << 32, num_perm, dtype=np.uint32)[:, None]
        self._in_word, self._alone, self._values = _word_table()
        self._powers = _powers(_BASE, _SEGMENT + 8)
        self._inverses = _powers(_BASE_INVERSE, _SEGMENT + 8)

    def parameters(self) -> tuple[int, list[int], list[int], NDArray[np.uint64]]:
        """Words a shingle, ``a`` and ``b`` of the permutations, and the values of bytes."""
        a, b = self._a_P1[:, 0].tolist(), self._b_P1[:, 0].tolist()
        return self._shingle_words, a, b, self._values

    def signature(self, folded: bytes) -> NDArray[np.uint32]:
        """The signature (P) of one text; a text without words has all bits set."""
        hashes_M = self.shingle_hashes(folded)
        return self.signature_of_hashes(hashes_M)

    def signatures(self, texts: Sequence[bytes]) -> NDArray[np.uint32]:
        """Signatures (N, P); short texts are worked on together, which changes no bit."""
        result_NP = np.empty((len(texts), self.num_perm), dtype=np.uint32)
        group: list[int] = []
        held = 0
        for index, text in enumerate(texts):
            if len(text) > _SHORT:
                result_NP[index] = self.signature(text)
                continue
            group.append(index)
            held += len(text) + 1
            if held > _GROUP:
                self._short_signatures(texts, group, result_NP)
                group, held = [], 0
        if group:
            self._short_signatures(texts, group, result_NP)
        return result_NP

    def _short_signatures(
        self, texts: Sequence[bytes], group: list[int], result_NP: NDArray[np.uint32]
    ) -> None:
        joined = b"\n".join([texts[index] for index in group])
        ends = np.cumsum([len(texts[index]) + 1 for index in group])
        words, starts = self._segment_words(joined)
        text_of_word = np.searchsorted(ends, starts, side="right")
        width = self._shingle_words
        num_words = np.bincount(text_of_word, minlength=len(group))
        for place in np.flatnonzero(num_words < width):
            result_NP[group[place]] = self.signature(texts[group[place]])
        full = np.flatnonzero(num_words >= width)
        if full.size == 0:
            return
        inside = text_of_word[: words.size - width + 1] == text_of_word[width - 1 :]
        hashes = self._windows(words, width)[inside]
        first = np.cumsum(num_words[full] - width + 1) - (num_words[full] - width + 1)
        permuted_PM = self._a_P1 * _finalise32(hashes)[None, :]
        permuted_PM += self._b_P1
        best_PF = np.minimum.reduceat(permuted_PM, first, axis=1)
        result_NP[np.array(group)[full]] = best_PF.T

    def signature_of_hashes(self, hashes_M: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Column minima of the permuted hashes."""
        best_P = np.full(self.num_perm, 0xFFFFFFFF, dtype=np.uint32)
        mixed_M = _finalise32(hashes_M)
        for start in range(0, mixed_M.size, _BLOCK):
            permuted_PM = self._a_P1 * mixed_M[None, start : start + _BLOCK]
            permuted_PM += self._b_P1
            np.minimum(best_P, permuted_PM.min(axis=1), out=best_P)
        return best_P

    def shingle_hashes(self, folded: bytes) -> NDArray[np.uint32]:
        """32-bit hashes of the shingles, in order, repeats included."""
        words = self._word_hashes(folded)
        if words.size == 0:
            return np.empty(0, dtype=np.uint32)
        return self._windows(words, min(self._shingle_words, words.size))

    @staticmethod
    def _windows(words: NDArray[np.uint64], width: int) -> NDArray[np.uint32]:
        count = words.size - width + 1
        mixed = np.zeros(count, dtype=np.uint64)
        for offset in range(width):
            mixed *= _SHINGLE_BASE
            mixed += words[offset : offset + count]
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(_BASE)
        return (mixed >> np.uint64(32)).astype(np.uint32)

    def _word_hashes(self, folded: bytes) -> NDArray[np.uint64]:
        if len(folded) <= _SEGMENT:
            return self._segment_words(folded)[0]
        pieces = []
        start = 0
        while start < len(folded):
            end = min(start + _SEGMENT, len(folded))
            if end < len(folded):
                space = folded.rfind(b" ", start, end)
                end = space if space > start else end
            pieces.append(self._segment_words(folded[start:end])[0])
            start = end
        return np.concatenate(pieces)

    def _segment_words(self, segment: bytes) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Hashes of the words of up to ``_SEGMENT`` bytes, and where each begins."""
        data = np.frombuffer(segment, dtype=np.uint8)
        if data.size == 0:
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
        inside = self._in_word[data]
        edges = np.empty(data.size + 1, dtype=np.bool_)
        edges[0], edges[-1] = inside[0], inside[-1]
        np.not_equal(inside[1:], inside[:-1], out=edges[1:-1])
        bounds = np.flatnonzero(edges)
        starts, ends = bounds[0::2], bounds[1::2]
        if segment.isascii():
            pass
        elif (characters := np.flatnonzero(self._alone[data])).size:
            # Every such character opens a word and closes the one before it.
            opened = np.union1d(starts, characters)
            following = np.append(opened[1:], data.size)
            last = ends[np.searchsorted(ends, opened, side="right").clip(max=ends.size - 1)]
            starts, ends = opened, np.minimum(following, last)
        sums = np.empty(data.size + 1, dtype=np.uint64)
        sums[0] = 0
        np.cumsum(self._values[data] * self._powers[: data.size], out=sums[1:])
        words = (sums[ends] - sums[starts]) * self._inverses[starts]
        words ^= words >> np.uint64(32)
        return words, starts


def _finalise32(hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    mixed = hashes.copy()
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed


def band_keys(signatures_NP: NDArray[np.uint32], num_bands: int) -> NDArray[np.uint64]:
    """Keys (N, bands): two texts share a key where all rows of a band are equal."""
    num_texts, num_perm = signatures_NP.shape
    rows = num_perm // num_bands
    keys = np.zeros((num_texts, num_bands), dtype=np.uint64)
    bands = signatures_NP.reshape(num_texts, num_bands, rows)
    for row in range(rows):
        keys *= _SHINGLE_BASE
        keys += bands[:, :, row]
        keys ^= keys >> np.uint64(31)
    # The band's number keeps equal rows of different bands apart.
    keys *= np.uint64(_BASE)
    keys ^= np.arange(num_bands, dtype=np.uint64)[None, :] << np.uint64(56)
    return keys


def similarity(first_NP: NDArray[np.uint32], second_NP: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Estimated Jaccard similarity of pairs: the share of equal signature entries."""
    shares: NDArray[np.float32] = (first_NP == second_NP).mean(axis=1, dtype=np.float32)
    return shares
