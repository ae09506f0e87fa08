"""Order, resume, mixing and collation."""

import itertools
import json

import numpy as np
import pytest
import torch

from headrace.batch import IGNORE_INDEX
from headrace.data.batching import LoaderSettings
from headrace.data.loader import (
    RowSet,
    TrainLoader,
    collate,
    evaluation_batches,
)
from headrace.data.packing import RowSettings
from headrace.data.sampler import LoaderState, RowOrder, permutation
from headrace.data.sources import DatasetSource
from headrace.data.tokens import tokenise
from headrace.errors import ConfigError, DataError


@pytest.fixture
def make_set(tmp_path):
    """Datasets of given document lengths; token ids count up, so each token names its place."""
    count = itertools.count()

    def make(lengths, *, weight=None, labels=None, **settings):
        file = tmp_path / f"{next(count)}.jsonl"
        first = itertools.count(100)
        rows = [{"input_ids": [next(first) for _ in range(n)]} for n in lengths]
        if labels is not None:
            rows = [row | {"labels": label} for row, label in zip(rows, labels, strict=True)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        store = tokenise(
            DatasetSource(path=str(file), type="tokens"), None, cache_dir=tmp_path / "cache"
        )
        return RowSet.open(store, RowSettings(**settings), label=file.name, weight=weight)

    return make


def take(loader, num_steps):
    return [loader.next_step() for _ in range(num_steps)]


def ids_of(steps):
    return [row for step in steps for row in step.row_ids]


def test_resume_replays_or_skips_data(make_set):
    """Pitfall 26. Two stops inside epoch 2 give the same stream of rows as none."""
    sets = [make_set([6] * 11, max_length=8), make_set([9, 2, 5] * 4, max_length=8)]
    settings = LoaderSettings(micro_batch_size=2, accumulation=2)
    whole = take(TrainLoader(sets, settings, seed=3), 20)
    loader = TrainLoader(sets, settings, seed=3)
    seen = take(loader, loader.steps_per_epoch + 2)
    for more in (1, 20 - len(seen) - 1):
        state = LoaderState(**json.loads(json.dumps(vars(seen[-1].state))))
        assert state.epoch == 1
        assert state.index > 0
        loader = TrainLoader(sets, settings, seed=3, state=state)
        seen += take(loader, more)
    assert ids_of(seen) == ids_of(whole)
    for a, b in zip(seen, whole, strict=True):
        for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
            assert torch.equal(x.input_ids_BT, y.input_ids_BT)
            assert torch.equal(x.targets_BT, y.targets_BT)


def test_an_epoch_uses_every_row_once_and_epochs_differ(make_set):
    sets = [
        make_set([5] * 7, max_length=8, packing=False),
        make_set([5] * 6, max_length=8, packing=False),
    ]
    loader = TrainLoader(sets, LoaderSettings(micro_batch_size=3), seed=0)
    epochs = [ids_of(take(loader, loader.steps_per_epoch)) for _ in range(2)]
    every = sorted([(0, r) for r in range(7)] + [(1, r) for r in range(6)])
    assert sorted(epochs[0]) == sorted(epochs[1]) == every
    assert epochs[0] != epochs[1]
    other = TrainLoader(sets, LoaderSettings(micro_batch_size=3), seed=1)
    assert ids_of(take(other, other.steps_per_epoch)) != epochs[0]


def test_a_short_last_window_holds_only_what_is_left(make_set):
    """Five micro-batches, accumulation 4: the second step has one micro-batch, not four."""
    rows = make_set([5] * 10, max_length=8, packing=False)
    settings = LoaderSettings(micro_batch_size=2, accumulation=4)
    loader = TrainLoader([rows], settings, seed=0)
    assert loader.steps_per_epoch == 2
    first, second, third = take(loader, 3)
    assert [len(s.micro_batches) for s in (first, second, third)] == [4, 1, 4]
    assert second.num_supervised_tokens == 2 * 4
    assert second.state == LoaderState(seed=0, epoch=1, index=0)
    dropping = LoaderSettings(micro_batch_size=2, accumulation=4, drop_last=True)
    loader = TrainLoader([rows], dropping, seed=0)
    assert loader.steps_per_epoch == 1
    assert [s.state.epoch for s in take(loader, 3)] == [1, 2, 3]
    with pytest.raises(ConfigError, match="dataloader_drop_last"):
        TrainLoader([rows], LoaderSettings(micro_batch_size=11, drop_last=True), seed=0)


def test_the_order_does_not_depend_on_ranks_or_micro_batches(make_set):
    rows = make_set([5] * 24, max_length=8, packing=False)
    layouts = [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)]
    streams = []
    for size, accumulation, ranks in layouts:
        settings = LoaderSettings(micro_batch_size=size, accumulation=accumulation, num_ranks=ranks)
        steps = [take(TrainLoader([rows], settings, seed=5, rank=rank), 5) for rank in range(ranks)]
        assert all(ids_of(s) == ids_of(steps[0]) for s in steps)
        streams.append(ids_of(steps[0]))
        tokens = [
            sorted(
                token
                for rank in range(ranks)
                for batch in steps[rank][k].micro_batches
                for token in batch.input_ids_BT.flatten().tolist()
            )
            for k in range(5)
        ]
        streams.append(tokens)
    assert streams[0::2] == [streams[0]] * len(layouts)
    assert streams[1::2] == [streams[1]] * len(layouts)


