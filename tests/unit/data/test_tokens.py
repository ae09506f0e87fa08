"""The token cache: what a text becomes, when it is made again, and what is refused."""

import errno
import json
import os

import numpy as np
import pytest

from headrace.data import tokens as tokens_module
from headrace.data.sources import DatasetSource
from headrace.data.tokens import tokenise
from headrace.errors import CapacityError, ConfigError, DataError


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetSource(path=str(path), type="text" if "text" in rows[0] else "tokens")


def documents(store):
    return [d.tolist() for d in np.split(store.tokens, store.offsets[1:-1])]


def test_text_ends_with_eos_once(tmp_path, cache, tokenizer, sentences):
    source = write_jsonl(
        tmp_path / "a.jsonl",
        [{"text": sentences[0]}, {"text": ""}, {"text": sentences[1] + tokenizer.eos_token}],
    )
    store = tokenise(source, tokenizer, cache_dir=cache)
    eos = tokenizer.eos_token_id
    plain = [tokenizer(text)["input_ids"] for text in sentences[:2]]
    assert documents(store) == [[*ids, eos] for ids in plain]
    assert store.labels is None
    assert store.max_token_id == max(max(ids) for ids in documents(store))


def test_the_cache_is_keyed_by_content(tmp_path, cache, tokenizer, sentences, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in sentences])
    first = tokenise(source, tokenizer, cache_dir=cache)

    def forbidden(*_args, **_kwargs):
        raise AssertionError("the source was read again")

    with monkeypatch.context() as patched:
        patched.setattr(tokens_module, "encode_parts", forbidden)
        assert tokenise(source, tokenizer, cache_dir=cache).key == first.key
        # Another name, same bytes: the same store.
        (tmp_path / "b.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
        other = DatasetSource(path=str(tmp_path / "b.jsonl"))
        assert tokenise(other, tokenizer, cache_dir=cache).key == first.key
    changed = (tmp_path / "a.jsonl").read_text().replace("March", "April")
    (tmp_path / "a.jsonl").write_text(changed)
    assert tokenise(source, tokenizer, cache_dir=cache).key != first.key
    tokenizer.add_tokens(["frost of that winter"])
    assert tokenise(other, tokenizer, cache_dir=cache).key != first.key


def test_a_store_that_lost_bytes_is_made_again(tmp_path, cache, tokenizer, sentences):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in sentences])
    store = tokenise(source, tokenizer, cache_dir=cache)
    whole = documents(store)
    os.truncate(store.folder / "tokens.bin", 8)
    assert documents(tokenise(source, tokenizer, cache_dir=cache)) == whole


def test_a_store_that_comes_into_sight_late_stays(tmp_path, cache, tokenizer, monkeypatch):
    """Another machine wrote it and reads it; a network shows it some time after."""
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    first = tokenise(source, tokenizer, cache_dir=cache)
    file = (first.folder / "tokens.bin").stat().st_ino
    real, hidden = tokens_module._open, [None] * 3
    monkeypatch.setattr(tokens_module, "_open", lambda f: hidden.pop() if hidden else real(f))
    second = tokenise(source, tokenizer, cache_dir=cache)
    assert second.key == first.key
    assert (second.folder / "tokens.bin").stat().st_ino == file
    assert not list((cache / "tokens").glob(".writing-*"))


def test_labels_may_begin_late(tmp_path, cache):
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}]
    store = tokenise(write_jsonl(tmp_path / "a.jsonl", rows), None, cache_dir=cache)
    assert store.tokens.tolist() == [1, 2, 3, 4, 5]
    assert store.labels.tolist() == [1, 2, -100, 4, 5]


def test_a_tokenizer_without_eos_is_refused(tmp_path, cache, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token") as caught:
        tokenise(source, tokenizer, cache_dir=cache)
    assert "eos_token:" in caught.value.remedy
    with pytest.raises(DataError, match="there is no tokenizer"):
        tokenise(source, None, cache_dir=cache)


@pytest.mark.parametrize("row", [{"text": ""}, {"input_ids": []}])
def test_an_empty_dataset_is_refused(tmp_path, cache, tokenizer, row):
    source = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match="is empty"):
        tokenise(source, tokenizer, cache_dir=cache)
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="is empty"):
        tokenise(source, tokenizer, cache_dir=cache)


def test_ids_past_the_vocabulary_name_the_document(tmp_path, cache):
    rows = [{"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3, 99]}]
    store = tokenise(write_jsonl(tmp_path / "a.jsonl", rows), None, cache_dir=cache)
    store.check_vocabulary(100, "a")
    with pytest.raises(DataError, match=r"document 2 .*vocabulary of 99"):
        store.check_vocabulary(99, "a")


def test_a_bad_row_and_a_full_disk_leave_nothing(tmp_path, cache, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [-1]}])
    with pytest.raises(DataError):
        tokenise(source, None, cache_dir=cache)
    source = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}])

    def full(self, chunk):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tokens_module.StoreWriter, "append", full)
        with pytest.raises(CapacityError, match="filled up"):
            tokenise(source, None, cache_dir=cache)
    assert [p.name for p in (cache / "tokens").iterdir()] == ["digests"]
    assert tokenise(source, None, cache_dir=cache).num_documents == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path, tokenizer, sentences):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": sentences[0]}) + "\n")
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match="data_cache_dir") as caught:
        tokenise(DatasetSource(path=str(path)), tokenizer, cache_dir=taken)
    assert str(taken) in str(caught.value)
