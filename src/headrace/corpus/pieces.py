"""Texts to token ids by remembered pieces: several times faster than the tokenizer library.

Byte-level BPE never merges across the pieces its pre-tokenizer cuts, and every common
pre-tokenizer cuts (a) before a space that a visible character follows and (b) after a single
line feed between visible characters (a longer run is cut differently at a text's end). So a
text is cut there first, and the ids of each piece are remembered: the same words come again
and again. A piece that is met for the first time is cut on by the pre-tokenizer's own pattern
where that can be had for printable ASCII, and the ids of its parts are remembered too:
``(word`` and ``word,`` are new when ``word`` is not.

Used where the compiled encoder is not there or does not know the pattern; it asks less of it.
:func:`cuts_at_spaces` says for which tokenizers this is right.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.corpus.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

_REMEMBERED = 300_000
_LONGEST = 64
_LINE_STARTS = re.compile(r"(?<=[!-~]\n)(?=[!-~])")
# Split patterns of published tokenizers (GPT-2, Llama 3, Qwen 2 and later, OLMo 2, DeepSeek …)
# are told by what matters here: white space is only ever taken as one leading space of a
# piece, or as a run of its own. These are the white-space parts they may hold.
_SPACE_PARTS = (
    r"\s+(?!\S)",
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r"[^\r\n\p{L}\p{N}]?",
    r"[^\r\n\p{L}\p{N}]",
    r"[^\s\p{L}\p{N}]",
    r"[^\s\p{L}\p{N}\r\n]",
    r"\s+",
    r" ?",
    r"[\r\n]*",
    r"[\r\n/]*",
)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class _Remembered(dict[str, bytes]):
    """Ids of pieces as int32 bytes; pieces are looked up as ``prefix + key``.

    Two generations of at most ``_REMEMBERED`` pieces: what is used goes on into the next one.
    """

    def __init__(self, encode: Callable[[str], bytes], prefix: str = "") -> None:
        super().__init__()
        self._encode = encode
        self._prefix = prefix
        self._older: dict[str, bytes] = {}

    def __missing__(self, piece: str) -> bytes:
        ids = self._older.get(piece)
        if ids is None:
            ids = self._encode(self._prefix + piece)
        if len(piece) <= _LONGEST:
            if len(self) >= _REMEMBERED:
                self._older = dict(self)
                self.clear()
            self[piece] = ids
        return ids


class _Words:
    """Ids of one piece from those of the words that the pre-tokenizer cuts it into."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        parts = json.loads(tokenizer.to_str())
        self._find = _word_expression(parts)
        # Tokens that are found in a text before it is cut into words.
        contents = [t["content"] for t in parts.get("added_tokens") or [] if not t.get("special")]
        self._added = re.compile("|".join(map(re.escape, contents))) if contents else None
        self._ids = _Remembered(self._library)

    def _library(self, text: str) -> bytes:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoded.ids, dtype=np.int32).tobytes()

    def encode(self, piece: str) -> bytes:
        """Ids of a piece, as the library gives them."""
        if self._find is None or not piece.isascii() or not piece.isprintable():
            return self._library(piece)
        words = self._find(piece)
        if len(words) < 2 or "".join(words) != piece or (self._added and self._added.search(piece)):
            return self._library(piece)
        return b"".join(map(self._ids.__getitem__, words))