def test_weights_are_shares_of_tokens_and_nothing_repeats_early(make_set):
    big = make_set([20] * 50, max_length=20, packing=False, weight=1.0)
    small = make_set([5] * 60, max_length=20, packing=False, weight=3.0)
    loader = TrainLoader([big, small], LoaderSettings(micro_batch_size=1), seed=0)
    # 300 small tokens are 3/4 of 400; an epoch ends with the small set used once.
    assert loader.order.rows_per_epoch == (5, 60)
    ids = ids_of(take(loader, 65 * 10))
    tokens = np.bincount([s for s, _ in ids]) * [20, 5]
    assert tokens[1] / tokens.sum() == pytest.approx(0.75, abs=0.01)
    rows = [r for s, r in ids if s == 0]
    assert sorted(rows) == list(range(50))  # ten epochs of 5: each once before any twice


def test_unshuffled_datasets_keep_their_order():
    plain = RowOrder(num_rows=(3, 2), num_tokens=(30, 20), weights=None, seed=0, shuffle=False)
    sets, rows = plain.epoch(1)
    assert list(zip(sets.tolist(), rows.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]
    mixed = RowOrder(num_rows=(4, 9), num_tokens=(40, 90), weights=(2, 1), seed=0, shuffle=False)
    sets, rows = mixed.epoch(1)
    assert sets.tolist() == [0, 1, 0, 0, 1, 0]
    assert rows[sets == 1].tolist() == [2, 3]  # goes on where epoch 0 stopped


def test_the_shuffle_is_pinned():
    """A change here would break the resume of every run in progress."""
    assert permutation(8, 42, "mix", 0).tolist() == [0, 3, 7, 5, 6, 2, 1, 4]


def test_weights_for_some_datasets_only_are_refused(make_set):
    sets = [make_set([5], max_length=8, weight=1.0), make_set([5], max_length=8)]
    with pytest.raises(ConfigError, match=r"have none: '1\.jsonl'"):
        TrainLoader(sets, LoaderSettings(micro_batch_size=1), seed=0)
    zero = make_set([5], max_length=8, weight=0.0)
    with pytest.raises(ConfigError, match="positive share"):
        TrainLoader([zero], LoaderSettings(micro_batch_size=1), seed=0)


def test_a_dataset_without_a_pair_of_tokens_is_refused(make_set):
    with pytest.raises(DataError, match="no document to learn from"):
        make_set([1, 1], max_length=8)
    with pytest.raises(DataError, match="excess_length drop"):
        make_set([9], max_length=8, excess_length="drop")


def test_targets_never_cross_a_document(make_set):
    rows = make_set([3, 4, 6], max_length=8)
    batch, lengths = collate(
        [(rows, r) for r in range(rows.plan.num_rows)], LoaderSettings(micro_batch_size=2)
    )
    assert lengths.tolist() == [3, 4, 6]
    assert batch.input_ids_BT.shape == (2, 8)
    assert batch.input_ids_BT[0].tolist() == [100, 101, 102, 103, 104, 105, 106, 0]
    assert batch.targets_BT[0].tolist() == [101, 102, -100, 104, 105, 106, -100, -100]
    assert batch.position_ids_BT[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 8, 14, 16]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.num_supervised_tokens == 2 + 3 + 5


def test_unpacked_rows_are_padded_on_the_right(make_set):
    rows = make_set([3, 9], max_length=12, packing=False)
    settings = LoaderSettings(micro_batch_size=2, pad_to_multiple_of=5, pad_token_id=7)
    batch, lengths = collate([(rows, 0), (rows, 1)], settings)
    assert batch.cu_seqlens is None
    assert lengths.tolist() == [3, 9]
    assert batch.input_ids_BT[0].tolist() == [100, 101, 102] + [7] * 7
    assert batch.targets_BT[0].tolist() == [101, 102] + [-100] * 8
    assert batch.position_ids_BT.tolist() == [list(range(10))] * 2
    # Never longer than max_length, whatever the multiple.
    wide = LoaderSettings(micro_batch_size=2, pad_to_multiple_of=64)
    assert collate([(rows, 0)], wide)[0].input_ids_BT.shape == (1, 12)


def test_eos_is_supervised_even_when_it_is_the_padding(tmp_path, tokenizer, sentences):
    """Pitfall 24. Decode what is supervised: all but the first, EOS too, shifted by none."""
    tokenizer.pad_token = tokenizer.eos_token
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))
    store = tokenise(DatasetSource(path=str(file)), tokenizer, cache_dir=tmp_path / "cache")
    settings = LoaderSettings(micro_batch_size=8, pad_token_id=tokenizer.pad_token_id)
    for packing in (True, False):
        rows = RowSet.open(store, RowSettings(max_length=64, packing=packing), label="a")
        seen = []
        for batch in evaluation_batches(rows, settings):
            flat = batch.targets_BT.flatten()
            inputs = batch.input_ids_BT.flatten()
            supervised = flat != IGNORE_INDEX
            # A supervised position predicts what stands after it.
            following = torch.cat([inputs[1:], inputs[:1]])
            assert torch.equal(flat[supervised], following[supervised])
            ends = (flat == tokenizer.eos_token_id).nonzero().flatten()
            positions = np.where(supervised)[0]
            runs = np.split(positions, np.where(np.diff(positions) > 1)[0] + 1)
            seen += [tokenizer.decode(flat[run].tolist()) for run in runs]
            assert len(ends) > 0
        firsts = [tokenizer.decode(tokenizer(text)["input_ids"][:1]) for text in sentences]
        expected = [
            text[len(first) :] + tokenizer.eos_token
            for text, first in zip(sentences, firsts, strict=True)
        ]
        assert sorted(seen) == sorted(expected)


