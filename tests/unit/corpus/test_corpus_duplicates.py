"""Duplicates: equal to brute force and to datasketch, and never decided by a later document."""

from __future__ import annotations

import copy
import functools
import random
import sys
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.corpus.config import NearDuplicates
from headrace.corpus.duplicates import (
    EXACT,
    NEAR,
    REVISION,
    SAME_ID,
    DuplicateRules,
    DuplicateSearch,
    IndexedUnit,
)
from headrace.corpus.fingerprints import (
    MinHasher,
    band_keys,
    exact_key,
    fold,
    short_key,
    similarity,
)
from headrace.corpus.signing import FOLDED_CODES, CompiledSigner, PlainSigner
from headrace.corpus.spill import Spill, bucket_of, num_buckets_for
from headrace.corpus.unit_files import INDEX

try:
    from headrace.corpus import _text
except ImportError:
    _text = None

if TYPE_CHECKING:
    from pathlib import Path

NEAR_RULES = NearDuplicates(threshold=0.6, num_perm=64, num_bands=16)
HASHER = MinHasher(num_perm=64, shingle_words=3, seed=1)
VOCABULARY = [f"word{i}" for i in range(400)]

Row = tuple[str, int, str, str]
"""Text, available_at, id, revision key ("" for none)."""


def write_unit(folder: Path, number: int, rows: list[Row]) -> Path:
    place = folder / f"unit{number}"
    place.mkdir(parents=True)
    index = np.zeros(len(rows), dtype=INDEX)
    folded = [fold(text) for text, *_ in rows]
    for row, (_, available_at, doc_id, revision) in enumerate(rows):
        index[row]["text_key"] = np.frombuffer(exact_key(folded[row]), dtype="<u8")
        index[row]["id_key"] = short_key(doc_id)
        index[row]["revision_key"] = short_key(revision) if revision else 0
        index[row]["available_at"] = available_at
        index[row]["row"] = row
    index.tofile(place / "index.bin")
    HASHER.signatures(folded).tofile(place / "signatures.bin")
    return place


def search(
    folder: Path, units: list[list[Row]], *, near: NearDuplicates = NEAR_RULES, keep: str = ""
) -> dict[int, tuple[int, int]]:
    """Ordinal to (kind, the earlier one's ordinal)."""
    indexed, first = [], 0
    for number, rows in enumerate(units):
        place = write_unit(folder, number, rows)
        indexed.append(
            IndexedUnit(place=place, source="s", first_ordinal=first, num_rows=len(rows))
        )
        first += len(rows)
    rules = DuplicateRules(near=near, keep_ids=frozenset([keep]))
    run = DuplicateSearch(indexed, rules, folder / "spill")
    run.run()
    found = {}
    for number in range(len(units)):
        for match in run.matches_of(number):
            found[int(match["ordinal"])] = (int(match["kind"]), int(match["of"]))
        for match in run.revisions_of(number):
            assert match["kind"] == REVISION
    run.close()
    assert not (folder / "spill" / "matches").exists()
    return found


def text(*words: int) -> str:
    return " ".join(VOCABULARY[word] for word in words)


BASE = list(range(60))


def test_the_earliest_of_equal_texts_stays_whatever_its_place(tmp_path: Path) -> None:
    rows: list[Row] = [
        (text(*BASE), 30, "a", ""),
        (text(*BASE).upper(), 10, "b", ""),  # case and white space do not matter
        (text(*BASE).replace(" ", "\n\n"), 20, "c", ""),
        (text(*BASE[::-1]), 5, "d", ""),
    ]
    assert search(tmp_path, [rows[:2], rows[2:]]) == {0: (EXACT, 1), 2: (EXACT, 1)}


def test_near_equal_texts_keep_the_earliest_and_never_a_later_edit(tmp_path: Path) -> None:
    edited = [*BASE[:30], 399, *BASE[31:]]
    rows: list[Row] = [
        (text(*edited), 20, "a", ""),
        (text(*BASE), 10, "b", ""),
        (text(*range(100, 160)), 10, "c", ""),
    ]
    assert search(tmp_path, [rows]) == {0: (NEAR, 1)}


def test_an_id_that_comes_again_with_another_text_is_refused(tmp_path: Path) -> None:
    rows: list[Row] = [
        (text(*BASE), 10, "same", ""),
        (text(*range(100, 160)), 20, "same", ""),
        (text(*BASE), 30, "same", ""),
    ]
    assert search(tmp_path / "a", [rows]) == {1: (SAME_ID, 0), 2: (EXACT, 0)}
    assert search(tmp_path / "b", [rows], keep="s") == {2: (EXACT, 0)}