class PieceEncoder:
    """Cuts at safe places and joins remembered ids."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        """Remember nothing yet."""
        words = _Words(tokenizer)
        self._first = _Remembered(words.encode)
        self._spaced = _Remembered(words.encode, " ")
        around = tokenizer.encode("", add_special_tokens=True).ids
        self._before = np.array(around, dtype=np.int32).tobytes()
        self._after = np.int32(eos_token_id).tobytes()

    def encode_column(self, texts: pa.LargeStringArray) -> Tokens:
        """Ids of the texts of an Arrow column, each with the end-of-sequence id last."""
        return Tokens.joined([self._one(text) for text in texts.to_pylist()])

    def _one(self, text: str) -> NDArray[np.int32]:
        out = [self._before]
        spaced = self._spaced.__getitem__
        for line in _LINE_STARTS.split(text):
            pieces = line.split(" ")
            if "" in pieces or not line.isascii() or _odd_space(line):
                pieces = _joined(pieces)
            out.append(self._first[pieces[0]])
            out += map(spaced, pieces[1:])
        joined = b"".join(out)
        if not joined.endswith(self._after):  # the library, too, ends a text once
            joined += self._after
        return np.frombuffer(joined, dtype=np.int32)


_ODD = re.compile(r" [\t\r\n\v\f\x1c-\x1f]")


def _odd_space(line: str) -> bool:
    return _ODD.search(line) is not None


def _joined(pieces: list[str]) -> list[str]:
    """Undo cuts that no visible ASCII character follows."""
    result = [pieces[0]]
    for piece in pieces[1:]:
        if piece and "!" <= piece[0] <= "~":
            result.append(piece)
        else:
            result[-1] += " " + piece
    return result


def is_plain(parts: dict[str, Any]) -> bool:
    """Whether a tokenizer, by its JSON, is a BPE of the words of a text and nothing besides."""
    model = parts.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout"):
        return False
    if (parts.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        return False
    for token in parts.get("added_tokens") or []:
        if token.get("special"):
            continue
        if any(token.get(key) for key in ("lstrip", "rstrip", "single_word")):
            return False
        if re.search(r"\s", token["content"]) or token.get("normalized"):
            return False
    return _only_adds_around(parts.get("post_processor"))


def cuts_at_spaces(parts: dict[str, Any]) -> bool:
    """Whether a plain tokenizer never merges across the cuts made here."""
    steps = pre_tokenizer_steps(parts)
    return bool(steps) and all(map(_step_cuts, steps)) and any(map(_step_splits, steps))


def pre_tokenizer_steps(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of the pre-tokenizer, in order; none where there is no pre-tokenizer."""
    pre = parts.get("pre_tokenizer")
    if pre is None:
        return []
    steps: list[dict[str, Any]] = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    return steps


def _word_expression(parts: dict[str, Any]) -> Callable[[str], list[str]] | None:
    """What cuts printable ASCII as the pre-tokenizer does; ``None`` where that is not known."""
    cutting = [step for step in pre_tokenizer_steps(parts) if _step_splits(step)]
    if len(cutting) != 1:
        return None
    pattern = GPT2_PATTERN if cutting[0]["type"] == "ByteLevel" else cutting[0]["pattern"]["Regex"]
    # In ASCII these classes are ranges, inside a set of characters and outside of one.
    pattern = re.sub(r"\[[^\]]*\]", lambda m: _ranges(m[0], "{}"), pattern)
    pattern = _ranges(pattern, "[{}]")
    try:
        expression = re.compile(pattern)
    except re.error:
        return None
    return None if r"\p" in pattern or expression.groups else expression.findall


def _ranges(pattern: str, form: str) -> str:
    letters, digits = form.format("A-Za-z"), form.format("0-9")
    return pattern.replace(r"\p{L}", letters).replace(r"\p{N}", digits)


def _only_adds_around(post: dict[str, Any] | None) -> bool:
    if post is None or post.get("type") == "ByteLevel":
        return True
    if post.get("type") == "Sequence":
        return all(map(_only_adds_around, post["processors"]))
    if post.get("type") != "TemplateProcessing":
        return False
    # Tokens before the text only: what follows it is the end of sequence, added here.
    single = post.get("single") or []
    return bool(single) and "Sequence" in single[-1]


def _step_cuts(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "ByteLevel":
        return not step.get("add_prefix_space")
    # Digits that stand alone end what is seen before them: a run of spaces is cut otherwise.
    return kind == "Split" and _is_known_split(step)


def _step_splits(step: dict[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))
    return step.get("type") == "Split" and _is_known_split(step)


def _is_known_split(step: dict[str, Any]) -> bool:
    pattern = (step.get("pattern") or {}).get("Regex")
    if not pattern or step.get("behavior") != "Isolated" or step.get("invert"):
        return False
    if r"\s+(?!\S)" not in pattern or not pattern.rstrip(")").endswith(r"\s+"):
        return False
    rest = pattern
    for part in _SPACE_PARTS:
        rest = rest.replace(part, "")
    return r"\s" not in rest and " " not in rest and r"\S" not in rest and "." not in rest