def test_labels_supervise_what_they_name(make_set):
    rows = make_set([5], labels=[[-100, -100, 102, 103, 104]], max_length=8)
    batch, _ = collate([(rows, 0)], LoaderSettings(micro_batch_size=1))
    assert batch.targets_BT[0].tolist() == [-100, 102, 103, 104, -100, -100, -100, -100]


@pytest.mark.parametrize("packing", [{"packing": False}, {"packing_strategy": "wrapped"}, {}])
def test_rows_that_supervise_nothing_are_left_out(make_set, monkeypatch, packing):
    """A step of such rows has no mean loss: the run would end at it."""
    monkeypatch.setattr("headrace.data.supervision._WINDOW", 5)
    labels = [[-100] * 20 + [120, 121], [-100, 123, 124], [-100] * 15 + [140, 141]]
    rows = make_set([22, 3, 17], labels=labels, max_length=8, **packing)
    batches = [
        collate([(rows, row)], LoaderSettings(micro_batch_size=1))[0]
        for row in range(rows.plan.num_rows)
    ]
    assert all(batch.num_supervised_tokens for batch in batches)
    targets = [batch.targets_BT[batch.targets_BT >= 0] for batch in batches]
    assert sorted(torch.cat(targets).tolist()) == [120, 121, 123, 124, 140, 141]
    assert rows.plan.num_dropped_tokens
    assert rows.plan.num_tokens + rows.plan.num_dropped_tokens <= 42


def test_data_in_which_nothing_is_left_to_predict_is_refused(make_set):
    labels = [[-100] * 9 + [109]]
    with pytest.raises(DataError, match="no document to learn from") as caught:
        make_set([10], labels=labels, max_length=8, excess_length="truncate")
    assert "supervised" in caught.value.remedy


def test_evaluation_covers_every_row_once_over_ranks(make_set):
    rows = make_set([5] * 7, max_length=8, packing=False)
    for ranks in (1, 2, 3):
        settings = LoaderSettings(micro_batch_size=2, num_ranks=ranks)
        firsts = sorted(
            first
            for rank in range(ranks)
            for batch in evaluation_batches(rows, settings, rank=rank)
            for first in batch.input_ids_BT[:, 0].tolist()
        )
        assert firsts == [100 + 5 * k for k in range(7)]
