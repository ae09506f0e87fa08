"""The compiled encoder: byte-level BPE with the library's ids, on the buffers of Arrow columns.

The C++ knows no Unicode and no vocabulary. Here a tokenizer's pre-tokenizer is read into rules,
and the characters that texts hold are asked for in blocks: which are letters, numbers, marks
and spaces is what the library's own expressions say of them. A tokenizer with parts that are
not known here gets no compiled encoder; a text whose normalisation or added tokens make a
difference is handed to the library.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from tokenizers import Regex, normalizers, pre_tokenizers

from headrace.corpus.pieces import GPT2_PATTERN, pre_tokenizer_steps
from headrace.corpus.text_buffers import text_buffers
from headrace.corpus.tokens import Tokens

try:
    from headrace.corpus import _text
except ImportError:  # built without a compiler: pieces are remembered in Python instead
    _text = None  # type: ignore[assignment]  # its absence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

LETTER, NUMBER, MARK, SPACE, NEWLINE, BLANK, REFUSED = 1, 2, 4, 8, 16, 32, 64
RUN, CONTRACTION, ANY_CASE_CONTRACTION, TO_NEWLINE, SPACES_BEFORE = range(5)
_NO_ORDER = 255
_EXPRESSIONS = {LETTER: r"\p{L}", NUMBER: r"\p{N}", MARK: r"\p{M}", SPACE: r"\s"}
_LONG_S = 0x17F  # folds to s: after an apostrophe a contraction, where case does not count
_BLOCK = 256

_CLASS_BITS = {
    r"\p{L}": LETTER,
    r"\p{N}": NUMBER,
    r"\p{M}": MARK,
    r"\s": SPACE,
    r"\r": NEWLINE,
    r"\n": NEWLINE,
}
_CLASS = r"\\p\{[LNM]\}|\\s|\\r|\\n"
_SET = rf"\[\^?(?:{_CLASS})+\]|{_CLASS}| "
_RUN = re.compile(
    rf"(?:(?P<lead>{_SET})\?\+?)?(?P<body>{_SET})(?P<many>\+\+?|\{{1,\d\}})?(?P<tail>\[\\r\\n\]\*\+?)?"
)
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPECIAL = {
    f"(?i:{_CONTRACTIONS})": ANY_CASE_CONTRACTION,
    "'(?i:[sdmt]|ll|ve|re)": ANY_CASE_CONTRACTION,
    r"\s*[\r\n]+": TO_NEWLINE,
    r"\s*[\r\n]": TO_NEWLINE,
    r"\s+(?!\S)": SPACES_BEFORE,
}
_Rule = tuple[int, int, int, int, int, int, int, int]


def _set_of(text: str) -> tuple[int, int]:
    """Bits and whether they are negated, of one character or a set of them."""
    if text == " ":
        return BLANK, 0
    inside = text.removeprefix("[").removesuffix("]")
    negated = inside.startswith("^")
    bits = 0
    for part in re.findall(_CLASS, inside):
        bits |= _CLASS_BITS[part]
    return bits, int(negated)


def rules_of(pattern: str) -> list[_Rule] | None:
    """The alternatives of a pre-tokenizer's expression in order; ``None`` if one is not known."""
    rules: list[_Rule] = []
    if pattern.startswith(_CONTRACTIONS + "|"):
        rules.append((CONTRACTION, 0, 0, 0, 0, 0, 0, 0))
        pattern = pattern.removeprefix(_CONTRACTIONS + "|")
    for alternative in _alternatives(pattern):
        if alternative in _SPECIAL:
            rules.append((_SPECIAL[alternative], 0, 0, 0, 0, 0, 0, 0))
            continue
        found = _RUN.fullmatch(alternative)
        if found is None:
            return None
        lead = _set_of(found["lead"]) if found["lead"] else (0, 0)
        body, many = _set_of(found["body"]), found["many"]
        most = 1 if many is None else 0 if many.startswith("+") else int(many[3:-1])
        rules.append(
            (
                RUN,
                int(found["lead"] is not None),
                *lead,
                *body,
                most,
                int(found["tail"] is not None),
            )
        )
    return rules if _cover_everything(rules) else None