def test_texts_without_words_are_not_near_each_other(tmp_path: Path) -> None:
    rows: list[Row] = [("--- !!!", 1, "a", ""), ("*** ???", 2, "b", ""), ("--- !!!", 3, "c", "")]
    assert search(tmp_path, [rows]) == {2: (EXACT, 0)}


def made_rows(seed: int, count: int) -> list[Row]:
    """Families of texts with edits, at random times."""
    rng = random.Random(seed)
    families = [[rng.randrange(400) for _ in range(50)] for _ in range(6)]
    rows: list[Row] = []
    for number in range(count):
        words = list(rng.choice(families))
        for _ in range(rng.choice([0, 0, 1, 3, 25])):
            words[rng.randrange(50)] = rng.randrange(400)
        rows.append((text(*words), rng.randrange(100), f"id{number}", ""))
    return rows


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.integers(1, 99))
def test_nothing_later_changes_what_is_kept_before_a_cutoff(
    tmp_path_factory, seed: int, cutoff: int
) -> None:
    rows = made_rows(seed, 40)
    everything = search(tmp_path_factory.mktemp("all"), [rows[:15], rows[15:]])
    before = [number for number, row in enumerate(rows) if row[1] <= cutoff]
    alone = search(tmp_path_factory.mktemp("cut"), [[rows[number] for number in before]])
    dropped = {number for number in everything if rows[number][1] <= cutoff}
    assert {before[number] for number in alone} == dropped
    for number, (_, earlier) in everything.items():
        assert (rows[earlier][1], earlier) < (rows[number][1], number)


def test_matches_equal_brute_force_where_bands_cannot_miss(tmp_path: Path) -> None:
    # One row a band: whatever shares a signature entry is compared.
    near = NearDuplicates(threshold=0.6, num_perm=64, num_bands=64)
    rows = [(t, i, f"id{i}", "") for i, (t, *_) in enumerate(made_rows(7, 30))]
    found = search(tmp_path, [rows], near=near)
    signatures = HASHER.signatures([fold(row[0]) for row in rows])
    for later in range(len(rows)):
        equal = [i for i in range(later) if rows[i][0] == rows[later][0]]
        assert (found.get(later, (0, 0))[0] == EXACT) == bool(equal)
        # Documents that repeat exactly take no part in the near search.
        close = [
            i
            for i in range(later)
            if found.get(i, (0, 0))[0] != EXACT
            and (signatures[i] == signatures[later]).mean() >= 0.6
        ]
        if later not in found:
            assert len(close) == 0 or len(close) > 3  # beyond the first three and the last
        elif found[later][0] == NEAR:
            assert found[later][1] in close


folding = st.text("aAzZ09 \t\n\x1c-_.\xdf\u017f\u0130\u1e9e\ufb03\u0390\u5c0f\u30a2\uac00\U0001f600"
                  "\U00010400\U0001e900\xa0\u3000\u0416", max_size=60)  # fmt: skip


@settings(max_examples=150)
@given(
    texts=st.lists(folding | st.text(max_size=80), min_size=1, max_size=5),
    num_perm=st.sampled_from([1, 16, 21, 112]),
    width=st.integers(1, 6),
)
def test_compiled_fingerprints_are_those_of_the_plain_functions(
    texts: list[str], num_perm: int, width: int
) -> None:
    pytest.importorskip("headrace.corpus._text")
    column = pa.array([*texts, " ".join(texts * 9)], pa.large_string()).slice(1)
    hasher = MinHasher(num_perm=num_perm, shingle_words=width, seed=num_perm)
    got, wanted = compiled_signer(hasher).sign(column), PlainSigner(hasher).sign(column)
    assert np.array_equal(got.keys, wanted.keys)
    assert got.signatures is not None
    assert np.array_equal(got.signatures, wanted.signatures)


@functools.cache
def folds() -> CompiledSigner:
    return CompiledSigner(None)


def compiled_signer(hasher: MinHasher) -> CompiledSigner:
    signer = copy.copy(folds())  # the table of foldings is made once
    signer._native = _text.make_min_hasher(*hasher.parameters())
    signer._num_perm = hasher.num_perm
    return signer


def test_long_texts_are_cut_alike() -> None:
    pytest.importorskip("headrace.corpus._text")
    text = "wheat " * 400_000 + "x" * 2_500_000 + "\u5c0f" * 400_000 + " rye"
    column = pa.array([text, text[7:]], pa.large_string())
    got, wanted = CompiledSigner(HASHER).sign(column), PlainSigner(HASHER).sign(column)
    assert np.array_equal(got.keys, wanted.keys)
    assert np.array_equal(got.signatures, wanted.signatures)


def test_no_character_folds_beyond_the_table() -> None:
    beyond = "".join(map(chr, range(FOLDED_CODES, sys.maxunicode + 1)))
    assert beyond.casefold() == beyond


