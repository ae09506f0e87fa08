"""The fast encoder gives the library's tokens; a tokenizer without an end is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
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

from headrace.corpus.config import TokenizerSettings
from headrace.corpus.encode import PieceEncoder, ReferenceEncoder, _Remembered, make_encoder
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


def make_tokenizer(pattern: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = (
        plain
        if pattern is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), plain])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


PATTERNS = {"gpt2": None, "cl100k": CL100K, "qwen": QWEN, "o200k": O200K}
TOKENIZERS = {name: make_tokenizer(pattern) for name, pattern in PATTERNS.items()}

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
printable = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=120)
@given(texts=st.lists(mixed | printable | st.text(max_size=40), min_size=1, max_size=4))
def test_pieces_give_the_library_s_tokens(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    fast = make_encoder(tokenizer, 0)
    assert isinstance(fast, PieceEncoder)
    fast._num_checked = 10**9  # the comparison would hide a difference by falling back
    expected = ReferenceEncoder(tokenizer, 0).encode(texts)
    for got, wanted in zip(fast.encode(texts), expected, strict=True):
        assert np.array_equal(got, wanted)


@settings(max_examples=60)
@given(texts=st.lists(st.sampled_from(["<tool>", "x<tool>y", "(<tool>)", "tool"]), max_size=6))
def test_added_tokens_are_found_inside_pieces(texts: list[str]) -> None:
    tokenizer = make_tokenizer(QWEN)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    fast = make_encoder(tokenizer, 0)
    assert isinstance(fast, PieceEncoder)
    fast._num_checked = 10**9
    joined = [" ".join(texts)]
    expected = ReferenceEncoder(tokenizer, 0).encode(joined)
    assert np.array_equal(fast.encode(joined)[0], expected[0])


def test_pieces_of_an_older_generation_are_not_encoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.corpus.encode._REMEMBERED", 4)
    asked: list[str] = []
    remembered = _Remembered(lambda piece: asked.append(piece) or piece.encode())
    for piece in ["a", "b", "c", "d", "e", "a", "b", "f", "a", "b", "g", "a"]:
        assert remembered[piece] == piece.encode()
    assert asked == ["a", "b", "c", "d", "e", "f", "g"]


def test_every_document_ends_and_spelled_ends_are_text() -> None:
    encoder = make_encoder(TOKENIZERS["gpt2"], 0)
    (ids,) = encoder.encode(["a <|end|> b"])
    assert ids[-1] == 0
    assert (ids == 0).sum() == 1


def test_a_difference_ends_the_use_of_the_fast_way() -> None:
    tokenizer = make_tokenizer(None)
    encoder = PieceEncoder(tokenizer, 0)
    encoder._first["wheel"] = np.array([5, 5, 5], dtype=np.int32).tobytes()
    texts = ["wheel of stone"]
    assert np.array_equal(encoder.encode(texts)[0], ReferenceEncoder(tokenizer, 0).encode(texts)[0])
    assert encoder.differs


def test_memory_of_pieces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.corpus.encode._REMEMBERED", 50)
    encoder = PieceEncoder(TOKENIZERS["gpt2"], 0)
    texts = [f"number{i} " * 3 for i in range(200)]
    expected = ReferenceEncoder(TOKENIZERS["gpt2"], 0).encode(texts)
    assert all(map(np.array_equal, encoder.encode(texts), expected))
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
    assert isinstance(encoder, PieceEncoder)
    (ids,) = encoder.encode(["the wheel"])
    assert np.array_equal(ids, ReferenceEncoder(tokenizer, 0).encode(["the wheel"])[0])
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