def _alternatives(pattern: str) -> list[str]:
    parts, depth = [""], 0
    for character in pattern:
        depth += (character in "([") - (character in ")]")
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _cover_everything(rules: Iterable[_Rule]) -> bool:
    """Whether no character is left over, whatever stands beside it."""
    kinds = (0, LETTER, NUMBER, MARK, SPACE, SPACE | NEWLINE, SPACE | BLANK)
    runs = [rule for rule in rules if rule[0] == RUN]
    return all(any(bool(rule[4] & kind) != bool(rule[5]) for rule in runs) for kind in kinds)


def _cutting(parts: dict[str, Any]) -> tuple[list[_Rule], bool] | None:
    """Rules and whether digits stand alone, of a whole pre-tokenizer; ``None`` if not known."""
    steps = pre_tokenizer_steps(parts)
    digits_alone = bool(steps) and steps[0]["type"] == "Digits"
    if digits_alone:
        if not steps[0].get("individual_digits"):
            return None
        steps = steps[1:]
    patterns = []
    for step in steps:
        if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
            patterns += [GPT2_PATTERN] if step.get("use_regex", True) else []
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            patterns.append(step["pattern"].get("Regex", ""))
        else:
            return None
    # Bytes become the vocabulary's characters in the last step; before it, spaces are spaces.
    if len(patterns) != 1 or not steps or steps[-1]["type"] != "ByteLevel":
        return None
    rules = rules_of(patterns[0])
    return None if rules is None else (rules, digits_alone)


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(kept)]
    table = {byte: chr(byte) for byte in kept}
    table |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return tuple(table[byte] for byte in range(256))


def compiled_encoder(
    tokenizer: Tokenizer,
    parts: dict[str, Any],
    eos_token_id: int,
    *,
    refused: Callable[[pa.LargeStringArray], Tokens],
) -> CompiledEncoder | None:
    """The compiled encoder; ``None`` where it was not built or does not know the tokenizer.

    Args:
        tokenizer: the library's object.
        parts: what it is made of; :func:`~headrace.corpus.pieces.is_plain`.
        eos_token_id: what ends every text.
        refused: encodes the texts that are not for the compiled encoder.
    """
    model = parts["model"]
    vocabulary: dict[str, int] = model["vocab"]
    cutting = _cutting(parts)
    if (
        _text is None
        or cutting is None
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
        or not all(character in vocabulary for character in byte_characters())
    ):
        return None
    rules, digits_alone = cutting
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    merges = [(vocabulary[a], vocabulary[b], vocabulary[a + b]) for a, b in pairs]
    columns = np.ascontiguousarray(np.array(merges, dtype=np.int32).reshape(-1, 3).T)
    added = [t["content"] for t in parts.get("added_tokens") or [] if not t.get("special")]
    normalised = parts.get("normalizer") is not None
    native = _text.make_encoder(
        np.array(rules, dtype=np.int32).reshape(-1),
        digits_alone,
        np.array([vocabulary[character] for character in byte_characters()], dtype=np.int32),
        columns[0],
        columns[1],
        columns[2],
        normalised,
        [content for content in added if content],
    )
    if model.get("ignore_merges"):
        native.set_whole(*_whole_words(vocabulary))
    before = tokenizer.encode("", add_special_tokens=True).ids
    native.set_around(before, eos_token_id)
    classes = _Classes(
        normalised=normalised, any_case=any(rule[0] == ANY_CASE_CONTRACTION for rule in rules)
    )
    return CompiledEncoder(native, classes, refused)