def test_signatures_are_those_of_datasketch() -> None:
    datasketch = pytest.importorskip("datasketch", minversion="2.0")
    for words in (3, 40, 5000):
        folded = fold(" ".join(f"w{i * i % 997}" for i in range(words)))
        hashes = HASHER.shingle_hashes(folded)
        reference = datasketch.MinHash(num_perm=64, seed=1, hashfunc=int, scheme="affine32")
        reference.update_batch(hashes.tolist())
        assert np.array_equal(reference.hashvalues, HASHER.signature(folded))


def windows(folded: str, width: int) -> set[tuple[str, ...]]:
    words = folded.split()
    if not words:
        return set()
    width = min(width, len(words))
    return {tuple(words[i : i + width]) for i in range(len(words) - width + 1)}


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "d1", "é"]), max_size=40))
def test_shingles_are_the_word_windows_wherever_they_stand(words: list[str]) -> None:
    folded = fold(" ".join(words))
    hashes = HASHER.shingle_hashes(folded)
    expected = windows(folded.decode(), 3)
    assert len(set(hashes.tolist())) == len(expected)
    shifted = HASHER.shingle_hashes(b"  ,,  " + folded + b" .")
    assert np.array_equal(hashes, shifted)


@given(st.lists(st.lists(st.sampled_from(["a", "bb", "ccc", "é", "小麦", "--"]), max_size=9)))
def test_texts_worked_on_together_have_the_signatures_of_each(words: list[list[str]]) -> None:
    folded = [fold(" ".join(text)) for text in words]
    together = HASHER.signatures(folded)
    assert together.shape == (len(words), 64)
    for text, signature in zip(folded, together, strict=True):
        assert np.array_equal(HASHER.signature(text), signature)


def test_long_texts_are_hashed_in_segments_alike() -> None:
    words = [f"w{i}" for i in range(300_000)]
    long = fold(" ".join(words))
    assert len(long) > 1 << 20
    hashes = HASHER.shingle_hashes(long)
    assert hashes.size == len(words) - 2
    middle = fold(" ".join(words[150_000:150_010]))
    assert np.array_equal(HASHER.shingle_hashes(middle), hashes[150_000:150_008])


def test_scripts_without_spaces_have_characters_for_words() -> None:
    first = fold("小麦的价格和黑麦的价格一起变动直到那年冬天的霜冻结束")
    second = fold("小麦的价格和黑麦的价格一起变动直到那年夏天的洪水结束")
    other = fold("本文件与此无关但是同样的长度也没有任何空格在里面出现")
    assert HASHER.shingle_hashes(first).size == 26 - 2
    a, b, c = HASHER.signatures([first, second, other])
    assert similarity(a[None], b[None])[0] > 0.4
    assert similarity(a[None], c[None])[0] < 0.1


def test_estimates_are_near_the_true_similarity() -> None:
    hasher = MinHasher(num_perm=512, shingle_words=1, seed=3)
    for shared in (0, 50, 100, 150, 200):
        first = fold(" ".join(f"a{i}" for i in range(200)))
        second = fold(" ".join(f"a{i}" if i < shared else f"b{i}" for i in range(200)))
        true = shared / (400 - shared)
        pair = hasher.signatures([first, second])
        assert abs(similarity(pair[:1], pair[1:])[0] - true) < 0.1


def test_band_keys_tell_bands_apart() -> None:
    signature = np.tile(np.arange(4, dtype=np.uint32), 16)[None]
    keys = band_keys(signature, 16)
    assert len(set(keys[0].tolist())) == 16


@given(st.lists(st.integers(0, 2**64 - 1), max_size=60), st.sampled_from([1, 2, 8, 64]))
def test_spilled_records_are_the_same_as_held_ones(tmp_path_factory, keys, num_buckets) -> None:
    dtype = np.dtype([("key", "<u8"), ("n", "<i8")])
    folder = tmp_path_factory.mktemp("spill")
    results = []
    for memory in (1 << 20, 0):
        spill = Spill(folder / str(memory), dtype, num_buckets, memory_bytes=memory)
        for n, key in enumerate(keys):
            record = np.array([(key, n)], dtype=dtype)
            spill.add(bucket_of(record["key"], num_buckets), record)
        results.append([bucket.tolist() for bucket in spill])
        spill.close()
    assert results[0] == results[1]
    assert sorted(key for bucket in results[0] for key, _ in bucket) == sorted(keys)


def test_buckets_grow_in_number_with_the_records() -> None:
    dtype = np.dtype([("key", "<u8")])
    assert num_buckets_for(0, dtype) == 1
    assert num_buckets_for(10**7, dtype) == 4
    assert num_buckets_for(10**12, dtype) == 1024
