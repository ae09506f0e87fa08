"""The fast encoder gives the library's tokens; a tokenizer without an end is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from headrace.corpus import compiled
from headrace.corpus.config import TokenizerSettings
from headrace.corpus.encode import CheckedEncoder, Encoder, ReferenceEncoder, make_encoder
from headrace.corpus.pieces import PieceEncoder, _Remembered
from headrace.corpus.tokenizer import (
    adopt_tokenizer,
    end_of_sequence,
    find_tokenizer_file,
    load_tokenizer,
    train_tokenizer,
)
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
MARKS = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLE = [
    "The price of wheat and rye moved together until the frost of that winter.\n",
    "  * Grind finer, don't stop;\n    the wheel's stones (7,019 of them) are there.\n\n",
    "mill_1.2-1 unstable; urgency=low\r\n\ttabs\tand  double  spaces   and café Köln 小麦\n",
] * 20


def make_tokenizer(pattern: str | None, *, nfc: bool = False, digits: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    if digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def without_merging(pattern: str) -> Tokenizer:
    """Words that are tokens are taken whole, though their merges are not there."""
    parts = json.loads(make_tokenizer(pattern).to_str())
    parts["model"]["ignore_merges"] = True
    last = max(parts["model"]["vocab"].values())
    parts["model"]["vocab"] |= {"\u0120frost": last + 1, "Kx\u00c3\u00b6": last + 2}
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    tokenizer.encode_special_tokens = True
    return tokenizer


TOKENIZERS = {
    "gpt2": make_tokenizer(None),
    "cl100k": make_tokenizer(CL100K),
    "qwen": make_tokenizer(QWEN, nfc=True),
    "marks": make_tokenizer(MARKS),
    "smollm": make_tokenizer(None, digits=True),
    "whole": without_merging(CL100K),
    "o200k": make_tokenizer(O200K),
}
TOKENIZERS["added"] = make_tokenizer(QWEN)
TOKENIZERS["added"].add_tokens(
    [AddedToken("<tool>", normalized=False), AddedToken("<think>", normalized=False)]
)
COMPILED = [name for name in TOKENIZERS if name != "o200k"]


def ids_of(encoder: Encoder, texts: list[str]) -> list[list[int]]:
    tokens = encoder.encode_column(pa.array(texts, pa.large_string()))
    return [ids.tolist() for ids in tokens.split()]


def fast_way(name: str, way: str) -> Encoder:
    tokenizer = TOKENIZERS[name]
    if way == "pieces":
        return PieceEncoder(tokenizer, 0)
    pytest.importorskip("headrace.corpus._text")
    reference = ReferenceEncoder(tokenizer, 0)
    parts = json.loads(tokenizer.to_str())
    found = compiled.compiled_encoder(tokenizer, parts, 0, refused=reference.encode_column)
    assert found is not None
    return found


spaces = st.sampled_from(
    [" ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\t", " \t", "\r\n", "\xa0", "\u3000"]
)
words = st.sampled_from(
    [
        "the",
        "wheel's",
        "don't",
        "7019",
        "1.2-1",
        "café",
        "小麦",
        "(of",
        "*",
        "--",
        "<|end|>",
        "A",
        ",",
        "\x1c",
    ]
)
mixed = st.lists(words | spaces, max_size=40).map("".join)
odd = st.text(
    st.sampled_from("a'sSlL\u017f1\u0663\u00bd e\u0301\u0327\u00e9\u00c5\u212b\u0939\u093f\u0e34"
    "\u1100\u1161\uac00 \n\r\t\u00a0\u2028-_\u0958\ufb01\u0378\U0001f600\U0002f800"),
    max_size=30,
)  # fmt: skip
printable = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)


WAYS = [
    *((name, "pieces") for name in TOKENIZERS if name not in {"smollm", "whole"}),
    *((name, "compiled") for name in COMPILED),
]


@pytest.mark.parametrize(("name", "way"), WAYS)
@settings(max_examples=60)
@given(texts=st.lists(mixed | printable | odd | st.text(max_size=40), min_size=1, max_size=4))
def test_fast_ways_give_the_library_s_tokens(name: str, way: str, texts: list[str]) -> None:
    expected = ids_of(ReferenceEncoder(TOKENIZERS[name], 0), texts)
    assert ids_of(fast_way(name, way), texts) == expected


@pytest.mark.parametrize("name", ["qwen", "marks", "smollm"])
def test_every_character_is_cut_as_by_the_library(name: str) -> None:
    fast = fast_way(name, "compiled")
    reference = ReferenceEncoder(TOKENIZERS[name], 0)
    # All blocks of scripts that are in use, and some of each of the large ones.
    blocks = [*range(0x34), 0x4E, 0x9F, 0xA6, 0xAC, 0xD7, *range(0xF9, 0x112), 0x1D4, 0x1F6, 0xE01]
    texts = [
        f"a{character}b {character}1{character} {character}\n"
        for block in blocks
        for character in map(chr, range(block * 256, block * 256 + 256))
        if not 0xD800 <= ord(character) < 0xE000
    ]
    assert ids_of(fast, texts) == ids_of(reference, texts)


@pytest.mark.parametrize("name", COMPILED)
def test_long_words_merge_as_short_ones_do(name: str) -> None:
    draw = np.random.default_rng(0)
    texts = []
    for length in (1, 2, 47, 48, 49, 64, 65, 300, 5000):
        letters = draw.choice(list("thewrofgaisn"), length)
        texts += ["".join(letters), "the" * length, " " * length, "=" * length]
    expected = ids_of(ReferenceEncoder(TOKENIZERS[name], 0), texts)
    fast = fast_way(name, "compiled")
    assert ids_of(fast, texts) == expected
    assert ids_of(fast, texts) == expected  # from what is remembered


def test_slices_of_columns_are_encoded_as_they_are() -> None:
    fast, reference = fast_way("qwen", "compiled"), ReferenceEncoder(TOKENIZERS["qwen"], 0)
    texts = pa.array(["the wheel", "e\u0301", "", "of stone", "x"], pa.large_string())
    for first, count in [(0, 5), (1, 3), (2, 1), (4, 1), (5, 0)]:
        part = texts.slice(first, count)
        got, wanted = fast.encode_column(part), reference.encode_column(part)
        assert got.ids.tolist() == wanted.ids.tolist()
        assert got.counts.tolist() == wanted.counts.tolist()


def test_the_compiled_way_refuses_offsets_outside_the_data() -> None:
    native = pytest.importorskip("headrace.corpus._text")
    none = np.empty(0, dtype=np.int32)
    encoder = native.make_encoder(
        none, False, np.arange(256, dtype=np.int32), none, none, none, False, []
    )
    for offsets in ([0, 9], [3, 1], [-1, 2], []):
        with pytest.raises(ValueError, match="offsets"):
            encoder.encode(np.zeros(4, np.uint8), np.array(offsets, dtype=np.int64))


@pytest.mark.parametrize("way", ["pieces", "compiled"])
@settings(max_examples=60)
@given(texts=st.lists(st.sampled_from(["<tool>", "x<tool>y", "(<tool>)", "tool"]), max_size=6))
def test_added_tokens_are_found_inside_words(way: str, texts: list[str]) -> None:
    joined = [" ".join(texts), "the wheel", "<tool", "tool>"]
    expected = ids_of(ReferenceEncoder(TOKENIZERS["added"], 0), joined)
    assert ids_of(fast_way("added", way), joined) == expected


def test_pieces_of_an_older_generation_are_not_encoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.corpus.pieces._REMEMBERED", 4)
    asked: list[str] = []
    remembered = _Remembered(lambda piece: asked.append(piece) or piece.encode())
    for piece in ["a", "b", "c", "d", "e", "a", "b", "f", "a", "b", "g", "a"]:
        assert remembered[piece] == piece.encode()
    assert asked == ["a", "b", "c", "d", "e", "f", "g"]


@pytest.mark.parametrize("way", ["pieces", "compiled"])
def test_every_document_ends_once_and_spelled_ends_are_text(way: str) -> None:
    (ids,) = ids_of(fast_way("gpt2", way), ["a <|end|> b"])
    assert ids[-1] == 0
    assert ids.count(0) == 1
    # An end that is a word of the vocabulary is not said twice.
    tokenizer = TOKENIZERS["gpt2"]
    point = tokenizer.token_to_id(".")
    parts = json.loads(tokenizer.to_str())
    pytest.importorskip("headrace.corpus._text")
    reference = ReferenceEncoder(tokenizer, point)
    fast = compiled.compiled_encoder(tokenizer, parts, point, refused=reference.encode_column)
    assert fast is not None
    for encoder in (fast, PieceEncoder(tokenizer, point)):
        assert ids_of(encoder, ["a.", "a"]) == ids_of(reference, ["a.", "a"])


def test_a_difference_ends_the_use_of_the_fast_way(caplog: pytest.LogCaptureFixture) -> None:
    reference = ReferenceEncoder(TOKENIZERS["gpt2"], 0)
    pieces = PieceEncoder(TOKENIZERS["gpt2"], 0)
    encoder = CheckedEncoder(pieces, reference)
    assert not encoder.differs
    pieces._first["wheel"] = np.array([5, 5, 5], dtype=np.int32).tobytes()
    encoder.start_unit()
    texts = ["wheel of stone"]
    assert ids_of(encoder, texts) == ids_of(reference, texts)
    assert encoder.differs
    assert "other tokens" in caplog.text


def test_a_wrong_fast_way_is_found_when_it_is_loaded() -> None:
    reference = ReferenceEncoder(TOKENIZERS["gpt2"], 0)
    assert CheckedEncoder(PieceEncoder(TOKENIZERS["cl100k"], 0), reference).differs


def test_without_the_compiled_module_pieces_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "_text", None)
    encoder = make_encoder(TOKENIZERS["gpt2"], 0)
    assert isinstance(encoder, CheckedEncoder)
    assert isinstance(encoder.fast, PieceEncoder)


@pytest.mark.parametrize("pattern", [O200K, QWEN.replace(r"\p{N}", r"\d"), r"\p{L}+|\s+(?!\S)|\s+"])
def test_patterns_with_unknown_parts_or_gaps_are_not_compiled(pattern: str) -> None:
    assert compiled.rules_of(pattern) is None


def test_digits_before_which_spaces_are_cut_otherwise_are_no_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "_text", None)
    assert isinstance(make_encoder(TOKENIZERS["smollm"], 0), ReferenceEncoder)


def test_memory_of_pieces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.corpus.pieces._REMEMBERED", 50)
    encoder = PieceEncoder(TOKENIZERS["gpt2"], 0)
    texts = [f"number{i} " * 3 for i in range(200)]
    assert ids_of(encoder, texts) == ids_of(ReferenceEncoder(TOKENIZERS["gpt2"], 0), texts)
    assert len(encoder._spaced) <= 50


def unusual() -> dict[str, Tokenizer]:
    prefixed = make_tokenizer(None)
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lowered = make_tokenizer(None)
    lowered.normalizer = normalizers.Lowercase()
    stripping = make_tokenizer(None)
    stripping.add_tokens([AddedToken("<tool>", lstrip=True, normalized=False)])
    whole = make_tokenizer(None)
    whole.pre_tokenizer = None
    odd = make_tokenizer(r"\w+ \w+|.|\s+(?!\S)|\s+")
    return {"prefix": prefixed, "lower": lowered, "strip": stripping, "whole": whole, "odd": odd}


@pytest.mark.parametrize("name", ["prefix", "lower", "strip", "whole", "odd"])
def test_tokenizers_that_may_merge_across_spaces_use_the_library(name: str) -> None:
    assert isinstance(make_encoder(unusual()[name], 0), ReferenceEncoder)


def test_beginnings_are_kept() -> None:
    tokenizer = make_tokenizer(CL100K)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    encoder = make_encoder(tokenizer, 0)
    assert isinstance(encoder, CheckedEncoder)
    assert not encoder.differs
    for fast in (encoder.fast, PieceEncoder(tokenizer, 0)):
        (ids,) = ids_of(fast, ["the wheel"])
        assert [ids] == ids_of(ReferenceEncoder(tokenizer, 0), ["the wheel"])
        assert ids[0] == 0
        assert ids[-1] == 0


def test_training_again_gives_the_same_files(tmp_path: Path) -> None:
    settings_ = TokenizerSettings(train="bpe", vocab_size=300)
    infos = [
        train_tokenizer(settings_, iter(SAMPLE), tmp_path / str(i), origin="o") for i in range(2)
    ]
    assert infos[0].sha256 == infos[1].sha256
    assert infos[0].eos_token_id == 0
    assert infos[0].vocab_size == 300


def test_trained_folders_load_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    info = train_tokenizer(
        TokenizerSettings(train="bpe", vocab_size=400), iter(SAMPLE), tmp_path / "t", origin="o"
    )
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    assert loaded.eos_token_id == info.eos_token_id
    text = "The wheel's stones  don't\n\n stop."
    assert loaded.decode(loaded(text).input_ids) == text


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    make_tokenizer(None).save(str(file))
    tokenizer = load_tokenizer(file)
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        end_of_sequence(tokenizer, file, None)
    with pytest.raises(ConfigError, match="not in the vocabulary"):
        end_of_sequence(tokenizer, file, "</s>")
    assert end_of_sequence(tokenizer, file, "<|end|>") == ("<|end|>", 0)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}})
    )
    assert end_of_sequence(tokenizer, file, None) == ("<|end|>", 0)


def test_given_tokenizers_are_adopted_with_their_files(tmp_path: Path) -> None:
    given_dir = tmp_path / "given"
    given_dir.mkdir()
    make_tokenizer(None).save(str(given_dir / "tokenizer.json"))
    (given_dir / "chat_template.jinja").write_text("{{ x }}")
    choice = TokenizerSettings(path=str(given_dir), eos_token="<|end|>")
    info = adopt_tokenizer(choice, tmp_path / "mine")
    assert info.eos_token_id == 0
    assert (tmp_path / "mine" / "chat_template.jinja").read_text() == "{{ x }}"
    assert (
        json.loads((tmp_path / "mine" / "tokenizer_config.json").read_text())["eos_token"]
        == "<|end|>"
    )


def test_wrong_tokenizer_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        find_tokenizer_file(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