def _whole_words(vocabulary: dict[str, int]) -> tuple[list[bytes], NDArray[np.int32]]:
    """Tokens as bytes with their ids, without those that no text's bytes can spell."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    words = {
        bytes(byte_of[character] for character in token): token_id
        for token, token_id in vocabulary.items()
        if token and all(character in byte_of for character in token)
    }
    return list(words), np.fromiter(words.values(), dtype=np.int32, count=len(words))


class CompiledEncoder:
    """Words cut by rules, merged, and remembered; what is refused goes to the library."""

    def __init__(
        self,
        native: _text.Encoder,
        classes: _Classes,
        refused: Callable[[pa.LargeStringArray], Tokens],
    ) -> None:
        """Tell ``native`` about ASCII; other characters when texts hold them."""
        self._native = native
        self._classes = classes
        self._refused = refused
        native.set_classes(*classes.of_block(0))

    def encode_column(self, texts: pa.LargeStringArray) -> Tokens:
        """Ids of the texts of an Arrow column, each with the end-of-sequence id last."""
        data, offsets = text_buffers(texts)
        for block in self._native.unknown_blocks(data, offsets):
            self._native.set_classes(*self._classes.of_block(block))
        tokens = Tokens(*self._native.encode(data, offsets))
        rows = np.flatnonzero(tokens.counts < 0)
        if rows.size == 0:
            return tokens
        others = self._refused(texts.take(pa.array(rows))).split()
        before = np.cumsum(np.maximum(tokens.counts, 0))[rows]
        pieces = []
        for part, other in zip(np.split(tokens.ids, before), [*others, None], strict=True):
            pieces += [part] if other is None else [part, other]
        tokens.counts[rows] = [other.size for other in others]
        return Tokens(np.concatenate(pieces), tokens.counts)


class _Classes:
    """What the library's expressions say of characters."""

    def __init__(self, *, normalised: bool, any_case: bool) -> None:
        self._normalised = normalised
        self._any_case = any_case
        self._splits = {
            bit: pre_tokenizers.Split(Regex(expression), "removed")
            for bit, expression in _EXPRESSIONS.items()
        }
        self._normalizer = normalizers.NFC()

    def of_block(
        self, block: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint8]]:
        """Codes of a block of 256, their classes, and their order in normalisation."""
        codes = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint32)
        codes = codes[(codes < 0xD800) | (codes > 0xDFFF)]
        classes = np.zeros(codes.size, dtype=np.uint8)
        orders = np.zeros(codes.size, dtype=np.uint8)
        text = "".join(map(chr, codes))
        for bit, split in self._splits.items():
            members = np.ones(codes.size, dtype=np.bool_)
            for _, (start, end) in split.pre_tokenize_str(text):
                members[start:end] = False
            classes[members] |= bit
        if block == 0:
            classes[[0x0A, 0x0D]] |= NEWLINE
            classes[0x20] |= BLANK
        if self._any_case and _LONG_S in codes:
            classes[_LONG_S - codes[0]] |= REFUSED
        if self._normalised:
            for index, character in enumerate(text):
                if self._changes(character):
                    classes[index] |= REFUSED
                joins = character in _joining()
                orders[index] = _NO_ORDER if joins else unicodedata.combining(character)
        return codes, classes, orders

    def _changes(self, character: str) -> bool:
        """Whether normalisation changes it, or Python and the library may not agree."""
        return (
            unicodedata.category(character) == "Cn"
            or unicodedata.normalize("NFC", character) != character
            or self._normalizer.normalize_str(character) != character
        )


@functools.cache
def _joining() -> frozenset[str]:
    """Characters that normalisation form C may join to what stands before them."""
    joining = {*map(chr, range(0x1161, 0x1176)), *map(chr, range(0x11A8, 0x11C3))}
    for code in range(0xC0, 0x20000):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            first, second = (chr(int(part, 16)) for part in parts)
            if unicodedata.normalize("NFC", first + second) == chr(code):
                joining.add(second)
    return frozenset(joining)
