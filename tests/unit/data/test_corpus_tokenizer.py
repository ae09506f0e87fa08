"""Tokens of a corpus under another tokenizer than its own: trained on, they would mean nothing."""

import json

import pytest

from headrace.data.corpus_tokenizer import check_corpus_tokenizer
from headrace.data.sources import DatasetSource
from headrace.errors import DataError


@pytest.fixture
def corpus(tmp_path, tokenizer):
    folder = tmp_path / "corpus" / "2014"
    (folder / "tokens").mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def swap_two_ids(folder):
    """The same size and the same strings, two of them with each other's id."""
    file = folder / "tokenizer" / "tokenizer.json"
    data = json.loads(file.read_text())
    vocabulary = data["model"]["vocab"]
    special = {entry["content"] for entry in data["added_tokens"]}
    first, second = [token for token in vocabulary if token not in special][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("path", ["tokens", "tokens/*.parquet", "../*/tokens"])
def test_ids_that_mean_something_else_are_refused(corpus, tokenizer, path):
    source = DatasetSource(path=str(corpus / path), type="tokens", name="news")
    check_corpus_tokenizer(source, tokenizer)
    swap_two_ids(corpus)
    with pytest.raises(DataError, match=r"'news' was tokenised with another tokenizer.* 2 of "):
        check_corpus_tokenizer(source, tokenizer)


def test_further_tokens_of_the_model_are_no_difference(corpus, tokenizer):
    tokenizer.add_tokens(["frost of that winter"])
    check_corpus_tokenizer(DatasetSource(path=str(corpus / "tokens"), type="tokens"), tokenizer)


def test_tokens_without_a_corpus_around_them_are_taken(tmp_path, corpus, tokenizer):
    swap_two_ids(corpus)
    (corpus / "manifest.json").unlink()
    check_corpus_tokenizer(DatasetSource(path=str(corpus / "tokens"), type="tokens"), tokenizer)


def test_a_tokenizer_that_cannot_be_read_is_named(corpus, tokenizer):
    (corpus / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        check_corpus_tokenizer(DatasetSource(path=str(corpus / "tokens"), type="tokens"), tokenizer)
